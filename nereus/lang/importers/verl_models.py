"""Models of a launch: presets by their names in paths, and what to do about names that say nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from nereus.ir.arch import Arch
from nereus.ir.diagnostic import Severity
from nereus.lang.importers.model_match import match_model
from nereus.lang.importers.plan_text import Entry
from nereus.lang.importers.verl_launch import Launch
from nereus.models.presets import preset


@dataclass(slots=True)
class Models:
    """Declarations in order."""

    launch: Launch
    entries: list[Entry] = field(default_factory=list)
    #: A shape is not known: the plan needs an edit before it checks.
    placeholder: bool = False
    #: Variables whose value was guessed and reported.
    guessed: set[str] = field(default_factory=set)

    def declare(self, name: str, key: str, body: str) -> Arch | None:
        """Declares the model and returns its shape, None if it is not known."""
        config = self.launch.config
        reports = config.reports
        setting = config.find(key)
        path = (setting.text if setting is not None else "").strip()
        tail = f" {body}" if body else ""
        match = match_model(path)
        shown = path[:100]
        if match.preset is not None:
            comment = shown if config.written(key) else f"{key} is not set: verl's default {shown}"
            if match.assumed:
                comment += ": same shape by its name"
            self.entries.append(Entry(text=f'model {name} = "{match.preset}"{tail}', comment=comment))
            return preset(match.preset)
        guess = self._guess(key)
        if guess is not None:
            chosen, variable = guess
            self.entries.append(
                Entry(text=f'model {name} = "{chosen}"{tail}', comment=f"{shown} is not set; assumed from {variable}")
            )
            return preset(chosen)
        self.placeholder = True
        near = f"close presets: {', '.join(match.suggestions)}; " if match.suggestions else ""
        hint = "put the model's config.json beside the plan, or write a preset of the same shape instead"
        if path in self.launch.variables:
            hint = f"did you mean the variable, `${path}`? Else {hint}"
        reports.add(
            "NRS2506",
            Severity.WARNING,
            f"`{shown}` is no model whose shape is known" if shown else f"`{key}` is empty",
            config.place(key),
            label=f'`hf("config.json")` stands in for the {name}',
            notes=[f"close presets: {', '.join(match.suggestions)}"] if match.suggestions else (),
            help=hint,
        )
        comment = f"{shown or key}: shape not known; {near}else put its config.json beside this file"
        self.entries.append(Entry(text=f'model {name} = hf("config.json"){tail}', comment=comment))
        return None

    def _guess(self, key: str) -> tuple[str, str] | None:
        """A path that the environment decides, while the script's other variables name one model only."""
        setting = self.launch.config.find(key)
        if setting is None or not setting.missing:
            return None
        found: dict[str, str] = {}
        for name, value in self.launch.variables.items():
            if "/" in value.text or "path" in name.lower() or "model" in name.lower():
                preset_name = match_model(value.text).preset
                if preset_name is not None:
                    found.setdefault(preset_name, name)
        if len(found) != 1:
            return None
        (chosen, variable), gap = next(iter(found.items())), setting.missing[0]
        value = self.launch.variables[variable]
        if gap.name in self.guessed:
            return chosen, variable
        self.guessed.add(gap.name)
        self.launch.config.reports.add(
            "NRS2517",
            Severity.WARNING,
            f"`${gap.name}` is not set in the script; the model is assumed to be {chosen}, from `{variable}`",
            (setting.start, setting.end),
            secondary=[((value.start, value.end), "the only model that the script names")],
            help=f"set `{gap.name}=...` in the script if it is another one",
        )
        return chosen, variable
