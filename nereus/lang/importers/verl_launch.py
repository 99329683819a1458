"""From an input file to verl's settings: which command trains, in which of verl's modes, with which defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from nereus.ir.diagnostic import Severity
from nereus.lang.importers.hydra import Config, Setting, read_overrides, read_yaml
from nereus.lang.importers.result import Reports
from nereus.lang.importers.shell import Command, Field, Script, ShellError, read_script
from nereus.lang.importers.verl_defaults import FSDP_DEFAULTS, MEGATRON_DEFAULTS

#: verl entry points by what they do with the pool.
SYNC, SPLIT, ONE_STEP_OFF, FULLY_ASYNC = "sync", "split", "one_step_off", "fully_async"

_NOT_RL = re.compile(r"(sft|generation|eval|merger|converter|print_cfg|preprocess)", re.IGNORECASE)
_LAYOUT_KEY = re.compile(
    r"(\+\+|\+|~)?(actor_rollout_ref|critic|reward_model|trainer|algorithm|data|rollout|async_training)\."
)
_STRAY = re.compile(
    r"(\+\+|\+|~)?(actor_rollout_ref|critic|reward_model|trainer|algorithm|data|async_training)\.[\w.]+="
)
_STOCK_CONFIGS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "fully_async_", "one_step_off_", "transfer_queue_")
    for name in ("ppo_trainer", "ppo_megatron_trainer")
) | {"ppo_trainer_split", "dapo_trainer", "dapo_megatron_trainer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    config: Config
    kind: str
    megatron: bool
    #: Variables of the script, for guesses at what an unset one means.
    variables: dict[str, Field]


def read_launch(text: str, path: str, reports: Reports) -> Launch | None:
    """None with an error in ``reports`` where the text holds no RL training."""
    if _is_config(text, path):
        settings = read_yaml(text, reports)
        if settings is None:
            return None
        if not any(_LAYOUT_KEY.match(f"{key}.") for key in settings):
            reports.add(
                "NRS2502",
                Severity.ERROR,
                "this is no verl configuration: none of its keys is verl's",
                (0, len(text.split("\n", 1)[0])),
                help="give a launch script, or what `python3 -m verl.trainer.main_ppo ... --cfg job --resolve` prints",
            )
            return None
        if re.search(r"^\s*defaults\s*:", text, re.MULTILINE):
            at = text.index("defaults")
            reports.add(
                "NRS2507",
                Severity.WARNING,
                "this configuration is not resolved: the files in its `defaults` list are not read",
                (at, at + len("defaults")),
                label="verl's own defaults stand in for them",
                help="`python3 -m verl.trainer.main_ppo ... --cfg job --resolve` prints the resolved configuration",
            )
        kind = FULLY_ASYNC if any(k.startswith("async_training.") for k in settings) else SYNC
        if kind == SYNC and {"rollout.nnodes", "rollout.n_gpus_per_node"} & settings.keys():
            kind = ONE_STEP_OFF
        return _launch(settings, kind, "", {}, reports)
    try:
        script = read_script(text)
    except ShellError as fault:
        reports.add("NRS2501", Severity.ERROR, f"the script cannot be read: {fault}", (fault.start, fault.end))
        return None
    return _from_script(script, text, reports)


def _is_config(text: str, path: str) -> bool:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in (".yaml", ".yml", ".json"):
        return True
    if suffix in (".sh", ".bash", ".slurm", ".sbatch"):
        return False
    if text.lstrip().startswith("{") and '"actor_rollout_ref"' in text:
        return True
    return bool(re.search(r'^\s*["\']?(actor_rollout_ref|trainer)["\']?\s*:', text, re.MULTILINE))


def _from_script(script: Script, text: str, reports: Reports) -> Launch | None:
    found = [(command, at) for command in script.commands if (at := _entry(command)) is not None]
    # A command that runs in any case, and that sets the layout, comes first.
    found.sort(key=lambda item: (item[0].conditional is not None, not _sets_layout(item[0])))
    if not found:
        _no_training(script, text, reports)
        return None
    command, at = found[0]
    entry = command.fields[at]
    if command.conditional is not None:
        reports.add(
            "NRS2503",
            Severity.WARNING,
            "whether this command runs depends on a condition that only a run decides; it is assumed to run",
            (entry.start, entry.end),
            secondary=[(command.conditional, "the condition")],
        )
    others = [other for other, _ in found[1:] if _sets_layout(other)]
    if others:
        reports.add(
            "NRS2503",
            Severity.WARNING,
            f"the script trains {len(others) + 1} times; this command is imported",
            (entry.start, entry.end),
            secondary=[((o.start, min(o.end, o.start + 60)), "not imported") for o in others[:5]],
            help="put the command that you mean into a script of its own",
        )
    arguments = command.fields[at + 1 :]
    settings = read_overrides(arguments, reports)
    for stray in script.commands:
        if stray is not command and stray.fields and _STRAY.match(stray.fields[0].text) and stray.start > command.start:
            reports.add(
                "NRS2518",
                Severity.WARNING,
                "these settings never reach verl: the command ends before them",
                (stray.start, stray.end),
                secondary=[((max(command.start, command.end - 1), command.end), "the command ends here")],
                help="the line before needs a `\\` as its very last character (no blank or comment behind it)",
            )
    config_name = _config_name(arguments, reports)
    return _launch(settings, _kind(entry.text), config_name, script.variables, reports)


def _launch(
    settings: dict[str, Setting], kind: str, config_name: str, variables: dict[str, Field], reports: Reports
) -> Launch:
    strategy = settings.get("actor_rollout_ref.actor.strategy")
    engine = settings.get("model_engine") or settings.get("actor@actor_rollout_ref.actor")
    megatron = "megatron" in config_name or (engine is not None and "megatron" in engine.text)
    if strategy is not None and not strategy.missing:
        megatron = strategy.text == "megatron"
    elif not config_name and engine is None and not variables:
        megatron = any(k.startswith("actor_rollout_ref.actor.megatron.") for k in settings)
    defaults = MEGATRON_DEFAULTS if megatron else FSDP_DEFAULTS
    config = Config(reports=reports, settings=settings, defaults=dict(defaults))
    return Launch(config=config, kind=kind, megatron=megatron, variables=variables)


def _entry(command: Command) -> int | None:
    """Index of the field that names verl's entry point: `-m MODULE` or `SCRIPT.py`."""
    fields = command.fields
    for i, item in enumerate(fields[:200]):
        name = item.text
        follows_m = i > 0 and fields[i - 1].text == "-m"
        if not (follows_m or name.endswith(".py")) or _NOT_RL.search(name):
            continue
        last = re.split(r"[./]", name.removesuffix(".py"))[-1]
        if re.fullmatch(r"main_\w+|\w+_main", last) or any(_LAYOUT_KEY.match(f.text) for f in fields[i + 1 :]):
            return i
    return None


