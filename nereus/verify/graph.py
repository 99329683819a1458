"""How many operations a transition's graph has, and in reversible mode how many edges: counted from the schedule, the
storages and the life-cycle operations, by what docs/compiler.md says that the graph is made of."""

from __future__ import annotations

from nereus.verify.case import Case
from nereus.verify.storages import Storages

#: All stop, all are ready for byte one, commit, resume.
_OF_ALL = 4


def num_ops(case: Case, storages: Storages) -> int:
    """Two operations a move (send, verify), one a life-cycle operation; in reversible mode one for each space in which
    storages come, and in which they go; in tight mode as ``_tight_ops`` says."""
    count = _OF_ALL + len(case.document.lifecycle) + 2 * len(case.document.moves)
    if case.document.mode == "tight":
        return count + _tight_ops(case, storages)
    _, going, coming = storages.bytes_per_space()
    return count + int((going > 0).sum()) + int((coming > 0).sum())


def _tight_ops(case: Case, storages: Storages) -> int:
    """Each wave: one for every device that sends, receives or acquires and every host memory that acquires; one for
    each storage that goes to host memory; where something is released an agreement, and one for each space."""
    document, world = case.document, case.world
    acquiring = {(wave, storages.coming_keys[key][0]) for key, wave in document.acquire.items()}
    releasing = {(wave, storages.going_keys[key][0]) for key, wave in document.release.items()}
    active: set[tuple[int, int]] = set()
    for ends in (document.moves.src, document.moves.dst):
        active |= set(zip(document.moves.wave.tolist(), (ends % world.num_devices).tolist(), strict=True))
    for key, (first, last) in document.staged.items():
        host = world.num_devices + int(world.node_of[key[0]])
        acquiring.add((first, host))
        releasing.add((last, host))
        active.add((first, key[0]))
    agreements = {wave for wave, _ in releasing}
    return len(acquiring | active) + len(document.staged) + len(agreements) + len(releasing)


def num_edges(case: Case, storages: Storages) -> int | None:
    """In reversible mode; None in tight mode, whose edges are those that memory needs."""
    document, moves, world = case.document, case.document.moves, case.world
    if document.mode == "tight":
        return None
    _, going, coming = storages.bytes_per_space()
    kinds = [op.kind for op in document.lifecycle]
    groups, retired = kinds.count("build-groups"), kinds.count("retire")
    setup = len(kinds) - groups - retired
    waiting = sum(not op.background for op in document.lifecycle if op.kind != "retire")  # for training to stop
    spaces, released = int((coming > 0).sum()), int((going > 0).sum())
    acquired = spaces + (spaces < world.num_spaces)  # all spaces in which nothing comes count as one
    life = waiting + 1 + setup + groups + released + 2 * retired + 1 + released
    into_host = int((moves.dst >= world.num_devices).sum())
    # A move waits for both ends (and for the host memory that it goes to), its verify for it, the commit for that.
    return life + spaces + acquired + 4 * len(moves) + into_host + int(moves.after_first[-1])
