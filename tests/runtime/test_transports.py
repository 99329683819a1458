"""Transports between processes, here between threads: what is sent arrives whole in whatever order, and every wait
ends, by its deadline, by an abort from another thread, or by the end of the other side. Over connections of our own
and over torch's gloo alike."""

from __future__ import annotations

import gc
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nereus.ir.cluster import Device  # noqa: E402
from nereus.kernels.flow import Flow, calls  # noqa: E402
from nereus.runtime.communicator import Communicator, abort_all, open_communicators  # noqa: E402
from nereus.runtime.faults import Fault  # noqa: E402
from nereus.runtime.transports.base import TURNS, Outgoing, Parcel  # noqa: E402
from nereus.runtime.transports.choice import Kept, between  # noqa: E402
from nereus.runtime.transports.groups import opponents  # noqa: E402
from nereus.runtime.transports.link import BYTES, DONE, TEXT, Frame, Link  # noqa: E402
from nereus.runtime.transports.mesh import connected  # noqa: E402
from nereus.runtime.transports.sockets import Sockets, open_store  # noqa: E402

LIMIT_S = 30.0


def device(number: int) -> Device:
    return Device("n0", number)


class Ring:
    """``num`` transports that share a store, each used in a thread of its own."""

    def __init__(self, folder: Path, num: int, kind: str = "tcp", *, deadline_s: float = LIMIT_S, **words: Any) -> None:
        self.pool, self.num = ThreadPoolExecutor(num), num

        def make(process: int) -> Kept:
            return between(kind)(
                store=open_store(str(folder / "store"), num),
                name="t",
                process=process,
                num_processes=num,
                process_of={device(n): n for n in range(num)},
                deadline_s=deadline_s,
                **words,
            )

        self.transports = self.all(make)

    def all(self, work: Callable[[int], Any]) -> list[Any]:
        return [future.result(LIMIT_S) for future in [self.pool.submit(work, n) for n in range(self.num)]]

    def close(self) -> None:
        for transport in self.transports:
            transport.drop()
        self.pool.shutdown()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREUS_SAME_HOST", "0")


def message(tag: int, source: int, to: int, sizes: list[int], staging: Any = None) -> tuple[Outgoing, list[Parcel]]:
    """Pieces filled with numbers of their own; the checksum is that number. With ``staging`` they lie in it in turn."""

    def pieces() -> Iterator[Parcel]:
        for part, size in enumerate(sizes):
            value = (31 * tag + 7 * part + source) % 256
            data = torch.full((size,), value, dtype=torch.uint8)
            if staging is not None:
                data = staging[part % len(staging), :size].fill_(value)
            yield Parcel(tag, device(source), device(to), data, value, part)

    return Outgoing(tag, device(source), device(to), pieces()), [
        Parcel(tag, device(source), device(to), torch.zeros(size, dtype=torch.uint8), part=part)
        for part, size in enumerate(sizes)
    ]


def test_room_for_the_next_piece_is_not_waited_for(tmp_path: Path, over_tcp: None) -> None:
    """No event tells of it: the connection took the last of what was under way within the same turn."""
    ring = Ring(tmp_path, 2)
    transport = ring.transports[0]
    ((peer, link),) = transport._links.values()
    text = memoryview(b"under way")
    link.put(Frame(TEXT, size=len(text)), text)
    peer.outgoing.append(message(1, 0, 1, [70_000])[0].pieces)
    assert transport._push() and not link.writing and peer.outgoing
    while transport._push():
        pass
    assert not peer.outgoing
    ring.close()


