"""Whatever the compiler makes of random plans is proved, and random faults in it are not."""

from __future__ import annotations

import json
import random

from hypothesis import assume, event, given, note
from hypothesis import strategies as st
from passes.execute import compile_or_confirm, pipeline
from passes.plans import describe, pairs
from passes.profiles import examples
from verify.documents import document_of

from nereus.ir.plan import Plan
from nereus.verify.api import verify


@examples(50)
@given(pairs(), st.sampled_from(["auto", "auto", "tight"]))
def test_compiled_transitions_are_proved(pair: tuple[Plan, Plan], mode: str) -> None:
    for plan in pair:
        note(describe(plan))
    compiled = compile_or_confirm(*pair, pipeline(mode=mode))
    assume(compiled is not None)
    assert compiled is not None
    verdict = verify(document_of(compiled), plans=(compiled.old, compiled.new))
    event(f"{compiled.schedule.mode}, {'relays' if any(m.after for m in compiled.schedule.moves) else 'direct'}")
    assert verdict.holds, [f for f in verdict.findings if not f.holds]


@examples(30)
@given(pairs(rich=False), st.integers(0, 2**32))
def test_no_change_of_a_move_goes_unnoticed(pair: tuple[Plan, Plan], seed: int) -> None:
    """Any column of any move, changed in any way, with its digest left as it was or not."""
    compiled = compile_or_confirm(*pair, pipeline())
    assume(compiled is not None and len(compiled.schedule.moves) > 0)
    assert compiled is not None
    value = json.loads(json.dumps(document_of(compiled)))
    columns, rng = value["schedule"]["moves"], random.Random(seed)
    number = rng.randrange(len(columns["src"]))
    what = rng.choice(["src", "dst", "bytes", "link", "region"])
    places, regions = 2 * len(value["schedule"]["devices"]), len(value["schedule"]["regions"]["counts"])
    choices = {"src": places, "dst": places, "bytes": 10**6, "link": 4, "region": regions}
    changed = rng.randrange(choices[what])
    assume(changed != columns[what][number])
    columns[what][number] = changed
    verdict = verify(value, plans=(compiled.old, compiled.new))
    broken = {f.name for f in verdict.findings if not f.holds}
    # Links are no part of the digest; everything else is.
    assert broken - {"digest"} if what in ("dst", "bytes", "link") else broken, what
