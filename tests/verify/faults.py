"""Kinds of faults to plant in a document, each with the check whose business it is and the documents that have room for
it."""

from __future__ import annotations

from collections.abc import Callable

from verify.documents import TINY, Json, transition

Fault = Callable[[Json], None]

BIG = ("8b-grows", "8b-zero1", "swap-full", "overlap")
ALL = (*TINY, *BIG)
COLUMNS = ("src", "dst", "table", "region", "bytes", "wave", "slices", "link", "slots", "after_counts")


def moves(value: Json) -> Json:
    found: Json = value["schedule"]["moves"]
    return found


def after(value: Json) -> list[list[int]]:
    """``after`` of every move."""
    columns, found, at = moves(value), [], 0
    for count in columns["after_counts"]:
        found.append(columns["after"][at : at + count])
        at += count
    return found


def set_after(value: Json, lists: list[list[int]]) -> None:
    moves(value)["after_counts"] = [len(one) for one in lists]
    moves(value)["after"] = [number for one in lists for number in one]


def direct(value: Json) -> int:
    """A move across nodes, or at least a link, that reads what its source holds."""
    names, lists = value["schedule"]["links"], after(value)
    found = [i for i, link in enumerate(moves(value)["link"]) if names[link] != "local" and not lists[i]]
    return min(found, key=lambda i: names[moves(value)["link"][i]] != "inter-node")


def relay(value: Json) -> int:
    return next(i for i, before in enumerate(after(value)) if before)


def region(value: Json, number: int) -> int:
    """A region of its own for a move; where its rows begin."""
    regions, columns = value["schedule"]["regions"], moves(value)
    old = columns["region"][number]
    first = sum(regions["counts"][:old])
    count = regions["counts"][old]
    columns["region"][number] = len(regions["counts"])
    regions["counts"].append(count)
    begin = len(regions["cell"])
    for name in ("cell", "start", "stop"):
        regions[name] += regions[name][first : first + count]
    return begin


# Elements


def drop(value: Json) -> None:
    """The last move that no other relays."""
    lists = after(value)
    used = {number for one in lists for number in one}
    gone = max(i for i in range(len(lists)) if i not in used)
    lists = [[n - (n > gone) for n in one] for i, one in enumerate(lists) if i != gone]
    for name in COLUMNS:
        del moves(value)[name][gone]
    set_after(value, lists)


def duplicate(value: Json) -> None:
    lists, number = after(value), direct(value)
    for name in COLUMNS:
        moves(value)[name].append(moves(value)[name][number])
    set_after(value, [*lists, lists[number]])


def deliver_elsewhere(value: Json) -> None:
    number = direct(value)
    moves(value)["dst"][number] = moves(value)["src"][number]


def shift_by_a_row(value: Json) -> None:
    """The region of one move begins, and ends, one row later in its cell."""
    number = direct(value)
    begin = region(value, number)
    regions = value["schedule"]["regions"]
    grid = value["schedule"]["cells"][value["schedule"]["tables"][moves(value)["table"][number]]["cells"]]
    for row in range(begin, len(regions["cell"])):
        cell = regions["cell"][row]
        width = grid["col_hi"][cell] - grid["col_lo"][cell]
        size = width * (grid["row_hi"][cell] - grid["row_lo"][cell])
        length = regions["stop"][row] - regions["start"][row]
        if length + width <= size:
            ahead = regions["stop"][row] + width <= size
            regions["start"][row] += width if ahead else -width
            regions["stop"][row] += width if ahead else -width
            return
        if length > width:
            regions["start"][row] += width
            return
    raise AssertionError("every row is a whole cell of one row")