@pytest.mark.parametrize(
    ("kind", "num", "same_host"),
    [("tcp", 3, "0"), ("tcp", 3, "1"), ("gloo", 2, "0"), ("gloo", 3, "0"), ("gloo", 4, "0")],
)
def test_messages_in_any_order_arrive_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, num: int, same_host: str
) -> None:
    """All to all, several waves without a barrier between them, agreements in between; one process is always late. A
    process sends more pieces than it receives or the reverse, and one sends some nothing."""
    monkeypatch.setenv("NEREUS_SAME_HOST", same_host)
    ring = Ring(tmp_path, num, kind)

    def sizes_of(me: int, to: int) -> list[int]:
        return [3 << 20, 1, 70_000, 3 << 20, 3 << 20][: 5 - (2 * me + to) % 3] if me != 1 or to != 0 else []

    def work(me: int) -> list[int]:
        transport, wrong = ring.transports[me], []
        for wave in range(6):
            sends, receives = [], []
            for to in range(num):
                for twice in range(2):
                    tag = 100 * wave + 10 * me + 2 * to + twice
                    staging = torch.zeros(TURNS if same_host == "1" else 1, 3 << 20, dtype=torch.uint8)
                    sends.append(message(tag, me, to, sizes_of(me, to), staging)[0])
                    receives += message(100 * wave + 10 * to + 2 * me + twice, to, me, sizes_of(to, me))[1]
            if me == wave % num:
                time.sleep(0.05)
            done = []

            def arrived(parcel: Parcel, checksum: int, done: list[Parcel] = done) -> None:
                if not bool((parcel.data == checksum).all()):
                    wrong.append(parcel.tag)
                done.append(parcel)

            transport.exchange(sends[:: -1 if me else 1], receives, arrived, LIMIT_S)
            assert len(done) == len(receives)
            for tag in {parcel.tag for parcel in receives}:
                assert [p.part for p in done if p.tag == tag] == [p.part for p in receives if p.tag == tag]
            if wave % 2:
                assert transport.gather(f"{wave} {me}", LIMIT_S) == tuple(f"{wave} {n}" for n in range(num))
        return wrong

    try:
        assert ring.all(work) == [[]] * num
    finally:
        ring.close()


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("kind", ["tcp", "gloo"])
@pytest.mark.parametrize("doing", ["receiving", "sending", "agreeing"])
def test_an_abort_from_another_thread_ends_a_wait_at_once(tmp_path: Path, doing: str, kind: str) -> None:
    """Process 1 is silent, as one on a machine that is gone: nothing is closed, and the deadline is an hour away."""
    ring = Ring(tmp_path, 2, kind)
    transport = ring.transports[0]

    def wait() -> None:
        outgoing, _ = message(1, 0, 1, [8 << 20] * 4)
        _, receives = message(2, 1, 0, [100])
        if doing == "agreeing":
            transport.gather("", 3600.0)
        else:
            sends = [outgoing] if doing == "sending" else []
            transport.exchange(sends, [] if sends else receives, lambda *_: None, 3600.0)

    try:
        waiting = ring.pool.submit(wait)
        time.sleep(0.2)
        assert not waiting.done()
        begin = time.monotonic()
        transport.abort("process 1 is gone")
        with pytest.raises(Fault, match="process 1 is gone"):
            waiting.result(LIMIT_S)
        assert time.monotonic() - begin < 2.0
        assert not transport.again("next", {})
    finally:
        ring.close()


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("kind", ["tcp", "gloo"])
def test_a_wait_ends_when_it_is_told_to_stop_or_at_its_deadline(tmp_path: Path, kind: str) -> None:
    reasons: list[Fault] = []
    ring = Ring(tmp_path, 3, kind, stop=lambda: reasons[0] if reasons else None)
    try:
        with pytest.raises(Fault, match=r"no answer within 0\.3 s while agreeing with"):
            ring.transports[0].gather("", 0.3)
        reasons.append(Fault("NRS6004", "another decided so"))
        with pytest.raises(Fault, match="another decided so"):
            ring.transports[1].gather("", 3600.0)
    finally:
        ring.close()


@pytest.mark.parametrize("kind", ["tcp", "gloo"])
def test_who_waits_for_a_process_that_never_comes_is_told_to_stop(tmp_path: Path, kind: str) -> None:
    begin = time.monotonic()

    def stop() -> Fault | None:
        return Fault("NRS6004", "it will not come") if time.monotonic() > begin + 0.2 else None

    words: dict[str, Any] = {"process_of": {}, "name": "t", "num_processes": 2}
    for process in range(2):
        store = open_store(str(tmp_path / f"store-{process}"), 2)
        with pytest.raises(Fault, match="it will not come"):
            between(kind)(store=store, process=process, deadline_s=3600.0, stop=stop, **words)
        with pytest.raises(Fault, match=r"was not found within 0\.1 s"):
            between(kind)(store=store, process=process, deadline_s=0.1, **{**words, "name": "u"})


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("kind", ["tcp", "gloo"])
def test_the_first_reason_reaches_those_who_only_saw_a_connection_close(tmp_path: Path, kind: str) -> None:
    ring = Ring(tmp_path, 3, kind)

    def work(me: int) -> str:
        transport = ring.transports[me]
        if me == 1:
            time.sleep(0.1)
            return str(transport.fail(Fault("NRS6002", "no memory here", where="n0.gpu1")))
        try:
            transport.gather("", LIMIT_S)
        except Fault as fault:
            return str(transport.fail(fault))
        return "nothing"

    try:
        assert ring.all(work) == ["no memory here"] * 3
    finally:
        ring.close()


