"""What a job's processes agree through: the first write counts, waits end, what is damaged is said; and the diary."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nereus.ir.cluster import Device
from nereus.runtime.faults import DEADLINE, PARTICIPANT_FAILED, PROCESS_ENDED, STORE_LOST, Fault
from nereus.runtime.session.journal import Journal, read_journal
from nereus.runtime.session.members import Losses, Member, Seat, device_of, joined, report_loss
from nereus.runtime.session.record import Record, never


def record(me: int = 1, store: Any = None) -> Record:
    return Record(store if store is not None else dist.HashStore(), "job", me)


def test_the_first_write_counts() -> None:
    store = dist.HashStore()
    one, two = record(1, store), record(2, store)
    assert one.decided("x") is None
    assert two.first("x", ("commit", 2)) == ("commit", 2)
    assert one.first("x", "abort") == ("commit", 2) == one.decided("x")
    said: list[Any] = []
    threads = [
        threading.Thread(target=lambda n=n: said.append(record(n, store).first("y", n)))  # type: ignore[misc]
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 8 and len(set(said)) == 1


def test_values_are_no_texts_of_the_store() -> None:
    found = record()
    found.put("k", {"a": (1, b"\x00\xff", "\n")})
    assert found.get("k") == {"a": (1, b"\x00\xff", "\n")} and found.get("other") is None


def test_waits_end() -> None:
    found = record(3)
    begin = time.monotonic()
    with pytest.raises(Fault, match=r"no word from process 7 within 0.1 s") as caught:
        found.wait("k", 0.1, of="process 7", stop=never)
    assert caught.value.code == DEADLINE and time.monotonic() - begin < 5
    with pytest.raises(Fault, match="somebody gave up"):
        found.wait("k", 60.0, of="process 7", stop=lambda: Fault(PROCESS_ENDED, "somebody gave up"))
    threading.Timer(0.05, lambda: found.put("k", 5)).start()
    assert found.wait("k", 30.0, of="process 7", stop=never) == 5


def test_gather_is_by_member() -> None:
    store = dist.HashStore()
    record(4, store).put("g/4", "four")
    record(9, store).put("g/9", "nine")
    assert record(2, store).gather("g", "two", (2, 4, 9), 1.0, stop=never) == {2: "two", 4: "four", 9: "nine"}
    with pytest.raises(Fault, match="process 5"):
        record(2, store).gather("g", "two", (2, 5), 0.05, stop=never)


def test_a_damaged_entry_and_a_lost_store_are_said() -> None:
    store = dist.HashStore()
    found = record(1, store)
    dist.PrefixStore("job", store).set("k", b"nereus1\nno such thing")
    with pytest.raises(Fault, match="entry k") as caught:
        found.get("k")
    assert caught.value.code == PARTICIPANT_FAILED

    class Gone:
        def __getattr__(self, name: str) -> Any:
            def refuse(*_: Any) -> None:
                raise RuntimeError("Connection reset by peer")

            return refuse

    found.store = Gone()
    for ask in (lambda: found.get("k"), lambda: found.put("k", 1), lambda: found.first("k", 1)):
        with pytest.raises(Fault, match="Connection reset") as caught:
            ask()
        assert caught.value.code == STORE_LOST


def test_losses_by_pid_and_by_number() -> None:
    store = dist.HashStore()
    members = [Member(number=n, seat=Seat(Device("n0", n)), host="h", pid=100 + n) for n in (1, 2, 3)]
    for member in members:
        record(member.number, store).put(f"member/{member.number}", member)
    assert list(joined(record(1, store), {}).values()) == members
    losses = Losses(record(1, store))
    assert losses.among(members) is None
    report_loss(record(0, store), ("h", 102))
    report_loss(record(1, store), 3)
    report_loss(record(2, store), 3)
    fault = losses.among(members)
    assert fault is not None and "process 2 on n0.gpu2" in fault.text and fault.code == PROCESS_ENDED
    assert [losses.has(m) for m in members] == [False, True, True]


@pytest.mark.parametrize("name", ["n0", "n0.gpu", "gpu1", "n0.gpux", ".gpu1"])
def test_a_device_is_a_node_and_a_number(name: str) -> None:
    assert device_of("a.b.gpu12") == Device("a.b", 12)
    with pytest.raises(ValueError, match=r"NODE\.gpuNUMBER"):
        device_of(name)


def test_a_journal_survives_a_crash_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal"
    with Journal(path) as journal:
        journal.write(1, "begun", base=0)
        journal.write(1, "committed", plan="a.plan")
    with open(path, "ab") as file:
        file.write(b'{"at": 1, "epoch": 2, "event": "com')
    with Journal(path) as journal:
        journal.write(2, "begun", base=1)
        journal.write(2, "aborted", fault="x")
    entries = list(read_journal(path))
    assert [(e.epoch, e.event) for e in entries] == [(1, "begun"), (1, "committed"), (2, "begun"), (2, "aborted")]
    assert entries[0].more == {"base": 0}
    with Journal(None) as nowhere:
        nowhere.write(1, "begun")
