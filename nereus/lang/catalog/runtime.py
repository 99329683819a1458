"""Codes of running plans (nereus.runtime)."""

from __future__ import annotations

from nereus.lang.catalog.entry import CodeEntry, plan

#: A change that runs well; what goes wrong is put in by ``--drill``, or only happens on a faulty machine.
_PAIR = {
    "old.plan": plan("stage actor.train { on = n0  tp = 8  optimizer = adam }"),
    "new.plan": plan("stage actor.train { on = n0  tp = 4  optimizer = adam }"),
}

ENTRIES: tuple[CodeEntry, ...] = (
    CodeEntry(
        code="NRS6001",
        title="participants were given different transitions",
        cause=(
            "Before the first byte moves, all processes compare the digest of the transition that their programs were "
            "derived from. One process has another: its programs come from another compilation, or other plans."
        ),
        example=_PAIR,
        command="run",
        shown=False,
        fix="Compile once and give every participant programs of that one transition.",
    ),
    CodeEntry(
        code="NRS6002",
        title="memory for a new storage could not be allocated",
        cause=(
            "Memory is allocated for real before anything is moved into it, and the named device had none left. In "
            "reversible mode the new storages are dropped and the old plan goes on."
        ),
        example=_PAIR,
        command="run",
        options=("--drill", "allocation"),
        fix="Free memory there; when running on one machine, use a smaller --scale or fewer --procs.",
    ),
    CodeEntry(
        code="NRS6003",
        title="a message arrived damaged",
        cause=(
            "Every message carries a checksum over its elements and their places in their tensors. What the receiver "
            "read back from its storages has another one: a bit flipped, or something lies in the wrong place."
        ),
        example=_PAIR,
        command="run",
        options=("--drill", "corrupt"),
        fix="Run it again; if it happens again, memory or network of one of the two machines named is at fault.",
    ),
    CodeEntry(
        code="NRS6004",
        title="a participant failed",
        cause="The named process or device raised the error that is quoted; all others stopped because of it.",
        example=_PAIR,
        command="run",
        options=("--drill", "raise"),
        fix="The quoted error says what to mend.",
    ),
    CodeEntry(
        code="NRS6005",
        title="a deadline passed",
        cause=(
            "Every wait for another process has a deadline (--deadline). Nothing came in that time and nobody said "
            "why: a process is stopped, swapping, or waiting for something else."
        ),
        example=_PAIR,
        command="run",
        options=("--procs", "2", "--deadline", "3", "--drill", "hang"),
        fix="Look at the process named; on a slow machine raise --deadline or lower --scale.",
    ),
    CodeEntry(
        code="NRS6006",
        title="a process ended in the middle",
        cause="A worker process is gone without a word, most often ended by the kernel when memory ran out.",
        example=_PAIR,
        command="run",
        options=("--procs", "2", "--drill", "exit"),
        fix="Use a smaller --scale or fewer --procs; the kernel's log says if it ended the process.",
    ),
    CodeEntry(
        code="NRS6007",
        title="elements are wrong",
        cause=(
            "After a transition every element of every shard is compared with a value computed from its place in its "
            "tensor. Some differ, or a shard is missing or left over. This is never the user's mistake."
        ),
        example=_PAIR,
        command="run",
        shown=False,
        fix="Please report it with both plans and the command.",
    ),
    CodeEntry(
        code="NRS6008",
        title="the plans are too large to run here, or cannot be scaled as asked",
        cause="Running builds the whole state of all devices on one machine; models as large as these do not fit.",
        example=_PAIR,
        command="run",
        options=("--scale", "none"),
        fix="Use --scale auto, or a smaller width; or --scale WIDTH,LAYERS with at least one layer per pipeline stage.",
    ),
    CodeEntry(
        code="NRS6009",
        title="plans cannot be run on this machine",
        cause="Running needs torch, and processes that can be forked. The message names what is missing.",
        example=_PAIR,
        command="run",
        shown=False,
        fix="pip install torch; nereusc doctor says what works and what would enable the rest.",
    ),
    CodeEntry(
        code="NRS6010",
        title="the state at hand is not that of the old plan",
        cause=(
            "A tensor that the old plan has is not there, or has another extent. Nothing was moved: a transition "
            "starts only from exactly the state that it was compiled for."
        ),
        example=_PAIR,
        command="run",
        shown=False,
        fix="Compile from the plan that really runs.",
    ),
    CodeEntry(
        code="NRS6011",
        title="the job's store does not answer",
        cause=(
            "Processes of a living job agree through a store (torch's TCPStore, a file, what the framework brings). "
            "It is gone, or the process that keeps it is. Each process still has the state of its last plan."
        ),
        example=_PAIR,
        command="run",
        shown=False,
        fix="Keep the store in a process that outlives the job's own, and start again from the last checkpoint.",
    ),
    CodeEntry(
        code="NRS6012",
        title="a change was vetoed",
        cause=(
            "A hook that brings the job to rest before a change (a checkpoint being written, a validation under way) "
            "said that it cannot be now. The old plan goes on."
        ),
        example=_PAIR,
        command="run",
        shown=False,
        fix="Ask again at a later boundary.",
    ),
    CodeEntry(
        code="NRS6013",
        title="the job went on without this process",
        cause=(
            "The process was silent for longer than the deadline (stopped, swapped out, cut off), and the others "
            "agreed on a plan without it. What it holds is of an older plan; it must not serve, send or save any of it."
        ),
        example=_PAIR,
        command="run",
        shown=False,
        fix="End the process; a new one may join. Raise deadline_s where steps are longer than that.",
    ),
    CodeEntry(
        code="NRS6014",
        title="the new objects are not what they should be",
        cause=(
            "After the state had arrived, a line of the rebuild checklist did not hold, or the probe (figures that "
            "must be the same before and after, such as log-probabilities of a fixed batch) gave something else. The "
            "change was aborted, and the old plan goes on."
        ),
        example=_PAIR,
        command="run",
        shown=False,
        fix="Look at the builder of the stage that is named: another seed, a missing setting, a wrong layout.",
    ),
    CodeEntry(
        code="NRS9601",
        title="a program is not well formed",
        cause=(
            "Programs are checked before they run: a block leaves its storage, something reads what is not there or "
            "writes what must stay, or the two ends of a message differ. A bug in Nereus; nothing was moved."
        ),
        example=_PAIR,
        command="run",
        shown=False,
        fix="Please report it with both plans and the command.",
    ),
)
