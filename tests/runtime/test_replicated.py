"""A store on three others: it is one of torch's to whoever uses it, and a job outlives the loss of one of the three."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.test_session import DP2, DP4, PLANS, TP4, WITHOUT_0, good, run

from nereus.runtime.faults import CANNOT_START, STORE_LOST, Fault
from nereus.runtime.session.journal import read_journal
from nereus.runtime.session.local import LocalProcesses
from nereus.runtime.session.record import Record
from nereus.runtime.session.replicated import ReplicatedStore, connected

dist: Any = torch.distributed

KEYS, VALUES = st.sampled_from("ab"), st.sampled_from(["", "+", "=v", "v", "w"])
WORDS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("add"), st.just("number"), st.integers(1, 3)),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1, max_size=2)),
    st.tuples(st.just("get_if_there"), st.one_of(KEYS, st.just("number"))),
    st.tuples(st.just("delete_key"), KEYS),
)


def said(store: Any, word: str, *args: Any) -> Any:
    if word == "get_if_there":
        return store.get(args[0]) if store.check([args[0]]) else None
    return getattr(store, word)(*args)


@given(st.lists(WORDS, max_size=12), st.integers(0, 12), st.integers(0, 2))
@settings(deadline=None)
def test_it_is_a_store_as_torchs_are(words: list[Any], loss: int, lost: int) -> None:
    """Two processes' views of it, one after the other, and one of the three lost on the way."""
    one, three = dist.HashStore(), [dist.HashStore() for _ in range(3)]
    views = [ReplicatedStore(three), ReplicatedStore(three)]
    for number, word in enumerate(words):
        if number == loss:
            views[0].stores[lost] = views[1].stores[lost] = None
        assert said(dist.PrefixStore("p", views[number % 2]), *word) == said(one, *word), words[: number + 1]


def test_deleted_by_its_last_user_it_is_gone_everywhere() -> None:
    three = [dist.HashStore() for _ in range(3)]
    store = ReplicatedStore(three)
    store.set("k", "v")
    assert store.delete_key("k") and not store.check(["k"]) and not any(each.check(["k"]) for each in three)


def test_an_odd_number_of_stores() -> None:
    with pytest.raises(ValueError, match="2 stores"):
        ReplicatedStore([dist.HashStore(), dist.HashStore()])
    with pytest.raises(Fault, match="'here' is no address") as caught:
        connected(["here"])
    assert caught.value.code == CANNOT_START


@pytest.fixture
def processes() -> Iterator[LocalProcesses]:
    with LocalProcesses("runtime.session_job:main", stores=3) as found:
        yield found


@pytest.mark.procs
def test_many_add_and_wait_at_once(processes: LocalProcesses) -> None:
    """No number twice, none left out, and who waits hears; then one store less, and then too few."""
    stores = [ReplicatedStore([each.clone() for each in processes.store.stores]) for _ in range(4)]
    numbers: list[int] = []
    heard: list[bytes] = []

    def work(store: ReplicatedStore) -> None:
        numbers.extend(store.add("n", 1) for _ in range(5))
        heard.append(store.get("word"))

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    while len(numbers) < 20:
        time.sleep(0.01)
    processes.store.set("word", "go")
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 21)) and heard == [b"go"] * 4
    record = Record(processes.store, "job", 1)
    assert record.first("d", "commit") == "commit"
    os.kill(processes.keepers[0].pid, signal.SIGKILL)
    assert Record(stores[1], "job", 2).first("d", "no") == "commit" and record.count("m") == 1
    assert processes.store.stores[0] is None
    with pytest.raises(dist.DistStoreError):
        processes.store.wait(["never"], timedelta(seconds=0.05))
    os.kill(processes.keepers[1].pid, signal.SIGKILL)
    with pytest.raises(Fault, match="2 of the 3 stores do not answer") as caught:
        record.decided("d")
    assert caught.value.code == STORE_LOST


@pytest.mark.procs
def test_a_store_is_lost_between_prepare_and_decision(processes: LocalProcesses, tmp_path: Path) -> None:
    """All agree, and the job goes on over the two that are left."""
    fault = {"device": "n0.gpu1", "phase": "vote", "kind": "kill store", "pid": processes.keepers[0].pid}
    results = run(processes, tmp_path, first=DP2, steps=5, changes={1: DP4, 3: TP4}, expect=4, fault=fault)
    assert (tmp_path / "struck-n0.gpu1").exists()
    good(results, "tp4", 4)
    assert all(entry.event != "aborted" for p in tmp_path.glob("journal-*") for entry in read_journal(p))


@pytest.mark.procs
def test_the_leader_and_a_store_are_lost_at_the_decision(processes: LocalProcesses, tmp_path: Path) -> None:
    """A machine that has both: the survivors agree what was decided, and go on without them."""
    fault = {"device": "n0.gpu0", "phase": "decide", "kind": "kill both", "pid": processes.keepers[2].pid}
    words: dict[str, Any] = {"first": DP2, "steps": 4, "changes": {1: DP4}, "fallback": (WITHOUT_0,)}
    results = run(processes, tmp_path, expect=3, fault=fault, **words)
    assert (tmp_path / "struck-n0.gpu0").exists()
    good(results, PLANS[WITHOUT_0].path, 3)


@pytest.mark.procs
def test_a_store_is_stopped_between_prepare_and_decision(processes: LocalProcesses, tmp_path: Path) -> None:
    """It neither answers nor closes: each process leaves it out before the deadline, and the change is made."""
    fault = {"device": "n0.gpu1", "phase": "vote", "kind": "stop store", "pid": processes.keepers[0].pid}
    words: dict[str, Any] = {"first": DP2, "steps": 5, "changes": {1: DP4, 3: TP4}, "deadline_s": 20.0}
    good(run(processes, tmp_path, expect=4, fault=fault, **words), "tp4", 4)
    assert (tmp_path / "struck-n0.gpu1").exists()
    assert all(entry.event != "aborted" for p in tmp_path.glob("journal-*") for entry in read_journal(p))


@pytest.mark.procs
def test_the_only_store_is_stopped(tmp_path: Path) -> None:
    """No call into it outlives the deadline: all processes end, and say which store was silent, and in which phase."""
    with LocalProcesses("runtime.session_job:main") as processes:
        pid = processes.keepers[0].pid
        fault = {"device": "n0.gpu1", "phase": "vote", "kind": "stop store", "pid": pid}
        results = run(processes, tmp_path, first=DP2, steps=4, changes={1: DP4}, expect=4, fault=fault, deadline_s=6.0)
        port = processes.store.port
    assert [r.get("fault") for r in results] == [STORE_LOST] * 4, results
    assert all(f"127.0.0.1:{port} has been silent for 6 s" in r["text"] for r in results), results
    assert all("(vote)" in r["text"] or "(finish)" in r["text"] for r in results), results
