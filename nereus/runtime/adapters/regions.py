"""Rectangles of logical tensors over several holders: who gives which element, what is missing, and a copy of exactly
the intersections of two bindings in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nereus.ir.arch import Arch
from nereus.ir.fragment import Fragment, RankState
from nereus.ir.tensor import matrix_shape
from nereus.models.tensors import logical_tensors
from nereus.runtime.adapters.base import BindError, Binding
from nereus.runtime.adapters.whole import pieces, rectangles

#: (first row, end row, first column, end column) of a logical tensor seen as a matrix.
Rect = tuple[int, int, int, int]
#: (logical tensor, slot)
Key = tuple[str, str]

#: Names in one error; the rest are counted.
MAX_NAMED = 12


@dataclass(frozen=True, slots=True)
class Claim:
    """Holder number ``holder`` gives ``rect``; no other claim covers any element of it."""

    holder: int
    rect: Rect


def logical_shapes(arch: Arch, head: str = "lm") -> dict[str, tuple[int, int]]:
    """Rows and columns of every logical tensor of a model, in model order."""
    return {t.name: matrix_shape(t.shape) for t in logical_tensors(arch, head)}


def check_model_naming(naming: object) -> None:
    """BindError for a naming of parameters and no model: what a checkpoint has to hold does not follow from it."""
    if not hasattr(naming, "arch") or not hasattr(naming, "parameters"):
        raise BindError(
            f"a checkpoint is of a whole model, and {type(naming).__name__} does not say which tensors that has: pass "
            "the naming of its family, HfNaming(arch=preset('llama-3.1-8b')) or HfNaming(arch=arch_from_config(...))"
        )


def area(rect: Rect) -> int:
    return (rect[1] - rect[0]) * (rect[3] - rect[2])


def intersection(a: Rect, b: Rect) -> Rect | None:
    row_lo, row_hi = max(a[0], b[0]), min(a[1], b[1])
    col_lo, col_hi = max(a[2], b[2]), min(a[3], b[3])
    return (row_lo, row_hi, col_lo, col_hi) if row_lo < row_hi and col_lo < col_hi else None


def difference(a: Rect, b: Rect) -> list[Rect]:
    """``a`` without ``b``: up to four rectangles."""
    common = intersection(a, b)
    if common is None:
        return [a]
    row_lo, row_hi, col_lo, col_hi = common
    around = (
        (a[0], row_lo, a[2], a[3]),
        (row_lo, row_hi, a[2], col_lo),
        (row_lo, row_hi, col_hi, a[3]),
        (row_hi, a[1], a[2], a[3]),
    )
    return [rect for rect in around if rect[0] < rect[1] and rect[2] < rect[3]]


def fragment_rects(fragment: Fragment) -> list[Rect]:
    """What a fragment covers: up to three rectangles of its logical tensor, since a flat range may cut rows."""
    found = []
    for row, num_rows, col, num_cols in rectangles(fragment):
        row_lo, col_lo = fragment.row_lo + row, fragment.col_lo + col
        found.append((row_lo, row_lo + num_rows, col_lo, col_lo + num_cols))
    return found


def claims(states: Sequence[RankState], keep: Callable[[Key], bool] = lambda key: True) -> dict[Key, list[Claim]]:
    """Every element that some state holds, once: of replicas the holder with the fewest elements so far gives it, the
    first of equals. All processes that pass the same states get the same answer."""
    held: dict[Key, dict[Rect, list[int]]] = {}
    for holder, state in enumerate(states):
        for fragment in state.fragments:
            key = (fragment.tensor, fragment.slot)
            if keep(key):
                for rect in fragment_rects(fragment):
                    holders = held.setdefault(key, {}).setdefault(rect, [])
                    if not holders or holders[-1] != holder:  # held twice by one process
                        holders.append(holder)
    load = [0] * len(states)
    return {key: _claims_of(rects, load) for key, rects in held.items()}


def _claims_of(rects: Mapping[Rect, list[int]], load: list[int]) -> list[Claim]:
    found: list[Claim] = []
    active: list[Rect] = []  # taken, and not wholly above the rows to come
    for rect in sorted(rects, key=lambda r: (r[0], r[2], -r[1], -r[3])):
        active = [other for other in active if other[1] > rect[0]]
        rest = [rect]
        for other in active:
            rest = [left for piece in rest for left in difference(piece, other)]
        if rest:
            holder = min(rects[rect], key=lambda number: load[number])
            load[holder] += sum(map(area, rest))
            found.extend(Claim(holder, left) for left in rest)
            active.append(rect)
    return found


def check_complete(
    claimed: Mapping[Key, Sequence[Claim]], shapes: Mapping[str, tuple[int, int]], slots: Iterable[str]
) -> None:
    """BindError naming each (tensor, slot) with elements that nobody holds, with how many of how many, or that reaches
    past its logical tensor."""
    wrong = []
    for slot in slots:
        for tensor, (rows, cols) in shapes.items():
            found = claimed.get((tensor, slot), ())
            for claim in found:
                if claim.rect[1] > rows or claim.rect[3] > cols:
                    wrong.append(f"{tensor} ({slot}): {claim.rect} lies outside of {rows} x {cols}")
            missing = rows * cols - sum(area(claim.rect) for claim in found)
            if missing > 0:
                wrong.append(f"{tensor} ({slot}): {missing} of {rows * cols} elements are missing")
    if wrong:
        raise BindError(f"the state is not whole: {listed(wrong)}")


def listed(lines: Sequence[str]) -> str:
    rest = len(lines) - MAX_NAMED
    return "; ".join(lines[:MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")


#: (tensor, slot), rectangle, the source's elements -> elements as the target wants them.
Convert = Callable[[Key, Rect, torch.Tensor], torch.Tensor]


def copy_regions(
    source: Binding, target: Binding, *, slots: Mapping[str, str] | None = None, convert: Convert | None = None
) -> int:
    """Fill every region of ``target`` from ``source`` (a checkpoint that this process sees, say), touching nothing but
    the intersections. Returns the bytes read.

    ``slots``: slot of the target -> slot of the source to take it from, where they differ. Without ``convert``, dtypes
    must be equal. BindError, before anything is written, where elements are missing or dtypes differ.
    """
    held = rects_of(source)
    work: list[tuple[Key, Rect, torch.Tensor, torch.Tensor]] = []
    wrong: dict[str, None] = {}
    for fragment, place, view in pieces(target):
        slot = fragment.slot if slots is None else slots.get(fragment.slot, fragment.slot)
        key, whole = (fragment.tensor, slot), _rect(place)
        rest = [whole]
        for rect, data in held.get(key, ()):
            if not rest:
                break
            for piece in rest:
                common = intersection(piece, rect)
                if common is not None:
                    if convert is None and data.dtype != view.dtype:
                        wrong[f"{key[0]} ({slot}): {data.dtype} cannot fill {view.dtype} unasked"] = None
                    work.append((key, common, part(view, whole, common), part(data, rect, common)))
            rest = [left for piece in rest for left in difference(piece, rect)]
        if rest:
            wrong[f"{key[0]} ({slot}): {sum(map(area, rest))} of {area(whole)} elements are missing"] = None
    if wrong:
        raise BindError(f"the source cannot fill the target: {listed(list(wrong))}")
    num_bytes = 0
    with torch.no_grad():
        for key, rect, into, data in work:
            into.copy_(data if convert is None else convert(key, rect, data))
            num_bytes += data.numel() * data.element_size()
    return num_bytes


def rects_of(binding: Binding) -> dict[Key, list[tuple[Rect, torch.Tensor]]]:
    """Every region with its live elements, rows x columns."""
    held: dict[Key, list[tuple[Rect, torch.Tensor]]] = {}
    for fragment, place, view in pieces(binding):
        held.setdefault((fragment.tensor, fragment.slot), []).append((_rect(place), view))
    return held


def claimed_view(held: Sequence[tuple[Rect, torch.Tensor]], rect: Rect) -> torch.Tensor:
    """Elements of ``rect``, which lies inside one of the regions, as what a holder claims does."""
    of, view = next((of, view) for of, view in held if intersection(of, rect) == rect)
    return part(view, of, rect)


def part(view: torch.Tensor, of: Rect, rect: Rect) -> torch.Tensor:
    return view[rect[0] - of[0] : rect[1] - of[0], rect[2] - of[2] : rect[3] - of[2]]


def slot_dtypes(states: Sequence[RankState], slot: str) -> dict[str, str]:
    """Dtype of every logical tensor that has ``slot``. BindError where ranks differ."""
    found: dict[str, str] = {}
    wrong: dict[str, None] = {}
    for state in states:
        for fragment in state.fragments:
            if fragment.slot == slot:
                dtype = state.storages[fragment.storage].dtype
                if found.setdefault(fragment.tensor, dtype) != dtype:
                    wrong[f"{fragment.tensor} is {found[fragment.tensor]} and {dtype}"] = None
    if wrong:
        raise BindError(f"a tensor has one dtype in a checkpoint ({slot}): {listed(list(wrong))}")
    return found


def _rect(place: tuple[int, int, int, int]) -> Rect:
    row, num_rows, col, num_cols = place
    return row, row + num_rows, col, col + num_cols
