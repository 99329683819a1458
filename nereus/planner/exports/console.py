"""What the three frameworks print at every step, found in a log among everything else.

verl      (TaskRunner pid=7) step:3 - critic/score/mean:0.41 - timing_s/gen:21.3 - ...
OpenRLHF  INFO 08-13 19:25:45 ppo_trainer.py:545] * Global step 3: {'reward': 0.41, 'timing/generation': 21.3, ...}
NeMo-RL   ===== Step 3/100 =====  and below it  * Mean Generation Length: 812.5  * Total step time: 61.2s
          * policy_training: 20.1s (32.8%)
"""

from __future__ import annotations

import re

from nereus.planner.exports.tables import Steps, number_of

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"(?:np\.\w+\()?(-?\d[\d.]*(?:e[+-]?\d+)?)"
_VERL = re.compile(r"\bstep:(\d+) - (\S+:.*)")
_VERL_CELL = re.compile(rf"([^\s:]+):{_NUMBER}")
_OPENRLHF = re.compile(r"Global step (\d+): \{(.*)\}")
_OPENRLHF_CELL = re.compile(rf"'([^']+)': {_NUMBER}")
_NEMO_STEP = re.compile(r"=+ Step (\d+)/\d+ =+")
_NEMO_CELL = re.compile(r"\u2022 ([\w /]+): (\d[\d.]*)(s?)(?: \(\d[\d.]*%\))?\s*$")
_NEMO_NAMES = {
    "Total step time": "timing/train/total_step_time",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
}


def read_console(text: str) -> Steps:
    """Empty where no line is of any of them."""
    found: Steps = {}
    step: int | None = None
    for line in _COLOUR.sub("", text).splitlines():
        if match := _VERL.search(line):
            _add(found, int(match.group(1)), _VERL_CELL.findall(match.group(2)), "")
        elif match := _OPENRLHF.search(line):
            _add(found, int(match.group(1)), _OPENRLHF_CELL.findall(match.group(2)), "train/")
        elif match := _NEMO_STEP.search(line):
            step = int(match.group(1))
        elif step is not None and (match := _NEMO_CELL.search(line)):
            name, value, seconds = match.groups()
            if known := _NEMO_NAMES.get(name) or (seconds and f"timing/train/{name}"):
                _add(found, step, [(known, value)], "")
    return found


def _add(found: Steps, step: int, cells: list[tuple[str, str]], prefix: str) -> None:
    of_step = found.setdefault(step, {})
    for name, text in cells:
        value = number_of(text)
        if value is not None:
            of_step[prefix + name] = value