@pytest.mark.usefixtures("over_tcp")
def test_a_stranger_that_connects_is_not_taken_for_a_process(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), 2)
    import torch.distributed as dist

    def knock() -> None:
        seen: Any = dist.PrefixStore("t", open_store(str(tmp_path / "store"), 2))
        while not seen.check(["mesh/0"]):
            time.sleep(0.01)
        host, port, _ = seen.get("mesh/0").decode().split()
        for said in (b"GET / HTTP/1.1\r\n\r\n          ", b""):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(said)

    knocking = threading.Thread(target=knock)
    knocking.start()
    words: dict[str, Any] = {"name": "t", "num_processes": 2, "process_of": {}, "deadline_s": LIMIT_S}

    def late() -> Sockets:
        knocking.join()
        return Sockets(store=open_store(str(tmp_path / "store"), 2), process=1, **words)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(late)
        first = Sockets(store=store, process=0, **words)
        second = other.result(LIMIT_S)
        told = pool.submit(second.gather, "one", LIMIT_S)
        assert first.gather("zero", LIMIT_S) == told.result(LIMIT_S) == ("zero", "one")
        first.drop()
        second.drop()


@pytest.mark.usefixtures("over_tcp")
def test_strangers_that_say_little_hold_up_nobody(tmp_path: Path) -> None:
    """A hundred that connect and are silent, and one that says a byte now and then."""
    import torch.distributed as dist

    words: dict[str, Any] = {"name": "t", "num_processes": 2, "process_of": {}, "deadline_s": LIMIT_S}

    def made(process: int) -> Sockets:
        return Sockets(store=open_store(str(tmp_path / "store"), 2), process=process, **words)

    seen: Any = dist.PrefixStore("t", open_store(str(tmp_path / "store"), 2))
    enough = threading.Event()
    with ThreadPoolExecutor(3) as pool, ExitStack() as strangers:
        first = pool.submit(made, 0)
        while not seen.check(["mesh/0"]):
            time.sleep(0.01)
        host, port, _ = seen.get("mesh/0").decode().split()
        lot = [strangers.enter_context(socket.create_connection((host, int(port)))) for _ in range(100)]

        def trickle() -> None:
            with suppress(OSError):
                while not enough.wait(0.2):
                    lot[0].sendall(b"?")

        trickling, begin = pool.submit(trickle), time.monotonic()
        second = made(1)
        first.result(LIMIT_S)
        assert time.monotonic() - begin < LIMIT_S / 3  # one after another they would have a second each
        enough.set()
        trickling.result(LIMIT_S)
        second.drop()
        first.result().drop()


