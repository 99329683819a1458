"""Every kind of fault that is planted in a document is caught, by the check whose business it is.

Whoever plants a fault covers it up: the digest is made anew, so that it proves nothing.
"""

from __future__ import annotations

import pytest
from verify.documents import broken, document, sealed, transition
from verify.faults import ALL, FAULTS, Fault, drop, wrong_bytes, wrong_tensor

from nereus.verify.api import verify


@pytest.mark.parametrize("name", (*ALL, "through-host"))
def test_untouched(name: str) -> None:
    value = document(name)
    assert broken(name, value) == {}
    assert broken(name, sealed(name, value)) == {}


@pytest.mark.parametrize(
    ("plant", "caught_by", "name"),
    [
        pytest.param(plant, caught_by, name, id=f"{plant.__name__}-{caught_by}-{name}")
        for plant, caught_by, names in FAULTS
        for name in names
    ],
)
def test_planted(plant: Fault, caught_by: str, name: str) -> None:
    value = document(name)
    plant(value)
    assert value != document(name)
    found = broken(name, sealed(name, value))
    assert caught_by in found, found
    assert not {"plans", "digest"} & set(found), "the fault was not covered up"
    assert not found[caught_by].startswith("cannot be judged")


@pytest.mark.slow
def test_the_largest_with_experts() -> None:
    """Faults of a mixture of experts with 18,000 tensors; few, since it is large."""
    assert broken("moe-ep8", document("moe-ep8")) == {}
    for plant, caught_by in ((drop, "elements"), (wrong_tensor, "elements"), (wrong_bytes, "moves")):
        value = document("moe-ep8")
        plant(value)
        assert caught_by in broken("moe-ep8", sealed("moe-ep8", value))


def test_changed_text() -> None:
    """Of a plan: the fingerprint, else the digest, else what it says now is not what the schedule does."""
    from hashlib import sha256

    value = document("relays")
    text = value["plans"]["new"]["text"]
    value["plans"]["new"]["text"] = text.replace("zero        = 1", "zero        = 0")
    assert value["plans"]["new"]["text"] != text
    assert {"plans", "digest", "elements"} <= set(broken("relays", value))
    value["fingerprints"]["new_plan"] = sha256(value["plans"]["new"]["text"].encode()).hexdigest()
    assert {"digest", "elements"} <= set(broken("relays", value))
    assert "plans" not in broken("relays", value)


def test_changed_share() -> None:
    """Another share in host memory is another plan, though the same elements move about."""
    from hashlib import sha256

    value = document("split")
    text = value["plans"]["new"]["text"]
    assert "@host(0.25)" in text
    value["plans"]["new"]["text"] = text.replace("@host(0.25)", "@host(0.75)")
    value["fingerprints"]["new_plan"] = sha256(value["plans"]["new"]["text"].encode()).hexdigest()
    assert {"digest", "elements", "bounds"} <= set(broken("split", value))


def test_two_owners_in_the_plan_itself() -> None:
    """A plan that the front end refuses: in asynchronous mode generation shares no GPU."""
    value = document("concurrent")
    text = value["plans"]["new"]["text"]
    assert text.count("= n0\n") == 2, "generation lies on n0: its devices and their order"
    value["plans"]["new"]["text"] = text.replace("= n0\n", "= n1\n")
    found = broken("concurrent", value)
    assert "plans" in found and "processes" in found


def test_a_fault_is_named_with_place_and_numbers() -> None:
    value = document("relays")
    drop(value)
    said = broken("relays", sealed("relays", value))["elements"]
    assert "never arrives" in said and "gpu" in said and "actor" in said


def test_plans_in_hand_are_used() -> None:
    known = transition("relays")
    value = document("relays")
    value["plans"]["new"]["text"] = "no plan"
    found = {f.name for f in verify(value, plans=(known.old, known.new)).findings if not f.holds}
    assert found == {"plans"}