def wrong_tensor(value: Json) -> None:
    """One row of a region names a cell of the same size in another tensor."""
    number = direct(value)
    grid = value["schedule"]["cells"][value["schedule"]["tables"][moves(value)["table"][number]]["cells"]]
    size = [
        (b - a) * (d - c)
        for a, b, c, d in zip(grid["row_lo"], grid["row_hi"], grid["col_lo"], grid["col_hi"], strict=True)
    ]
    begin = region(value, number)
    regions = value["schedule"]["regions"]
    rows = range(begin, len(regions["cell"]))
    taken = {regions["cell"][row] for row in rows}
    # The last row may go up to a later cell, the first down to an earlier one: the order stays.
    for row, others in ((rows[-1], range(regions["cell"][rows[-1]] + 1, len(size))), (rows[0], range(min(taken)))):
        for other in others:
            cell = regions["cell"][row]
            if size[other] == size[cell] and grid["tensor"][other] != grid["tensor"][cell]:
                regions["cell"][row] = other
                return
    raise AssertionError("no other cell has that size")


def wrong_slots(value: Json) -> None:
    """A move of several slots carries one less, a move of one slot another one."""
    columns, tables = moves(value), value["schedule"]["tables"]
    for number, (mask, table) in enumerate(zip(columns["slots"], columns["table"], strict=True)):
        count = len(tables[table]["slots"])
        if count > 1:
            whole = (1 << count) - 1
            columns["slots"][number] = whole & ~1 if mask < 0 else (mask << 1) & whole or 1
            return
    raise AssertionError("no table has several slots")


def wrong_dtype(value: Json) -> None:
    table = next(t for t in value["schedule"]["tables"] if "bf16" in t["dtypes"])
    table["dtypes"] = ["fp16" for _ in table["dtypes"]]


def cells_with_a_gap(value: Json) -> None:
    grid = value["schedule"]["cells"][0]
    at = next(i for i in range(len(grid["row_lo"])) if grid["row_hi"][i] - grid["row_lo"][i] > 1)
    grid["row_lo"][at] += 1


def cells_merged(value: Json) -> None:
    """A tensor's first two cells become one, across the border of a rank's part."""
    grid = value["schedule"]["cells"][0]
    tensor = grid["tensor"]
    at = next(
        i
        for i in range(len(tensor) - 1)
        if tensor[i] == tensor[i + 1] and grid["row_hi"][i] == grid["row_lo"][i + 1] and grid["col_lo"][i + 1] == 0
    )
    grid["row_hi"][at] = grid["row_hi"][at + 1]
    for name in ("tensor", "row_lo", "row_hi", "col_lo", "col_hi"):
        del grid[name][at + 1]
    regions = value["schedule"]["regions"]
    regions["cell"] = [cell - (cell > at) for cell in regions["cell"]]


# Sources


def wrong_holder(value: Json) -> None:
    """From a GPU that receives the bytes in this very change."""
    number = direct(value)
    moves(value)["src"][number] = moves(value)["dst"][number]


def not_a_relay(value: Json) -> None:
    """A relay claims to hold what it only receives."""
    lists = after(value)
    lists[relay(value)] = []
    set_after(value, lists)


def relay_of_another(value: Json) -> None:
    lists, number, columns = after(value), relay(value), moves(value)
    lists[number] = [next(i for i, dst in enumerate(columns["dst"]) if dst != columns["src"][number])]
    set_after(value, lists)


def relay_too_early(value: Json) -> None:
    """In the wave in which it receives."""
    lists, number = after(value), relay(value)
    moves(value)["wave"][number] = moves(value)["wave"][lists[number][0]]


def relay_before_receive(value: Json) -> None:
    """Relay and what it relays change places in the order."""
    lists = after(value)
    number = next(i for i, one in enumerate(lists) if len(one) == 1)
    waves, (before,) = moves(value)["wave"], lists[number]
    waves[number], waves[before] = waves[before], waves[number]


def stale_copy(value: Json) -> None:
    """From generation's copy, which is a version behind its trainer."""
    number = next(
        i
        for i, table in enumerate(moves(value)["table"])
        if "weight" in value["schedule"]["tables"][table]["slots"] and not after(value)[i]
    )
    moves(value)["src"][number] = value["schedule"]["devices"].index("n0.gpu0")


def lost_node(value: Json) -> None:
    lost = next(i for i, name in enumerate(value["schedule"]["devices"]) if name.startswith("n1."))
    moves(value)["src"][direct(value)] = lost


