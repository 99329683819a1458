"""NRS1xxx: text that cannot be read as a plan."""

from __future__ import annotations

from nereus.lang.catalog.entry import CodeEntry, one, plan

_TRAIN = "stage actor.train { on = n0 }"

ENTRIES = (
    CodeEntry(
        code="NRS1001",
        title="file cannot be read",
        cause=(
            "The file named on the command line does not exist, is a directory, may not be read, or is far larger "
            "than any plan."
        ),
        example={"job.plan": plan(_TRAIN)},
        compiles="jobs.plan",
        fix="Check the spelling of the path and the permissions of the file.",
    ),
    CodeEntry(
        code="NRS1002",
        title="not UTF-8 text",
        cause=(
            "A plan is UTF-8 text. The file holds a byte that UTF-8 does not allow: it was saved in another encoding, "
            "or it is no text at all."
        ),
        example={"job.plan": "# pr\u00e9sentation\n" + plan(_TRAIN)},
        encoding="latin-1",
        fix="Save the file as UTF-8.",
    ),
    CodeEntry(
        code="NRS1003",
        title="character without a meaning",
        cause=(
            "The character is not part of the language. Often a habit from elsewhere: ':' for '=', ';' between "
            "entries, single quotes, '//' before a comment."
        ),
        example=one("stage actor.train { on = n0  tp: 2 }"),
        fix=(
            "Keys and values are joined by '=', entries separated by white space or commas, strings stand in double "
            "quotes, comments begin with '#'."
        ),
    ),
    CodeEntry(
        code="NRS1004",
        title="string that is not closed",
        cause="A string ends on the line on which it began, with a double quote.",
        example={"job.plan": plan(_TRAIN) + 'checkpoint { path = "ckpt/run\n}\n'},
        fix="Add the closing quote.",
    ),
    CodeEntry(
        code="NRS1005",
        title="bracket that is not closed",
        cause="A brace, parenthesis or square bracket has no partner before its block or the file ends.",
        example={"job.plan": plan("stage actor.train { on = n0")},
        fix="Add the closing bracket where the block ends.",
    ),
    CodeEntry(
        code="NRS1006",
        title="closing bracket without an opening one",
        cause="There is one closing bracket too many, or the opening one was lost.",
        example=one("stage actor.train { on = n0 } }"),
        fix="Remove it, or restore the opening bracket.",
    ),
    CodeEntry(
        code="NRS1007",
        title="key without a value",
        cause="Nothing stands behind the '=' that could be a value.",
        example=one("stage actor.train { on = n0  tp = }"),
        fix=(
            "Write the value, or remove the key: most keys have a default (KEY = default takes back an inherited "
            "value)."
        ),
    ),
    CodeEntry(
        code="NRS1008",
        title="word that belongs to nothing",
        cause="A word at the beginning of an entry must be followed by '=' and a value, or by a block in braces.",
        example=one("stage actor.train { on = n0  tp 2 }"),
        fix="Add the missing '=' or '{'.",
    ),
    CodeEntry(
        code="NRS1009",
        title="something stands where it cannot",
        cause="The text is made of known pieces, but this piece cannot follow the one before it.",
        example=one("stage actor.train { on = n0 { tp = 2 } = 3 }"),
        fix="The message says what could stand here instead.",
    ),
    CodeEntry(
        code="NRS1010",
        title="brackets nest too deep",
        cause="Plans nest three or four deep; beyond 32 the text is taken for damaged.",
        example=one("stage actor.train { on = n0  pp_split = " + "(" * 40 + "32" + ")" * 40 + " }"),
        fix="Remove the surplus brackets.",
    ),
    CodeEntry(
        code="NRS1011",
        title="number too large",
        cause="No count, size or rate is that large; a digit or unit is wrong.",
        example=one("stage actor.train { on = n0  micro_batch = 100000000000000000000 }"),
        fix="Check the digits and the unit.",
    ),
    CodeEntry(
        code="NRS1012",
        title="extends is not the first statement",
        cause=(
            "A plan starts from its base, so extends must stand before everything else; otherwise it would be unclear "
            "which of the two overrides the other."
        ),
        example={"job.plan": 'workload { epochs = 2 }\nextends "base.plan"\n', "base.plan": plan(_TRAIN)},
        fix="Move extends to the top of the file.",
    ),
    CodeEntry(
        code="NRS1013",
        title="more than one extends",
        cause="A plan has one base. Bases may have bases of their own.",
        example={
            "job.plan": 'extends "base.plan"\nextends "other.plan"\n',
            "base.plan": plan(_TRAIN),
            "other.plan": plan(_TRAIN),
        },
        fix="Keep one; let that file extend the other.",
    ),
    CodeEntry(
        code="NRS1014",
        title="too many syntax errors",
        cause="After twenty syntax errors the file is most likely no plan, and the rest of it was not read.",
        example={"job.plan": "not a plan 1\n" * 30},
        fix="Correct the errors shown, or check that this is the right file.",
    ),
)
