"""verl's settings -> plan text: cluster and pools, models, workload, stages."""

from __future__ import annotations

import math
from dataclasses import replace

from nereus.ir.arch import Arch
from nereus.ir.diagnostic import Severity
from nereus.lang.importers.hydra import Config
from nereus.lang.importers.plan_text import Block, Entry, write
from nereus.lang.importers.result import Reports
from nereus.lang.importers.verl_launch import FULLY_ASYNC, ONE_STEP_OFF, Launch
from nereus.lang.importers.verl_layout import (
    Worker,
    add_batch,
    add_layout,
    add_memory,
    data_parallel,
    pipeline_split,
    warn_mismatch,
)
from nereus.lang.importers.verl_lora import lora_block, lora_rank
from nereus.lang.importers.verl_models import Models
from nereus.lang.importers.verl_pools import DEFAULT_GPU, Nodes, Pool, read_pools

_AOR = "actor_rollout_ref"
_ACTOR, _REF, _ROLLOUT = f"{_AOR}.actor", f"{_AOR}.ref", f"{_AOR}.rollout"


class PlanWriter:
    """Builds the text once; everything that it must assume goes into a comment or a diagnostic."""

    def __init__(self, launch: Launch, reports: Reports, *, gpu: str | None, nodes: int | None) -> None:
        self.launch = launch
        self.config: Config = launch.config
        self.reports = reports
        self.nodes_asked = nodes
        comment = "GPU type is not in the launch: assumed, --gpu ID sets it" if gpu is None else "--gpu"
        self.cluster = Nodes(gpu=gpu or DEFAULT_GPU, gpu_comment=comment)
        self.models = Models(launch=launch)

    def text(self, header: list[str]) -> str:
        config = self.config
        self._global_remarks()
        pools = read_pools(self.launch, self.nodes_asked, self.cluster)
        train = pools.train
        actor = self.models.declare("actor", f"{_AOR}.model.path", "")
        adapted = self._adapter(f"{_AOR}.model", actor, "")
        has_ref = self._has_reference() and (adapted or not self._lora_rank())
        if has_ref:
            without = "  lora = none" if adapted else ""
            self.models.entries.append(Entry(text=f"model ref = actor {{ frozen = true{without} }}"))
        has_critic = self._has_critic()
        critic = self.models.declare("critic", "critic.model.path", "{ head = value }") if has_critic else None
        if has_critic:
            self._adapter("critic.model", critic, "head = value")
        has_reward = config.flag("reward_model.enable")
        if has_reward:
            self.models.declare("reward", "reward_model.model.path", "{ head = value  frozen = true }")
        stages: list[Block] = [self._generate(pools.generate)]
        trainer, trainer_layout = self._train(
            "actor", _ACTOR, f"{_ACTOR}.fsdp_config", f"{_ACTOR}.megatron", train, actor
        )
        stages.append(trainer)
        stages.append(self._logprob(train))
        if has_ref and adapted:
            stages.append(self._bare_actor(train))
        elif has_ref:
            stages.append(self._reference(train, actor, trainer_layout))
        if has_critic:
            fsdp = "critic.model.fsdp_config"
            if any(key.startswith("critic.fsdp.") for key in config.settings):
                fsdp = "critic.fsdp"
            stages.extend(self._critic(pools.critic, critic, fsdp, actor))
        if has_reward:
            stages.append(self._reward(pools.reward))
        workload = self._workload(has_critic)
        cluster = ["cluster {"]
        for block in self.cluster.entries:
            inner = write((), [block]).splitlines()
            cluster.extend(f"  {line}" for line in inner)
        cluster.append("}")
        body = write((), [*self.models.entries, None, workload, *(item for stage in stages for item in (None, stage))])
        head = "".join(f"# {line}\n" for line in header)
        return head + "\n".join(cluster) + "\n\n" + body

    # -- roles ---------------------------------------------------------------------------------------------------------

    def _has_reference(self) -> bool:
        return self.config.flag(f"{_ACTOR}.use_kl_loss") or self.config.flag("algorithm.use_kl_in_reward")

    def _has_critic(self) -> bool:
        if self.config.text("critic.enable") is not None:
            return self.config.flag("critic.enable")
        return (self.config.text("algorithm.adv_estimator") or "gae").lower() == "gae"

    def _lora_rank(self) -> int:
        return lora_rank(self.config, f"{_AOR}.model")

    def _adapter(self, prefix: str, arch: Arch | None, body: str) -> bool:
        """Gives the model declared last its adapter. False where it has none, or one that a plan does not express."""
        if not (rank := lora_rank(self.config, prefix)):
            return False
        text, why = lora_block(self.config, prefix, arch)
        if text is not None:
            last = self.models.entries[-1]
            head = last.text.partition(" {")[0]
            self.models.entries[-1] = replace(last, text=f"{head} {{ {body}{'  ' if body else ''}{text} }}")
            return True
        bare = prefix.startswith(_AOR)
        self.reports.add(
            "NRS2508",
            Severity.WARNING,
            f"LoRA (rank {rank}) is not carried over, {why}: the plan describes training of all parameters",
            self.config.place(f"{prefix}.lora_rank") or self.config.place(f"{prefix}.lora.rank"),
            label="with adapters the reference is the base model itself, so there is no ref stage" if bare else "",
        )
        return False

    # -- workload ------------------------------------------------------------------------------------------------------

    def _workload(self, has_critic: bool) -> Block:
        config, kind = self.config, self.launch.kind
        block = Block(header="workload")
        block.add("algorithm", *self._algorithm(has_critic))
        samples = max(1, config.integer(f"{_ROLLOUT}.n", least=1) or 1)
        mini = max(1, config.integer(f"{_ACTOR}.ppo_mini_batch_size", least=1) or 256)
        epochs = max(1, config.integer(f"{_ACTOR}.ppo_epochs", least=1) or 1)
        prompts = config.integer("data.train_batch_size", least=0) or 0
        prompts_note = self.config.origin("data.train_batch_size", "")
        if kind == FULLY_ASYNC:
            require = max(1, config.integer("async_training.require_batches", least=1) or 1)
            trigger = max(1, config.integer("async_training.trigger_parameter_sync_step", least=1) or 1)
            threshold = config.number("async_training.staleness_threshold") or 0.0
            staleness = max(0, math.ceil(min(threshold, 1e6)))
            partial = "true" if config.flag("async_training.partial_rollout") else "false"
            sync = f"sync_every = {trigger * require * epochs} updates"
            block.add(
                "mode",
                f"async {{ staleness = {staleness}  {sync}  partial = {partial} }}",
                f"staleness_threshold {threshold:g} as whole versions; {trigger} trainer steps between weight syncs",
            )
            prompts = mini * require
            prompts_note = f"streamed: the trainer takes {require} x ppo_mini_batch_size prompts at once"
        elif kind == ONE_STEP_OFF:
            updates = max(1, (prompts or mini) // mini) * epochs
            block.add(
                "mode",
                f"async {{ staleness = 1  sync_every = {updates} updates }}",
                "one step off: weights are synchronised once per RL step",
            )
        else:
            block.add("mode", "sync")
        if prompts <= 0:
            prompts, prompts_note = mini, "train_batch_size is 0: one mini batch"
        block.add("prompts", prompts, prompts_note)
        block.add("samples", samples, "" if config.written(f"{_ROLLOUT}.n") else "rollout.n, verl's default")
        mini_note = f"ppo_mini_batch_size counts prompts: {mini} x {samples}" if samples > 1 else ""
        block.add("mini_batch", mini * samples, mini_note)
        block.add("epochs", epochs)
        prompt = config.integer("data.max_prompt_length", least=1) or 512
        response = config.integer("data.max_response_length", least=1) or 512
        block.add("prompt_len", prompt, "the longest allowed: what is observed is not in a launch")
        block.add("response_len", response, "assumed: the promise; write what you observe")
        block.add("max_response", response)
        if has_critic:
            for name in ("ppo_mini_batch_size", "ppo_epochs"):
                warn_mismatch(config, f"{_ACTOR}.{name}", f"critic.{name}", name)
        return block

    def _algorithm(self, has_critic: bool) -> tuple[str, str]:
        config = self.config
        estimator = (config.text("algorithm.adv_estimator") or "gae").lower()[:60]
        loss = (config.text(f"{_ACTOR}.policy_loss.loss_mode") or "").lower()
        if loss in ("gspo", "gmpo"):
            return loss, f"adv_estimator {estimator} with the loss of {loss}"
        if estimator in ("grpo", "rloo", "remax"):
            return estimator, ""
        if estimator.startswith("reinforce_plus_plus"):
            return "reinforce", f"adv_estimator {estimator}"
        if estimator == "gae":
            return "ppo", self.config.origin("algorithm.adv_estimator", "adv_estimator gae")
        return "ppo" if has_critic else "grpo", f"adv_estimator {estimator}: the nearest that has the same models"

    # -- stages --------------------------------------------------------------------------------------------------------

    def _generate(self, pool: Pool) -> Block:
        config = self.config
        block = Block(header="stage actor.generate")
        self._engine(block, f"{_ROLLOUT}.name")
        block.add("on", pool.devices)
        self._engine_degrees(block, _ROLLOUT)
        expert = config.integer(f"{_ROLLOUT}.expert_parallel_size", least=1) or 1
        if expert > 1:
            block.add("ep", expert, "the engine's expert parallelism (over its tp x dp ranks)")
        self._mem(block, _ROLLOUT)
        if self.launch.kind in (ONE_STEP_OFF, FULLY_ASYNC):
            block.add("idle", "resident", "generation never sleeps in asynchronous mode")
        elif config.flag(f"{_ROLLOUT}.free_cache_engine"):
            block.add("idle", "discard", "free_cache_engine: the engine sleeps, its weights come with the next sync")
        return block

    def _engine(self, block: Block, key: str) -> None:
        name = (self.config.text(key) or "").lower()
        if name in ("vllm", "sglang"):
            block.add("engine", name)
        elif not name:
            block.add("engine", "vllm", f"{key} is not set there: assumed")
        else:
            block.add("engine", "vllm", f"`{name[:40]}` there")
            self.reports.add(
                "NRS2508",
                Severity.WARNING,
                f"the engine `{name[:40]}` has no description of its own here",
                self.config.place(key),
                label="described as vllm with the same degrees",
            )

    def _engine_degrees(self, block: Block, prefix: str) -> None:
        config = self.config
        key = f"{prefix}.tensor_model_parallel_size"
        block.add("tp", config.integer(key, least=1) or 2, self.config.origin(key, ""))
        if (pp := config.integer(f"{prefix}.pipeline_model_parallel_size", least=1) or 1) > 1:
            block.add("pp", pp)

    def _mem(self, block: Block, prefix: str) -> None:
        key = f"{prefix}.gpu_memory_utilization"
        share = self.config.number(key)
        if share is not None and 0 < share <= 1:
            block.add("mem", f"{share:.4f}".rstrip("0").rstrip("."), self.config.origin(key, "gpu_memory_utilization"))
        elif share is not None:
            self.reports.add(
                "NRS2505", Severity.ERROR, f"`{key}` is {share:g}, not a share between 0 and 1", self.config.place(key)
            )

    def _train(
        self, model: str, role: str, fsdp: str, megatron: str, pool: Pool, arch: Arch | None
    ) -> tuple[Block, dict[str, str]]:
        """The training stage and its layout (degrees and sharding), which other stages may share."""
        config = self.config
        worker = self._worker(role, fsdp, megatron, trains=True)
        block = Block(header=f"stage {model}.train")
        block.add("on", pool.devices)
        add_layout(block, config, worker, pool.gpus, arch)
        layout = block.keys()
        dp = data_parallel(config, worker, pool.gpus)
        add_batch(
            block,
            config,
            dynamic=f"{role}.use_dynamic_bsz",
            tokens=f"{role}.ppo_max_token_len_per_gpu",
            micro=f"{role}.ppo_micro_batch_size_per_gpu",
            legacy=f"{role}.ppo_micro_batch_size",
            dp=dp,
        )
        recompute = f"{_AOR}.model" if model == "actor" else "critic.model"
        add_memory(block, config, worker, f"{recompute}.enable_gradient_checkpointing")
        return block, layout

    def _worker(self, role: str, fsdp: str, megatron: str, *, trains: bool) -> Worker:
        on_megatron = self.config.text(f"{role}.strategy") == "megatron"
        return Worker(role=role, engine=megatron if on_megatron else fsdp, megatron=on_megatron, trains=trains)

    def _logprob(self, pool: Pool) -> Block:
        block = Block(header="stage actor.logprob")
        block.add("with", "actor.train")
        worker = self._worker(_ACTOR, f"{_ACTOR}.fsdp_config", f"{_ACTOR}.megatron", trains=True)
        self._forward_batch(block, f"{_ROLLOUT}.log_prob", data_parallel(self.config, worker, pool.gpus))
        return block

    def _forward_batch(self, block: Block, prefix: str, dp: int) -> None:
        add_batch(
            block,
            self.config,
            dynamic=f"{prefix}_use_dynamic_bsz",
            tokens=f"{prefix}_max_token_len_per_gpu",
            micro=f"{prefix}_micro_batch_size_per_gpu",
            legacy=f"{prefix}_micro_batch_size",
            dp=dp,
        )

    def _bare_actor(self, pool: Pool) -> Block:
        """With adapters verl switches them off instead of keeping a second copy."""
        block = Block(header="stage ref.infer")
        block.add("with", "actor.train", "the actor with its adapter switched off")
        worker = self._worker(_ACTOR, f"{_ACTOR}.fsdp_config", f"{_ACTOR}.megatron", trains=True)
        self._forward_batch(block, f"{_ROLLOUT}.log_prob", data_parallel(self.config, worker, pool.gpus))
        return block

    def _reference(self, pool: Pool, arch: Arch | None, actor_layout: dict[str, str]) -> Block:
        """verl holds the reference as a second module in the actor's worker processes."""
        config = self.config
        worker = self._worker(_REF, f"{_REF}.fsdp_config", f"{_REF}.megatron", trains=False)
        own = Block(header="stage ref.infer")
        own.add("on", pool.devices)
        add_layout(own, config, worker, pool.gpus, arch)
        layout = own.keys()
        offload = config.flag(f"{worker.engine}.param_offload")
        block = own
        if all(layout.get(k) == actor_layout.get(k) for k in (layout.keys() | actor_layout.keys()) - {"zero"}):
            block = Block(header="stage ref.infer")
            block.add("with", "actor.train", "a second module in the actor's processes, same layout")
            if offload:
                block.add("swap", "host", "ref param_offload")
        elif offload:
            block.add("idle", "offload", "ref param_offload")
        self._forward_batch(block, f"{_REF}.log_prob", data_parallel(config, worker, pool.gpus))
        return block

    def _critic(self, pool: Pool, arch: Arch | None, fsdp: str, actor: Arch | None) -> tuple[Block, Block]:
        config = self.config
        block, layout = self._train("critic", "critic", fsdp, "critic.megatron", pool, arch)
        self._critic_split(block, layout, arch, actor)
        infer = Block(header="stage critic.infer")
        infer.add("with", "critic.train")
        worker = self._worker("critic", fsdp, "critic.megatron", trains=True)
        add_batch(
            infer,
            config,
            dynamic="critic.use_dynamic_bsz",
            tokens="critic.forward_max_token_len_per_gpu",
            micro="critic.forward_micro_batch_size_per_gpu",
            legacy="critic.forward_micro_batch_size",
            dp=data_parallel(config, worker, pool.gpus),
        )
        return block, infer

    def _critic_split(self, block: Block, layout: dict[str, str], arch: Arch | None, actor: Arch | None) -> None:
        """Scripts often set an uneven pipeline for the actor and forget the critic of the same model."""
        pp = int(layout.get("pp", "1"))
        if arch is None or arch != actor or "pp_split" in layout or arch.num_layers % pp == 0:
            return
        worker = self._worker(_ACTOR, f"{_ACTOR}.fsdp_config", f"{_ACTOR}.megatron", trains=True)
        split = pipeline_split(self.config, worker, actor, pp) if worker.megatron else None
        if split is None:
            return
        at = next(i for i, e in enumerate(block.entries) if e.text.startswith("pp = "))
        text = f"pp_split = ({', '.join(map(str, split[0]))})"
        block.entries.insert(at + 1, Entry(text=text, comment="not set there: assumed like the actor's"))
        self.reports.add(
            "NRS2514",
            Severity.WARNING,
            f"{arch.num_layers} layers do not divide over the critic's pp = {pp}; the actor's split is assumed",
            self.config.place("critic.megatron.pipeline_model_parallel_size"),
        )

    def _reward(self, pool: Pool) -> Block:
        config = self.config
        block = Block(header="stage reward.infer")
        if config.text("reward_model.rollout.name") is not None:
            share = config.text("reward_model.rollout.gpu_memory_utilization")
            self._engine(block, "reward_model.rollout.name")
            block.add("on", pool.devices, f"gpu_memory_utilization {share} there: it scores, so no KV cache is kept")
            self._engine_degrees(block, "reward_model.rollout")
            if config.flag("reward_model.rollout.free_cache_engine"):
                block.add("idle", "offload", "free_cache_engine: the engine sleeps between uses")
            return block
        role = "reward_model"
        worker = self._worker(role, "reward_model.model.fsdp_config", "reward_model.megatron", trains=False)
        block.add("on", pool.devices)
        add_layout(block, config, worker, pool.gpus, None)
        add_batch(
            block,
            config,
            dynamic=f"{role}.use_dynamic_bsz",
            tokens=f"{role}.forward_max_token_len_per_gpu",
            micro=f"{role}.micro_batch_size_per_gpu",
            legacy=f"{role}.micro_batch_size",
            dp=data_parallel(config, worker, pool.gpus),
        )
        if config.flag(f"{worker.engine}.param_offload"):
            block.add("idle", "offload", "param_offload")
        return block

    # -- remarks -------------------------------------------------------------------------------------------------------

    def _global_remarks(self) -> None:
        config = self.config
        device = config.text("trainer.device")
        if device not in (None, "cuda"):
            self.reports.add(
                "NRS2508",
                Severity.WARNING,
                f"the job runs on `{device}` devices; the plan names {self.cluster.gpu} instead",
                config.place("trainer.device"),
                help="give the nearest data sheet with --gpu ID",
            )