# Order, windows, storages


def beyond_the_last_wave(value: Json) -> None:
    moves(value)["wave"][-1] = value["schedule"]["num_waves"]


def narrow_window(value: Json) -> None:
    value["schedule"]["window_bytes"] = min(moves(value)["bytes"]) // max(moves(value)["slices"])


def all_at_once(value: Json) -> None:
    columns = moves(value)
    columns["wave"] = [0] * len(columns["wave"])
    columns["slices"] = [1] * len(columns["slices"])


def staging_forgotten(value: Json) -> None:
    value["memory"]["staging"] = [0] * len(value["memory"]["staging"])


def staging_short_by_a_byte(value: Json) -> None:
    """On every device, below what it posts in its fullest wave both ways."""
    from nereus.verify.api import _Judge
    from nereus.verify.document import read_document
    from nereus.verify.order import posted

    port, wave, load, _ = posted(_Judge(read_document(value), None).case())
    num_devices = len(value["schedule"]["devices"])
    both: dict[tuple[int, int], int] = {}
    for key, at, size in zip((port % num_devices).tolist(), wave.tolist(), load.tolist(), strict=True):
        both[key, at] = both.get((key, at), 0) + size
    for (device, _), size in both.items():
        value["memory"]["staging"][device] = min(value["memory"]["staging"][device], size - 1)


def release_before_verify(value: Json) -> None:
    """One storage goes a wave before its last reader was verified; some storage has such a wave."""
    for row in value["schedule"]["release"]:
        row[4] = max(row[4] - 1, 0)


def acquire_too_late(value: Json) -> None:
    for row in value["schedule"]["acquire"]:
        row[4] = value["schedule"]["num_waves"] - 1


def never_acquired(value: Json) -> None:
    del value["schedule"]["acquire"][0]


def released_twice_over(value: Json) -> None:
    """A storage that the new plan still has is released."""
    device, stage, slot, tensor, wave = value["schedule"]["acquire"][0]
    value["schedule"]["release"].append([device, stage, f"{slot}_of_nobody", tensor, wave])


def release_in_reversible_mode(value: Json) -> None:
    value["schedule"]["release"] = [[0, "actor.train", "weight", 0, 0]]


def staging_in_host_forgotten(value: Json) -> None:
    """Nothing says that a storage passes through host memory, and moves read it there."""
    value["schedule"]["staged"] = value["schedule"]["staged"][1:]


def leaves_host_too_early(value: Json) -> None:
    for row in value["schedule"]["staged"]:
        row[5] = row[4] + 1


def reaches_host_too_late(value: Json) -> None:
    for row in value["schedule"]["staged"]:
        row[4] = row[5] - 1


def released_before_it_is_in_host(value: Json) -> None:
    staged = {tuple(row[:4]): row[4] for row in value["schedule"]["staged"]}
    for row in value["schedule"]["release"]:
        if tuple(row[:4]) in staged:
            row[4] = staged[tuple(row[:4])] - 1


def host_memory_short_by_a_byte(value: Json) -> None:
    """What passes through a host's memory no longer fits there."""
    from nereus.verify.api import _Judge
    from nereus.verify.document import read_document

    known = transition("through-host")
    use = _Judge(read_document(value), (known.old, known.new)).use()
    number = len(value["schedule"]["devices"])
    assert int(use.peak[number]) > int(use.phases["at the boundary"][number])
    (name,) = value["memory"]["hosts"]
    value["memory"]["hosts"][name] = int(use.peak[number]) - 1


# Memory


def capacity_below_the_peak(value: Json) -> None:
    """By one byte, on the fullest device."""
    said = value["certificate"]
    at = value["schedule"]["devices"].index(said["peak_device"])
    assert value["memory"]["capacity"][at] >= said["peak_bytes_max"]
    value["memory"]["capacity"][at] = said["peak_bytes_max"] - 1


def more_capacity_than_there_is(value: Json) -> None:
    value["memory"]["capacity"][-1] += 1


def more_host_memory_than_there_is(value: Json) -> None:
    name = next(iter(value["memory"]["hosts"]))
    value["memory"]["hosts"][name] += 1


