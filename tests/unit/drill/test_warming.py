"""The drill with spares that are warmed up: what can be asked for, and its verdict with the evidence broken."""

from collections import Counter
from typing import Any

import pytest

from swift_ft import fault_grammar
from swift_ft.errors import UsageError
from swift_ft.lab.drill import warming
from swift_ft.lab.drill.command import parse
from tests.unit.drill.evidence import Trace

ASKED = ["--stages", "2", "--warm-up", "--kill", "rank=1,step=3"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--replicas 2 --strategy shrink --kill rank=1,step=3", "no spare takes the lost rank's place"),
        ("--kill rank=1,step=3 --kill rank=1,phase=replay", "nobody has warmed a spare up by then"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--stages", "2", "--warm-up", *arguments.split()])
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_victim_waits_for_a_spare_of_its_rank() -> None:
    asked = parse(ASKED)
    assert fault_grammar.held_together(asked.faults) == []
    assert fault_grammar.held_together(asked.faults, each=True) == [[0]]

    there: Counter[int] = Counter()
    for event, wanted in (
        ({"event": "warmed_up", "rank": 1, "why_not": "no"}, False),
        ({"event": "warmed_up", "rank": 0, "why_not": ""}, False),
        ({"event": "warmed_up", "rank": 1, "why_not": ""}, True),
        ({"event": "spare_assigned", "rank": 1, "warmed_up": False}, True),
        ({"event": "spare_assigned", "rank": 1, "warmed_up": True}, False),
    ):
        warming.count(event, there)
        assert warming.are_there(asked.faults, there) is wanted


def facts(*, warm: bool = True, replaced: bool = True, replayed: bool = True) -> Any:
    """The script took 3 s less the second time, and the step half a second."""
    trace = Trace()
    trace.add("launcher", "spare_assigned", rank=1, pid=10)
    trace.add(
        "launcher",
        "warmed_up",
        rank=1,
        pid=11,
        why_not="" if warm else "ValueError: no",
        version=0,
        script_seconds=5.0,
        step_seconds=3.5,
        again_script_seconds=2.0,
        again_step_seconds=3.0,
    )
    if replaced:
        trace.add("launcher", "spare_assigned", rank=1, pid=11)
        trace.add("rank1", "run_begin", rank=1, pid=11, script_seconds=2.0)
        trace.add("rank1", "step_begin", rank=1, pid=11, step=0, replay=replayed)
        trace.add("rank1", "step_end", rank=1, pid=11, step=0, replay=replayed)

    class Found:
        asked = parse(ASKED)
        events = trace.events

    return Found


@pytest.mark.parametrize(
    ("broken", "answer", "saved"),
    [
        ({}, True, 3.5),
        ({"replayed": False}, True, 3.5),
        ({"warm": False}, False, None),
        ({"replaced": False}, None, None),
    ],
)
def test_what_was_saved_is_what_the_first_time_took_more(
    broken: dict[str, bool], answer: bool | None, saved: float | None
) -> None:
    found = facts(**broken)

    (check,) = warming.checks(found)
    assert check.answer is answer
    if answer is False:
        assert "ValueError: no" in check.detail
    section = warming.section(found)
    assert section is not None
    assert section["saved_seconds"] == saved
    for one in section["replacements"]:
        assert one["needed"]["script_seconds"] == 2.0
        assert (one["needed"]["step_seconds"] is None) == (broken == {"replayed": False})


def test_without_the_option_nothing_is_said() -> None:
    found = facts()
    found.asked = parse(["--stages", "2", "--kill", "rank=1,step=3"])
    assert warming.checks(found) == []
    assert warming.section(found) is None