@pytest.mark.usefixtures("over_tcp")
def test_one_that_trickles_its_word_does_not_outlast_the_deadline(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = open_store(str(tmp_path / "store"), 2)
    seen: Any = dist.PrefixStore("t", open_store(str(tmp_path / "store"), 2))

    def trickle() -> None:
        while not seen.check(["mesh/0"]):
            time.sleep(0.01)
        host, port, _ = seen.get("mesh/0").decode().split()
        with suppress(OSError), socket.create_connection((host, int(port))) as stranger:
            for _ in range(19):
                stranger.sendall(b"?")
                time.sleep(0.7)

    with ThreadPoolExecutor(1) as pool:
        trickling, begin = pool.submit(trickle), time.monotonic()
        with pytest.raises(Fault, match="process 1 was not found within 2 s"):
            Sockets(store=store, name="t", process=0, num_processes=2, process_of={}, deadline_s=2)
        assert time.monotonic() - begin < 7
        trickling.result(LIMIT_S)


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("kind", ["tcp", "gloo"])
@pytest.mark.parametrize("decision", ["commit", Fault("NRS6005", "too late", where="process 1").encode()])
def test_words_that_come_late_are_not_those_of_the_next_transition(tmp_path: Path, kind: str, decision: str) -> None:
    """One process gives up waiting for the others' words, but the decision was made: it is kept, the connections are
    not."""
    import torch.distributed as dist

    ring = Ring(tmp_path, 2, kind, keep=True)
    store: Any = dist.PrefixStore("t", open_store(str(tmp_path / "store"), 2))
    store.compare_set("decision", "", decision)
    hasty, process_of = ring.transports[0], {device(n): n for n in range(2)}
    try:
        if decision == "commit":
            hasty.decide(0.001)
        else:
            with pytest.raises(Fault, match="too late"):
                hasty.decide(0.001)
        assert not hasty.again("next", process_of)
    finally:
        ring.close()


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("kind", ["tcp", "gloo"])
def test_twenty_transitions_leave_nothing_behind(tmp_path: Path, kind: str) -> None:
    """No descriptor, thread, group or tensor, whether they end well, by an abort, or by one that was never joined. (Nor
    resident memory: test_peer_lost.py, where no arenas of the allocator for threads that came and went hide it.)"""
    import torch.distributed as dist

    def left() -> tuple[int, ...]:
        """Descriptors, threads as Python and as the system counts them, groups, bytes in tensors."""
        gc.collect()
        tensors = sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor)
        tasks = len(os.listdir("/proc/self/task"))
        fds = len(os.listdir("/proc/self/fd"))
        return fds, threading.active_count(), tasks, len(open_communicators()), tensors

    def transition(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        ring = Ring(folder, 3, kind)
        if number % 2:
            ring.transports[0].abort("a drill")
        else:

            def work(me: int) -> None:
                outgoing, _ = message(me, me, (me + 1) % 3, [1 << 20] * 3)
                _, receives = message((me - 1) % 3, (me - 1) % 3, me, [1 << 20] * 3)
                ring.transports[me].exchange([outgoing], receives, lambda *_: None, LIMIT_S)
                ring.transports[me].decide(LIMIT_S)
                ring.transports[me].close(LIMIT_S)

            ring.all(work)
            assert kind != "gloo" or not open_communicators()
        ring.close()

    for number in range(2):  # what is made once
        transition(number)
    before = left()
    for number in range(2, 22):
        transition(number)
    end = time.monotonic() + 10.0
    while any(now > then for now, then in zip(left(), before, strict=True)) and time.monotonic() < end:
        time.sleep(0.1)  # a thread that was joined is gone a little later
    assert not any(now > then for now, then in zip(left(), before, strict=True)), (left(), before)
    assert before[3] == 0
    assert not dist.is_initialized()


@pytest.mark.parametrize("num", range(2, 10))
def test_every_pair_meets_once_in_a_tournament_and_always_at_the_same_time(num: int) -> None:
    """Nobody waits in a circle: of the meetings that are left, the first of some pair is the first of both."""
    meetings = {player: list(opponents(player, num)) for player in range(num)}
    for player, others in meetings.items():
        assert sorted(others) == [other for other in range(num) if other != player]
    while any(meetings.values()):
        ready = [p for p, others in meetings.items() if others and meetings[others[0]][0] == p]
        assert ready
        for player in ready:
            meetings[player].pop(0)


def test_all_groups_of_a_process_can_be_ended_from_another_thread(tmp_path: Path) -> None:
    """Those of all processes and those of few, whoever waits in them."""
    import torch.distributed as dist

    def make(name: str, me: int, size: int) -> Communicator:
        store = dist.PrefixStore(name, open_store(str(tmp_path / "store"), 3))
        return Communicator(store, me, size, timeout_s=3600.0)

    with ThreadPoolExecutor(3) as pool:
        groups = [future.result() for future in [pool.submit(make, "all", me, 3) for me in range(3)]]
        groups += [future.result() for future in [pool.submit(make, "few", me, 2) for me in range(2)]]
        assert set(open_communicators()) == set(groups)
        waits = [pool.submit(each.swap(1, [], [torch.zeros(4)])[0].wait) for each in (groups[0], groups[3])]
        time.sleep(0.2)
        assert not any(wait.done() for wait in waits)
        begin = time.monotonic()
        abort_all()
        for wait in waits:
            with pytest.raises(RuntimeError, match=r"closed|reset"):
                wait.result(LIMIT_S)
        assert time.monotonic() - begin < 5.0
    for group in groups:
        group.drop()
    assert open_communicators() == ()


@pytest.mark.procs
def test_the_check_for_machines_with_gpus_passes_over_gloo(repo_root: Path) -> None:
    command = [sys.executable, "benchmarks/group_check.py", "--backend", "gloo", "--procs", "2", "--piece-kb", "64"]
    done = subprocess.run(command, check=False, cwd=repo_root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "every byte right, nothing left behind" in done.stdout
    assert "ended" in done.stdout


def test_nccl_without_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words: dict[str, Any] = {"process": 0, "num_processes": 1, "process_of": {}, "deadline_s": 1.0, "name": "t"}
    with pytest.raises(Fault, match="needs a GPU"):
        between("nccl")(store=open_store(str(tmp_path / "store"), 1), **words)
    with pytest.raises(ValueError, match="tcp, gloo, nccl"):
        between("mpi")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([BYTES, TEXT, DONE]), st.integers(0, 5000), st.booleans()), max_size=20),
    st.integers(1, 4096),
)
def test_frames_come_through_in_whatever_parts(frames: list[tuple[int, int, bool]], most: int) -> None:
    """A connection that passes little at a time, and a receiver that has no place for every other frame at first;
    either end may have a flow where the other has bytes."""
    a, b = socket.socketpair()
    came: list[tuple[int, int, bytes, int]] = []
    asked: set[int] = set()
    flows = calls() is not None

    def flowing(memory: Any) -> Flow:
        return Flow(np.array([[memory.ctypes.data, 1, len(memory), len(memory), 1, 7, 0, 0]]), len(memory))

    def place(frame: Frame) -> memoryview | Flow | None:
        if frame.tag % 2 and frame.tag not in asked:
            asked.add(frame.tag)
            return None
        rooms.append(np.zeros(frame.size, dtype=np.uint8))
        return (
            flowing(rooms[-1])
            if flows and frame.kind == BYTES and frame.tag % 3 == 0 and frame.size
            else rooms[-1].data
        )

    def arrived(frame: Frame, body: memoryview | Flow) -> None:
        if isinstance(body, Flow):
            assert body.total() == frame.checksum
        came.append((frame.kind, frame.tag, rooms[-1].tobytes(), frame.checksum))

    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most)
    rooms: list[Any] = []
    try:
        sender, receiver = (Link(s, place, arrived) for s in (a, b))
        expected = []
        kept = []
        for tag, (kind, size, flows_out) in enumerate(frames):
            body = np.arange(tag, tag + (0 if kind == DONE else size), dtype=np.int64).astype(np.uint8)
            kept.append(body)
            total = flowing(body).summed() if flows and len(body) else 11
            out = flowing(body) if flows_out and flows and kind == BYTES and len(body) else body.data
            sender.put(Frame(kind, tag, size=len(body), checksum=0 if isinstance(out, Flow) else total), out)
            expected.append((kind, tag, body.tobytes(), total))
        while sender.writing or len(came) < len(frames):
            sender.write()
            receiver.read()
            receiver.resume()
        assert came == expected
        a.close()
        receiver.read()
        assert receiver.ended
    finally:
        a.close()
        b.close()