def everything_acquired_first(value: Json) -> None:
    """Where storages go wave by wave because not all fit."""
    for row in value["schedule"]["acquire"]:
        row[4] = 0


# Processes


def operation(value: Json, kind: str) -> Json:
    found: Json = next(op for op in value["lifecycle"] if op["kind"] == kind)
    return found


def two_owners(value: Json) -> None:
    """The engine on a GPU that training takes over is not ended."""
    value["lifecycle"].remove(operation(value, "retire"))


def started_by_another(value: Json) -> None:
    """A stage starts on GPUs that the new plan gives to another."""
    spawn, retired = operation(value, "spawn"), operation(value, "retire")
    spawn["stage"] = retired["stage"]


def never_started(value: Json) -> None:
    value["lifecycle"].remove(operation(value, "spawn"))


def started_twice(value: Json) -> None:
    value["lifecycle"].append(operation(value, "spawn"))


def processes_for_free(value: Json) -> None:
    value["memory"]["before"] = [0] * len(value["memory"]["before"])


def engines_for_free(value: Json) -> None:
    op = operation(value, "engine-start")
    op["running_bytes"] = [1] * len(op["running_bytes"])
    op["after_bytes"] = [1] * len(op["after_bytes"])


# Moves, bounds, figures


def wrong_bytes(value: Json) -> None:
    moves(value)["bytes"][0] += 1


def wrong_link(value: Json) -> None:
    moves(value)["link"][direct(value)] = value["schedule"]["links"].index("intra-node")


def _places(value: Json) -> int:
    return len(value["schedule"]["devices"])


def into_the_other_memory(value: Json) -> None:
    """What a GPU wants goes to its host memory."""
    moves(value)["dst"] = [
        (place + _places(value)) % (2 * _places(value)) if i == direct(value) else place
        for i, place in enumerate(moves(value)["dst"])
    ]


def from_the_other_memory(value: Json) -> None:
    number = direct(value)
    moves(value)["src"][number] = (moves(value)["src"][number] + _places(value)) % (2 * _places(value))


def local_that_crosses(value: Json) -> None:
    moves(value)["link"][direct(value)] = value["schedule"]["links"].index("local")


def figure(name: str, change: float) -> Fault:
    def plant(value: Json) -> None:
        value["certificate"][name] += change

    plant.__name__ = f"{name}{change:+g}"
    return plant


def scaled(name: str, factor: float) -> Fault:
    def plant(value: Json) -> None:
        value["certificate"][name] *= factor

    plant.__name__ = f"{name} x {factor:g}"
    return plant


def link_figure(value: Json) -> None:
    value["certificate"]["bytes_by_link"]["inter-node"] -= 1


def no_return_hidden(value: Json) -> None:
    value["certificate"]["point_of_no_return"] = None


def said_to_be_unsafe(value: Json) -> None:
    value["certificate"]["checks"][0]["holds"] = False


# What proves the bound on seconds


def no_proof(value: Json) -> None:
    del value["bound"]


def prices_of_other_ports(value: Json) -> None:
    """As of an earlier compilation: another port counts, which is idle or less busy."""
    prices = value["bound"]["prices"]
    kinds = ["gpu-in", "gpu-out"]
    value["bound"]["prices"] = [
        [kinds[row[0] == "gpu-in"], value["schedule"]["devices"][0], row[2]] for row in prices[:1]
    ]


def one_price_too_many(value: Json) -> None:
    """A port that proves nothing, which makes the others count half."""
    rows = value["bound"]["prices"]
    taken = {(kind, number) for kind, number, _ in rows}
    last = value["schedule"]["devices"][-1]
    idle = next(k for k in ("gpu-out", "gpu-in") if (k, last) not in taken)
    rows.append([idle, last, sum(row[2] for row in rows)])


def a_price_twice(value: Json) -> None:
    value["bound"]["prices"].append(value["bound"]["prices"][0])


# Priors


