"""Other recovery groups in a drill: the words, and what the trace must say of them; each piece of it broken once."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from swift.drill.command import parse as drill
from swift.drill.facts import Facts
from swift.drill.fault_environment import to_environment
from swift.drill.prediction import predicted_streams, section
from swift.drill.regroup import Regroup, history, parse, pauses
from swift.drill.timeline import Event
from swift.errors import UsageError
from swift.failures import in_ranks
from swift.recovery.groups import RecoveryGroups
from tests.unit.drill.evidence import good
from tests.unit.drill.test_prediction import measured

SHAPE = [
    "--model",
    "tiny",
    "--microbatches",
    "4",
    "--steps",
    "12",
    "--checkpoint-every",
    "4",
    "--kill",
    "rank=1,step=11",
]
FIRST, OTHER = "0,1,2,3", "0-1,2-3"
REGROUP = ["--groups", FIRST, "--regroup", f"step=2,groups={OTHER}"]
BYTES = "the log takes the predicted bytes"
TAKEN, LOGGED = "the job took the other groups", "every step is logged by the groups in force"


@pytest.mark.parametrize(
    "spec",
    [
        "step=8,groups=0-1,2-3",
        "step=8,by=12,groups=0,1-3",
        "step=3,storage-cap=800kB",
        "step=3,until=5,by=9,storage-cap=1",
    ],
)
def test_a_spec_round_trips(spec: str) -> None:
    assert str(parse(spec)) == spec


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("step=8", "write step=8,groups="),
        ("groups=0-1", "write step=8,groups="),
        ("step=8,groups=0-1,3", "each run begins behind the one before"),
        ("step=8,groups=0,storage-cap=5", "is no run of stages"),
    ],
)
def test_what_is_none_is_refused_in_one_line(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse(spec)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--regroup", "step=4,by=3,groups=0-1,2-3"], "must ascend"),
        (["--regroup", "step=4,until=9,by=8,storage-cap=5"], "must ascend"),
        (
            ["--regroup", "step=4,groups=0-1,2-3", "--regroup", "step=4,groups=0,1-3"],
            "in the order of their steps",
        ),
        (["--regroup", "step=4,groups=0-1,2-3", "--secure"], "does not go with --secure"),
        (["--regroup", "step=4,groups=0-3,4-7", "--schedule", "zbv"], "does not go with --schedule zbv"),
        (["--regroup", "step=4,groups=0-1,2-3", "--kill", "corrupt=log,step=11"], "--kill corrupt=log"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], said: str) -> None:
    groups = "0-7" if "zbv" in words else FIRST
    with pytest.raises(UsageError, match=said):
        drill([*SHAPE, "--groups", groups, *words])


def test_training_stands_still_where_it_must() -> None:
    regroups = [
        parse("step=2,groups=0-1,2-3"),
        parse("step=4,until=5,by=6,storage-cap=5"),
        parse("step=8,by=9,groups=0-2,3"),
    ]
    assert pauses(regroups) == {
        "regroup0": 2,
        "regroup1": 5,
        "regroup1.by": 6,
        "regroup2": 8,
        "regroup2.by": 9,
    }
    assert in_ranks.pause("regroup2.by", 0, 9) in json.loads(to_environment((), pauses(regroups)))
    config = drill([*SHAPE, "--groups", FIRST, *(word for r in regroups for word in ("--regroup", str(r)))])
    assert drill(config.arguments()).regroups == config.regroups
    assert config.regroups[1] == Regroup(step=4, until=5, by=6, storage_cap="5")


def trace() -> list[Event]:
    """All ranks log by both from version 4 on, and by the others alone from 6 on; these are in force since 4."""
    config = drill([*SHAPE, *REGROUP])
    events: list[Event] = [
        {"event": "groups", "t": 2.5, "in_force": FIRST, "since": 0, "wanted": OTHER},
        {"event": "regroup", "t": 2.6, "id": "regroup0", "exit_code": 0, "said": "job drill gets it"},
        {"event": "groups", "t": 5.5, "in_force": OTHER, "since": 4, "wanted": ""},
        {"event": "checkpoint_complete", "t": 9.5, "version": 8},
    ]
    for step in range(12):
        by = [FIRST] if step < 4 else [FIRST, OTHER] if step < 6 else [OTHER]
        streams = {name: n for text in by for name, n in streams_of(config, text).items()}
        for rank in range(4):
            own = {name: n for name, n in streams.items() if name.startswith((f"s{rank}.", f"r{rank}."))}
            events.append(
                {"event": "profiled", "t": float(step), "rank": rank, "step": step, "replay": False}
                | {"seconds": {}, "update_s": 0.0, "read": [0, 0], "logged": own, "logged_by": by}
            )
    return sorted(events, key=lambda event: float(event["t"]))


def streams_of(config: Any, text: str) -> dict[str, int]:
    return predicted_streams(config, RecoveryGroups.parse(text))


def judged(events: list[Event]) -> tuple[dict[str, Any], dict[str, bool | None]]:
    config = drill([*SHAPE, *REGROUP])
    in_log = {name: dict.fromkeys(range(8, 12), n) for name, n in streams_of(config, OTHER).items()}
    evidence = good(events=events, measured=measured(in_log=in_log))
    shown, checks = section(Facts.of(config, evidence))
    assert shown is not None
    return shown, {check.name: check.answer for check in checks}


def test_what_is_as_it_must_be() -> None:
    shown, checks = judged(trace())
    assert checks == {BYTES: True, TAKEN: True, LOGGED: True}
    assert shown["regroups"]["in_force"] == [{"groups": FIRST, "since": 0}, {"groups": OTHER, "since": 4}]
    assert shown["regroups"]["logged_from"] == {OTHER: {"0": 4, "1": 4, "2": 4, "3": 4}}
    config = drill([*SHAPE, *REGROUP])
    many, few = (sum(streams_of(config, text).values()) for text in (FIRST, OTHER))
    assert [(len(e["logged_by"]), e["predicted"], e["measured"]) for e in shown["bytes"]["by_groups"]] == [
        (1, many, many),
        (2, many, many),
        (1, few, few),
    ]
    assert shown["bytes"]["per_step"] == {"predicted": few, "measured": few}


def replayed(events: list[Event], by: list[str]) -> None:
    """Step 4 of rank 1, once more, behind a plan that was made when the others were in force."""
    config = drill([*SHAPE, *REGROUP])
    streams = {name: n for text in by for name, n in streams_of(config, text).items()}
    own = {name: n for name, n in streams.items() if name.startswith(("s1.", "r1."))}
    again = next(e for e in events if (e.get("step"), e.get("rank")) == (4, 1))
    before = next(n for n, e in enumerate(events) if e["t"] > 8)
    told = {"replay": True, "t": 8.5, "logged": own, "logged_by": by}
    events[before:before] = [{"event": "plan", "t": 8.4}, {**again, **told}]


def at(step: int, rank: int, change: Callable[[Event], None]) -> Callable[[list[Event]], None]:
    def changed(events: list[Event]) -> None:
        (event,) = (e for e in events if (e.get("step"), e.get("rank")) == (step, rank))
        change(event)

    return changed


def named(name: str, change: Callable[[Event], None]) -> Callable[[list[Event]], None]:
    return lambda events: change(next(e for e in events if e["event"] == name))


@pytest.mark.parametrize(
    ("change", "check", "answer"),
    [
        (at(5, 1, lambda e: e.update(logged_by=[FIRST])), LOGGED, False),
        (at(3, 1, lambda e: e.update(logged_by=[OTHER], logged={"s1.F": 16384, "r1.C": 4})), LOGGED, False),
        (at(9, 1, lambda e: e.update(logged_by=[OTHER, "0,1-3"])), LOGGED, False),
        (at(11, 1, lambda e: e.update(logged_by=[FIRST, OTHER])), LOGGED, False),
        (lambda events: replayed(events, [OTHER, FIRST]), LOGGED, False),
        (lambda events: replayed(events, [OTHER]), LOGGED, True),
        (at(2, 1, lambda e: e["logged"].pop("s1.B")), BYTES, False),
        (at(7, 1, lambda e: e["logged"].update({"s1.B": 16384})), BYTES, False),
        (at(5, 1, lambda e: e["logged"].update({"s1.F": 1})), BYTES, False),
        (named("regroup", lambda e: e.update(exit_code=2, said="swift: no")), TAKEN, False),
        (named("regroup", lambda e: e.update(event="other")), TAKEN, None),
        (lambda events: events.remove(next(e for e in events if e.get("in_force") == OTHER)), TAKEN, False),
    ],
)
def test_each_piece_that_is_wrong_is_found(
    change: Callable[[list[Event]], None], check: str, answer: bool | None
) -> None:
    events = trace()
    change(events)
    assert judged(events)[1][check] is answer


def test_the_groups_in_force_one_after_the_other() -> None:
    told = [("groups", FIRST, 0), ("groups", OTHER, 4), ("groups", OTHER, 4), ("groups", FIRST, 8)]
    events = [
        {"event": name, "in_force": groups, "since": since, "wanted": ""} for name, groups, since in told
    ]
    had = history(RecoveryGroups.parse(FIRST), events)
    assert [(entry.groups, entry.since) for entry in had] == [(FIRST, 0), (OTHER, 4), (FIRST, 8)]
