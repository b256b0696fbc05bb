"""What was injected beside what was noticed; each piece of evidence is taken away once."""

from typing import Any

import pytest

from swift_ft.fault_grammar import parse
from swift_ft.lab.failures import report

Event = dict[str, Any]
BEGAN = 100.0


def event(t: float, name: str, who: str = "launcher", **fields: Any) -> Event:
    return {"t": BEGAN + t, "who": who, "pid": 1, "event": name, **fields}


def view(t: float, generation: int, state: str, reason: str = "") -> Event:
    return event(t, "view_seen", generation=generation, state=state, reason=reason)


def fault(t: float, index: int = 0, **fields: Any) -> Event:
    about = {"pid": 77, "rank": 2, "kind": "kill", "step": 5, "phase": "idle", "microbatch": 0, **fields}
    return event(t, "fault", "rank2", id=f"fault{index}", **about)


KILLED = [
    view(0.5, 1, "RUNNING"),
    fault(3.0),
    event(3.01, "child_exit", pid=76, rank=1, code=-9),
    event(3.02, "child_exit", pid=77, rank=2, code=-9),
    view(3.1, 2, "FENCING"),
    view(3.6, 2, "RUNNING"),
    view(9.0, 3, "RUNNING"),
]


def of(trace: list[Event], *specs: str, why: dict[str, str] | None = None) -> list[dict[str, Any]]:
    ordered = sorted(trace, key=lambda event: event["t"])
    return report.outcomes([parse(spec) for spec in specs], ordered, BEGAN, why or {})


def test_a_kill_is_noticed_by_the_end_of_that_process() -> None:
    (found,) = of(KILLED, "rank=2,step=5")
    assert found["injected_s"] == pytest.approx(3.0)
    assert found["where"] == {"pid": 77, "rank": 2, "step": 5, "phase": "idle", "microbatch": 0}
    assert found["detected"] == {"by": "child_exit", "who": "launcher", "after_s": pytest.approx(0.02)}
    assert found["generation"] == 2
    assert found["running_after_s"] == pytest.approx(0.6)


@pytest.mark.parametrize("index", range(len(KILLED)))
def test_every_piece_of_evidence_counts(index: int) -> None:
    (whole,) = of(KILLED, "rank=2,step=5")
    (less,) = of(KILLED[:index] + KILLED[index + 1 :], "rank=2,step=5")
    assert (less != whole) is (index in (1, 3, 5)), (
        "the failure, the end of its process, and that the job runs again"
    )


def test_a_generation_that_was_there_before_is_no_answer() -> None:
    (found,) = of([view(0.5, 2, "RUNNING"), fault(3.0), view(3.1, 2, "RUNNING")], "rank=2,step=5")
    assert found["generation"] is None
    assert found["running_after_s"] is None


def test_what_did_not_happen_says_why() -> None:
    never, unable, copy = of(
        [], "rank=2,step=5", "service=logserver,step=3", "corrupt=copy,rank=1", why={"fault1": "it is away"}
    )
    assert never["why_not"] == "rank 2 never came to its place (backward)"
    assert unable["why_not"] == "it is away"
    assert copy["why_not"] == "no replica gave that rank its state"
    assert report.lines(report.as_json([never]))[1].endswith(
        "did not happen: rank 2 never came to its place (backward)"
    )


@pytest.mark.parametrize(
    ("spec", "injected", "sign", "noticed"),
    [
        ("kind=stop,rank=2,step=5", {}, event(4.0, "fenced_kill", rank=2), True),
        ("kind=stop,rank=2,step=5", {}, event(4.0, "fenced_kill", rank=1), False),
        ("kind=stop,rank=2,step=5", {}, view(4.0, 2, "FENCING", "rank 2 was silent for 1.0 s"), True),
        ("kind=stop,rank=2,step=5", {}, view(4.0, 2, "FENCING", "rank 21 was silent for 1.0 s"), False),
        ("kind=stop,rank=2,step=5", {}, view(4.0, 1, "FENCING", "rank 2 was silent for 1.0 s"), False),
        ("kind=hang,rank=2,step=5", {}, event(4.0, "suspicion_seen", rank=2, told=False), True),
        ("kind=hang,rank=2,step=5", {}, event(4.0, "suspicion_seen", rank=2, told=True), False),
        ("kind=hang,rank=2,step=5", {}, event(4.0, "child_exit", rank=2, pid=77, code=0), False),
        ("kind=hang,rank=2,step=5", {}, event(400.0, "suspicion_seen", rank=2, told=False), False),
        ("kind=slow,rank=2,step=5,factor=2,for=1", {}, event(4.0, "heartbeat_unanswered", rank=2), False),
        ("service=coordinator,step=5", {}, event(4.0, "coordinator_unanswered"), True),
        ("log=0,step=5", {"address": "h:1"}, event(4.0, "log_silent_seen", address="h:1"), True),
        ("log=0,step=5", {"address": "h:1"}, event(4.0, "log_silent_seen", address="h:2"), False),
        ("log=0,step=5", {"address": "h:1"}, view(4.0, 2, "FENCING", "log server h:1 is lost"), True),
        ("corrupt=log,step=5,stream=s0.F", {}, view(4.0, 2, "FENCING", "rank 1: record is corrupt"), True),
        ("corrupt=log,step=5,stream=s0.F", {}, view(4.0, 2, "FENCING", "rank 1: killed by SIGKILL"), False),
        ("corrupt=copy,rank=2", {}, view(4.0, 2, "RUNNING", "rank 2 refused REPLICA: it differs"), True),
    ],
)
def test_only_what_can_come_of_a_failure_is_a_sign_of_it(
    spec: str, injected: dict[str, Any], sign: Event, noticed: bool
) -> None:
    (found,) = of([view(1.0, 1, "RUNNING"), fault(3.0, **injected), sign], spec)
    assert (found["detected"] is not None) is noticed


def test_what_is_suspected_long_after_a_failure_was_over_is_of_something_else() -> None:
    over = event(4.0, "fault_over", id="fault0")
    for at, noticed in ((3.5, True), (5.5, True), (7.0, False)):
        suspicion = event(at, "suspicion_seen", rank=2, told=False)
        (found,) = of([fault(3.0, kind="hang"), over, suspicion], "kind=hang,rank=2,step=5,for=1")
        assert found["over_s"] == pytest.approx(4.0)
        assert (found["detected"] is not None) is noticed


def test_the_report_sums_up_and_is_a_schedule() -> None:
    specs = ("rank=2,step=5", "rank=1,step=7", "rank=0,step=9")
    found = of([*KILLED, fault(8.0, 1, pid=78, rank=1)], *specs)
    made = report.as_json(found, job="j")
    assert (made["job"], made["injected"], made["detected"]) == ("j", 2, 1)
    assert [parse(text) for text in made["schedule"]] == list(map(parse, specs))
    head, first, second, third = report.lines(made)
    assert head == "failures: 3 planned, 2 injected, 1 noticed"
    assert "at 3.000 s, noticed after 0.020 s (launcher: child_exit), generation 2 ran after 0.600 s" in first
    assert "nobody noticed" in second
    assert "did not happen" in third