def prior_of(name: str, seconds: float) -> Fault:
    """A prior of the certificate, with a stop that agrees with it."""

    def plant(value: Json) -> None:
        for figure in (name, "downtime_s"):
            value["certificate"][figure] += seconds

    plant.__name__ = f"{name}{seconds:+g} and the stop"
    return plant


def quicker(kind: str) -> Fault:
    """Operations that take less than their prior says."""

    def plant(value: Json) -> None:
        for op in value["lifecycle"]:
            if op["kind"] == kind:
                op["seconds"] *= 0.5

    plant.__name__ = f"quicker {kind}"
    return plant


def the_other_time(value: Json) -> None:
    """Beside training where there is no room, or after it where there is."""
    for op in value["lifecycle"]:
        if op["kind"] in ("engine-start", "spawn"):
            op["background"] = not op["background"]


def communicators_forgotten(value: Json) -> None:
    value["lifecycle"].remove(operation(value, "build-groups"))


def communicators_of_some(value: Json) -> None:
    op = operation(value, "build-groups")
    for name in ("devices", "running_bytes", "after_bytes"):
        op[name] = op[name][1:]


def engine_not_restarted(value: Json) -> None:
    """With other settings, on devices where it ran before."""
    value["lifecycle"].remove(operation(value, "engine-start"))


WITH_RELAYS = ("relays", "tight", "sharded", "experts", "stale", "swap-full", "8b-zero1")
#: Where figures are lied about: what is said of them does not depend on the size.
FIGURED = (*TINY, "8b-grows", "overlap")
#: Several ports count, or places derive parts: what is claimed may be less than what is proved.
CLAIM_LESS = ("rails", "relays", "tight", "sharded", "lost", "experts", "concurrent", "stale", "split", "overlap")
IN_TIGHT_MODE = ("tight", "swap-full")