def test_what_is_shorter_than_a_frame_is_waited_for_after_a_halt() -> None:
    """A connection says nothing before as much is there as is wanted: that changes when a frame gets its place."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        b = server.accept()[0]
    came: list[bytes] = []
    ready: list[bool] = []
    with a, b:
        sender, receiver = (
            Link(
                s, lambda f: memoryview(bytearray(f.size)) if ready else None, lambda _, body: came.append(bytes(body))
            )
            for s in (a, b)
        )
        receiver.read()  # nothing yet: a whole frame is waited for
        sender.put(Frame(TEXT, size=3), memoryview(b"abc"))
        sender.write()
        while not receiver.halted:
            receiver.read()
        ready.append(True)
        receiver.resume()
        assert select.select([b], [], [], 5.0)[0] == [b]
        receiver.read()
        assert came == [b"abc"]


def test_processes_with_thousands_of_descriptors_meet(tmp_path: Path) -> None:
    """``select`` knows 1,024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("no more descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        store = open_store(str(tmp_path / "store"), 2)
        with ThreadPoolExecutor(2) as threads:
            meet = partial(connected, store, num_processes=2, address="127.0.0.1", deadline_s=30.0, stop=lambda: None)
            first, second = threads.map(meet, range(2))
        assert first.keys() == {1} and second.keys() == {0} and first[1].fileno() > 1024
        for connection in (*first.values(), *second.values()):
            connection.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
