"""Codes of ``nereusc import`` (nereus.lang.importers). The first file of each example is the one imported."""

from __future__ import annotations

from nereus.lang.catalog.entry import CodeEntry

_RUN = "python3 -m verl.trainer.main_ppo "
_MODEL = "algorithm.adv_estimator=grpo \\\n  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\\n  "
_ROLLOUT = "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\\n "
_FINE = _RUN + _MODEL + _ROLLOUT
_RESOLVE = "`python3 -m verl.trainer.main_ppo ... --cfg job --resolve` prints the resolved configuration."


def _script(code: str, title: str, cause: str, text: str, fix: str, command: str = "import") -> CodeEntry:
    return CodeEntry(code=code, title=title, cause=cause, example={"launch.sh": text}, command=command, fix=fix)


ENTRIES: tuple[CodeEntry, ...] = (
    _script(
        "NRS2501",
        "the launch script cannot be read",
        "A quote, `${`, `$((` or array is opened and never closed, something is nested too deeply, or the file is far "
        "too large for a launch script. bash would refuse it, too.",
        f"{_FINE} trainer.project_name='unfinished\n",
        "Close what the caret points at.",
    ),
    _script(
        "NRS2502",
        "no RL training is launched here",
        "The file starts no RL trainer of verl: it trains supervised, generates, evaluates or converts, or the command "
        "stands in another file. Functions that are never called do not count.",
        "torchrun -m verl.trainer.sft_trainer data.train_batch_size=64\n",
        "Give the script that holds the command, or the resolved configuration. " + _RESOLVE,
    ),
    _script(
        "NRS2503",
        "which training command runs is not certain",
        "The script starts several trainings, of which the first is imported, or the command stands under a condition "
        "that depends on files or on what other commands print.",
        f"{_FINE} trainer.nnodes=1\n{_FINE} trainer.nnodes=2\n",
        "Put the command that you mean into a script of its own.",
    ),
    _script(
        "NRS2504",
        "a value that the layout needs is not in the script",
        "The value comes from the environment, from the output of a command, from an argument, or from a branch that "
        "only a run decides. Scripts are read, never executed, so verl's default stands in.",
        f"{_FINE} trainer.nnodes=$NUM_WORKERS\n",
        "Set the variable in the script, write the value, or (for the nodes) give --nodes.",
    ),
    _script(
        "NRS2505",
        "a value is of the wrong kind",
        "A degree, length or count is no whole number, a share lies outside 0 to 1, or a switch is neither True nor "
        "False. verl would refuse it, or do something else than it says.",
        f"{_FINE} actor_rollout_ref.rollout.tensor_model_parallel_size=two\n",
        "Correct the value.",
    ),
    _script(
        "NRS2506",
        "the model's shape is not known",
        "The name in the path matches no preset. Models are matched by name, without vendor, tuning and date; vision "
        'models are never taken for the text model of the same size. The plan says `hf("config.json")` there.',
        f"{_RUN} {_ROLLOUT} algorithm.adv_estimator=grpo actor_rollout_ref.model.path=google/gemma-2-2b-it\n",
        "Put the model's config.json beside the plan, or write the preset of a model with the same shape.",
    ),
    _script(
        "NRS2507",
        "a configuration file is not read",
        "The command names a configuration other than verl's own, or the file has a `defaults` list. What those files "
        "set is not seen; verl's own defaults stand in.",
        f"{_FINE} --config-name=my_multiturn_grpo\n",
        "Import the resolved configuration instead. " + _RESOLVE,
    ),
    _script(
        "NRS2508",
        "the plan describes something near, not this",
        "The launch uses what a plan does not express: some kinds of LoRA, an engine or training backend without a "
        "description, or an unusual optimizer. The label says what is written instead.",
        f"{_FINE} actor_rollout_ref.rollout.name=hf\n",
        "Read the label; memory figures for this stage are approximate. Edit the plan where you know better.",
    ),
    _script(
        "NRS2509",
        "actor and critic differ where a plan has one value",
        "verl lets the critic have a mini batch or number of epochs of its own; a plan's workload has one.",
        f"{_RUN} actor_rollout_ref.model.path=Qwen/Qwen2.5-7B critic.model.path=Qwen/Qwen2.5-7B {_ROLLOUT} "
        "critic.ppo_micro_batch_size_per_gpu=4 critic.ppo_mini_batch_size=128\n",
        "The actor's value is taken. Nothing to do unless the critic's matters for the comparison.",
    ),
    _script(
        "NRS2510",
        "an option of the import is not usable",
        "`--gpu` names no data sheet, or `--nodes` is not positive.",
        f"{_FINE}\n",
        "Take one of the ids that the note lists.",
        command="import verl --gpu h100-sxm",
    ),
    CodeEntry(
        code="NRS2511",
        title="the configuration is no YAML",
        cause="The file is read as a resolved configuration because of its name or its first keys, and is none.",
        example={"config.yaml": "trainer: {nnodes: 2\ndata: [\n"},
        command="import",
        fix="Give the file that Hydra wrote. " + _RESOLVE,
    ),
    CodeEntry(
        code="NRS2512",
        title="pyyaml is not installed",
        cause="YAML is read with pyyaml, which the core installation does not need. The example shows it only there.",
        example={"config.yaml": "actor_rollout_ref:\n  model: {path: Qwen/Qwen2.5-7B}\n"},
        command="import",
        fix="`pip install pyyaml`, or give the configuration as JSON, or the launch script.",
    ),
    _script(
        "NRS2513",
        "the launch describes a layout that check refuses",
        "The plan is written as the launch has it, but its degrees do not divide the GPUs, a mini batch does not come "
        "out, or the model cannot be cut so. The notes list what `nereusc check` says about it.",
        f"{_FINE} trainer.n_gpus_per_node=6 actor_rollout_ref.rollout.tensor_model_parallel_size=4\n",
        "Run `nereusc check` on the plan, which points at each place, and correct launch or plan.",
    ),
    _script(
        "NRS2514",
        "the critic's pipeline split is assumed",
        "The layers do not divide over the critic's pipeline stages. The launch splits the actor, which is the same "
        "model, unevenly, and says nothing about the critic.",
        f"{_RUN} --config-name=ppo_megatron_trainer actor_rollout_ref.rollout.name=vllm trainer.nnodes=4 "
        "actor_rollout_ref.model.path=Moonlight-16B-A3B critic.model.path=Moonlight-16B-A3B "
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 "
        "critic.megatron.pipeline_model_parallel_size=2 "
        "+actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=13\n",
        "Write `pp_split` of critic.train if it is cut otherwise.",
    ),
    _script(
        "NRS2517",
        "the model is guessed from another variable",
        "The model's path is a variable that the script never sets, while all other variables that name a model name "
        "the same one.",
        f"HF_MODEL=/data/Qwen2.5-7B-Instruct\n{_RUN} {_ROLLOUT} algorithm.adv_estimator=grpo "
        "actor_rollout_ref.model.path=$LLM\n",
        "Set the variable in the script if it is another model.",
    ),
    _script(
        "NRS2518",
        "settings stand behind the end of the command",
        "A line before them does not end in a backslash (or has a blank or a comment behind it), so bash ends the "
        "command there and verl never sees the rest.",
        f"{_FINE} trainer.nnodes=1\n  trainer.n_gpus_per_node=4\n",
        "End the line before with a backslash.",
    ),
)