FAULTS: list[tuple[Fault, str, tuple[str, ...]]] = [
    (drop, "elements", ALL),
    (duplicate, "elements", ALL),
    (deliver_elsewhere, "elements", ALL),
    (shift_by_a_row, "elements", ALL),
    (wrong_tensor, "elements", ALL),
    (wrong_slots, "elements", ALL),
    (wrong_dtype, "elements", TINY),
    (cells_with_a_gap, "elements", ALL),
    (cells_merged, "elements", ("relays", "tight", "sharded", "experts", "8b-grows")),
    (wrong_holder, "sources", ALL),
    (not_a_relay, "sources", WITH_RELAYS),
    (relay_of_another, "sources", WITH_RELAYS),
    (relay_too_early, "sources", WITH_RELAYS),
    (relay_too_early, "order", WITH_RELAYS),
    (relay_before_receive, "order", WITH_RELAYS),
    (relay_before_receive, "sources", WITH_RELAYS),
    (into_the_other_memory, "elements", ("split", "relays")),
    (from_the_other_memory, "sources", ("split", "relays")),
    (stale_copy, "sources", ("stale",)),
    (lost_node, "sources", ("lost",)),
    (beyond_the_last_wave, "order", ALL),
    (narrow_window, "windows", WITH_RELAYS),
    (all_at_once, "windows", ("relays", "tight", "sharded", "8b-grows", "8b-zero1", "swap-full")),
    (staging_forgotten, "windows", ALL),
    (staging_short_by_a_byte, "windows", ALL),
    (release_before_verify, "lifetimes", IN_TIGHT_MODE),
    (acquire_too_late, "lifetimes", IN_TIGHT_MODE),
    (never_acquired, "lifetimes", IN_TIGHT_MODE),
    (released_twice_over, "lifetimes", IN_TIGHT_MODE),
    (release_in_reversible_mode, "lifetimes", ("relays", "8b-grows")),
    (staging_in_host_forgotten, "sources", ("through-host",)),
    (leaves_host_too_early, "sources", ("through-host",)),
    (reaches_host_too_late, "sources", ("through-host",)),
    (released_before_it_is_in_host, "lifetimes", ("through-host",)),
    (host_memory_short_by_a_byte, "memory", ("through-host",)),
    (figure("staged_bytes", -1), "certificate", ("through-host", "tight")),
    (drop, "elements", ("through-host",)),
    (wrong_bytes, "moves", ("through-host",)),
    (capacity_below_the_peak, "memory", ALL),
    (more_capacity_than_there_is, "memory", ALL),
    (more_host_memory_than_there_is, "memory", ALL),
    (everything_acquired_first, "memory", ("swap-full",)),
    (two_owners, "processes", ("concurrent", "overlap", "relays", "swap-full")),
    (started_by_another, "processes", ("concurrent",)),
    (never_started, "processes", ("concurrent", "overlap", "relays", "experts")),
    (started_twice, "processes", ("concurrent", "overlap", "relays", "experts")),
    (processes_for_free, "processes", ALL),
    (engines_for_free, "processes", ("overlap", "8b-grows")),
    (wrong_bytes, "moves", FIGURED),
    (wrong_link, "moves", FIGURED),
    (local_that_crosses, "moves", FIGURED),
    (figure("moved_bytes", 1), "certificate", FIGURED),
    (figure("local_bytes", 1), "certificate", FIGURED),
    (figure("node_in_bytes_max", -1), "certificate", FIGURED),
    (figure("kept_bytes", 1), "certificate", FIGURED),
    (figure("derived_bytes", 1), "certificate", FIGURED),
    (figure("num_waves", -1), "certificate", FIGURED),
    (figure("num_ops", -1), "certificate", FIGURED),
    (figure("num_edges", 1), "certificate", ("relays", "8b-grows")),
    (figure("peak_bytes_max", -1), "certificate", FIGURED),
    (figure("peak_bytes_max", 1), "certificate", ("relays", "8b-grows")),
    (figure("capacity_bytes", 1), "certificate", FIGURED),
    (figure("setup_s", 0.1), "certificate", FIGURED),
    (figure("downtime_s", -0.1), "certificate", FIGURED),
    (figure("background_s", 1), "certificate", FIGURED),
    (scaled("transfer_s", 0.1), "certificate", ("8b-grows", "overlap")),
    (scaled("transfer_s", 0.99999), "certificate", (*FIGURED, "through-host", "swap-full")),
    (scaled("transfer_s", 1.00001), "certificate", (*FIGURED, "through-host", "swap-full")),
    (link_figure, "certificate", FIGURED),
    (no_return_hidden, "certificate", IN_TIGHT_MODE),
    (said_to_be_unsafe, "certificate", TINY),
    (figure("bound_moved_bytes", 1), "bounds", FIGURED),
    (figure("bound_moved_bytes", -1), "bounds", FIGURED),
    (figure("bound_node_in_bytes_max", 1), "bounds", FIGURED),
    (figure("best_bound_moved_bytes", 10**15), "bounds", TINY),
    (scaled("bound_transfer_s", 100.0), "bounds", FIGURED),
    (scaled("bound_transfer_s", 1.00001), "bounds", FIGURED),
    (scaled("bound_transfer_s", 0.99999), "bounds", tuple(name for name in FIGURED if name not in CLAIM_LESS)),
    (scaled("bound_downtime_s", 2.0), "bounds", FIGURED),
    (no_proof, "bounds", FIGURED),
    (prices_of_other_ports, "bounds", FIGURED),
    (one_price_too_many, "bounds", FIGURED),
    (a_price_twice, "bounds", FIGURED),
    (prior_of("drain_s", 1.0), "priors", FIGURED),
    (prior_of("drain_s", -0.01), "priors", ("concurrent",)),
    (prior_of("commit_s", -0.1), "priors", FIGURED),
    (quicker("build-groups"), "priors", FIGURED),
    (quicker("spawn"), "priors", ("concurrent", "overlap", "relays", "experts")),
    (quicker("engine-start"), "priors", ("8b-grows",)),
    (the_other_time, "priors", ("relays", "concurrent", "overlap", "8b-grows")),
    (communicators_forgotten, "priors", FIGURED),
    (communicators_of_some, "priors", FIGURED),
    (engine_not_restarted, "priors", ("8b-grows",)),
]