def _sets_layout(command: Command) -> bool:
    return any(f.text.lstrip("+").startswith(("actor_rollout_ref.", "trainer.")) for f in command.fields)


def _kind(entry: str) -> str:
    if "fully_async" in entry:
        return FULLY_ASYNC
    if "one_step_off" in entry:
        return ONE_STEP_OFF
    return SPLIT if "split" in entry else SYNC


def _config_name(arguments: tuple[Field, ...], reports: Reports) -> str:
    for i, item in enumerate(arguments):
        found = re.fullmatch(r"(--config-name|-cn)(?:=(.*))?", item.text)
        if not found:
            continue
        value = arguments[i + 1] if found[2] is None and i + 1 < len(arguments) else item
        text = (found[2] if found[2] is not None else value.text).strip("'\"").removesuffix(".yaml")
        if text not in _STOCK_CONFIGS:
            reports.add(
                "NRS2507",
                Severity.WARNING,
                f"the configuration file `{text}` is not read: only what stands in the script is known",
                (value.start, value.end),
                label="verl's own defaults stand in for what it sets",
                help="import the resolved configuration instead: what the command prints with `--cfg job --resolve`",
            )
        return text
    return ""


def _no_training(script: Script, text: str, reports: Reports) -> None:
    for command in script.commands:
        for i, item in enumerate(command.fields[:200]):
            named = (i > 0 and command.fields[i - 1].text == "-m") or item.text.endswith(".py")
            if named and _NOT_RL.search(item.text):
                reports.add(
                    "NRS2502",
                    Severity.ERROR,
                    f"`{item.text[:80]}` is no RL training, so it has no plan",
                    (item.start, item.end),
                    help="give the script that starts `verl.trainer.main_ppo` or another RL entry point of verl",
                )
                return
    first = text.strip("\n").split("\n", 1)[0]
    at = text.find(first)
    reports.add(
        "NRS2502",
        Severity.ERROR,
        "no verl training command is found in the script",
        (at, at + len(first)),
        notes=["looked for `python3 -m verl.trainer.main_ppo ...` and verl's other RL entry points"],
        help="give the script that holds the command itself, or the resolved configuration as YAML",
    )
