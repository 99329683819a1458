from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kernel_support import kernel  # noqa: E402

from nereus.kernels import dispatch, native  # noqa: E402
from nereus.kernels import regions as r  # noqa: E402
from nereus.kernels.reference import Reference  # noqa: E402

CPU = torch.device("cpu")
TABLE = np.array([(0, 2, 8, 1, 0, 4, 3, 4, r.BITS32, r.BITS32, 0, 1, 2, 9)], dtype=np.int64)


@pytest.mark.parametrize("name", ["native", "source"])
def test_the_trial_passes_on_kernels_that_are_right(name: str) -> None:
    assert dispatch.disagreement(kernel(name), CPU) == ""


class Wrong(Reference):
    def __init__(self, column: int) -> None:
        self.column = column

    def launch(self, what: Any, bases: Any, sums: Any) -> None:
        """One region a little off."""
        assert what.table[8, r.SLOT] >= 0 and what.table[8, r.DST] >= 0
        what.table[8, self.column] += 1
        super().launch(what, bases, sums)
        what.table[8, self.column] -= 1


@pytest.mark.parametrize(
    ("column", "text"), [(r.SRC_OFFSET, "other bytes"), (r.DST_OFFSET, "other bytes"), (r.GLOBAL_START, "checksums")]
)
def test_the_trial_finds_a_kernel_that_is_wrong(column: int, text: str) -> None:
    assert text in dispatch.disagreement(Wrong(column), CPU)


def test_cpu_tables_run_natively_or_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREUS_KERNELS", "triton")  # about GPUs
    kernel("native")
    assert dispatch.choose(CPU).name == "native"
    monkeypatch.setattr(native, "load", lambda: None)
    assert dispatch.choose(CPU).name == "reference"
    with pytest.raises(dispatch.KernelsUnavailable, match="native: no C compiler"):
        dispatch.choose(CPU, "native")


@pytest.mark.parametrize("name", ["triton", "source"])
def test_what_needs_a_gpu_says_so(name: str) -> None:
    with pytest.raises(dispatch.KernelsUnavailable, match=f"no kernel for cpu: {name}: it runs on GPUs only"):
        dispatch.choose(CPU, name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_gives_reasons_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREUS_KERNELS", "source")
    with pytest.raises(dispatch.KernelsUnavailable, match="no kernel for cuda:0: source: "):
        dispatch.choose(torch.device("cuda:0"))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(dispatch.KernelsUnavailable, match="there is no kernel 'fast'; there are native, triton"):
        dispatch.choose(CPU, "fast")


def test_run_adds_to_the_sums_and_takes_other_bases_again() -> None:
    what, sums = r.plan(TABLE), torch.zeros(1, dtype=torch.int64)
    source = torch.arange(40, dtype=torch.float32)
    targets = [torch.zeros(12), torch.zeros(12)]
    for target in targets:
        dispatch.run(what, [source, target], sums)
        assert target.view(3, 4).tolist() == source[2:26].view(3, 8)[:, :4].tolist()
    once = torch.zeros(1, dtype=torch.int64)
    dispatch.run(what, [source, targets[0]], once, kernel="reference")
    assert 2 * once == sums


@pytest.mark.parametrize(
    ("bases", "sums", "text"),
    [
        (
            [torch.zeros(22), None],
            torch.zeros(1, dtype=torch.int64),
            "base 0 has 88 bytes, and regions reach to byte 88",
        ),
        ([torch.zeros(40), torch.zeros(11)], torch.zeros(1, dtype=torch.int64), "base 1 has 44 bytes"),
        ([torch.zeros(40)], torch.zeros(1, dtype=torch.int64), "use base 1, which was not given"),
        ([torch.zeros(80)[::2], torch.zeros(12)], torch.zeros(1, dtype=torch.int64), "base 0 is not contiguous"),
        ([torch.zeros(40), torch.zeros(12)], None, "int64 tensor of 1 elements"),
        ([torch.zeros(40), torch.zeros(12)], torch.zeros(1), "int64 tensor of 1 elements"),
        ([torch.zeros(40), torch.zeros(12, device="meta")], torch.zeros(1, dtype=torch.int64), "on cpu, meta"),
        (
            [torch.zeros(200, dtype=torch.uint8)[1:], torch.zeros(12)],
            torch.zeros(1, dtype=torch.int64),
            "multiple of 4",
        ),
    ],
)
def test_no_region_leaves_its_base(bases: Any, sums: Any, text: str) -> None:
    if text.startswith("base 0 has 88"):
        bases, text = [torch.zeros(21), torch.zeros(12)], "base 0 has 84 bytes, and regions reach to byte 88"
    with pytest.raises(r.TableError, match=re.escape(text)):
        dispatch.run(r.plan(TABLE), bases, sums)
