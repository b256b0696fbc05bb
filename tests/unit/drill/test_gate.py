"""The drill of the health check before rejoin: what can be asked for, and its verdict with the evidence broken."""

from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.drill import health_check
from swift_ft.lab.drill.command import parse
from tests.unit.drill.evidence import Trace


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--unfit rank=1 --kill rank=0,step=3", "is not killed: add --kill rank=1"),
        ("--unfit one --kill rank=1,step=3", "write rank=R"),
        ("--unfit rank=1,times=0 --kill rank=1,step=3", "write rank=R"),
        ("--unfit rank=1,times=7 --kill rank=1,step=3", "write rank=R"),
        ("--unfit rank=1,times=6 --kill rank=1,step=3", "the place is given up then"),
        ("--replicas 1 --strategy shrink --unfit rank=1 --kill rank=1,step=3", "the lost stage moves"),
        ("--replicas 2 --strategy shrink --unfit rank=1 --kill rank=1,step=3", "add --grow step=N"),
        (
            "--replicas 2 --strategy shrink --unfit rank=1,times=6 --grow step=9 --kill rank=1,step=3",
            "leave --grow out",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--stages", "2", *arguments.split()])
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_check_fails_for_that_place_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(health_check.ENV_UNFIT, "rank=1,times=2")
    monkeypatch.setenv("SWIFT_FAULTS_DIR", str(tmp_path))

    def asked(because: str, local_rank: int) -> bool:
        monkeypatch.setenv("SWIFT_HEALTH_CHECK", because)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        return health_check.fit()

    assert asked("start", 1)
    assert asked("replacement", 0)
    assert [asked("replacement", 1) for _ in range(4)] == [False, False, True, True]


def facts(answers: list[bool], *, used_after: int | None) -> Any:
    """`answers` of the health checks after the loss; a process gets the place behind so many of them."""
    trace = Trace()
    for because in ("start", *("replacement" for _ in answers)):
        trace.add("launcher", "place_check_begin", local_rank=1, because=because)
    trace.add("launcher", "place_checked", local_rank=1, fit=True, reason="", check_s=0.1)
    trace.add("launcher", "spare_assigned", rank=1)
    for number, fit in enumerate(answers):
        if used_after == number:
            trace.add("launcher", "spare_assigned", rank=1)
        trace.add("launcher", "place_checked", local_rank=1, fit=fit, reason="", check_s=0.1)
    if used_after == len(answers):
        trace.add("launcher", "spare_assigned", rank=1)

    class Found:
        asked = parse(["--stages", "2", "--kill", "rank=1,step=3", "--unfit", "rank=1,times=2"])
        events = trace.events

    return Found


@pytest.mark.parametrize(
    ("answers", "used_after", "wanted"),
    [
        ([False, False, True], 3, [True, True]),
        ([False, False, True], 2, [True, False]),
        ([False, False, True], 0, [True, False]),
        ([False, True], 2, [False, True]),
        ([False, False, True], None, [True, False]),
    ],
)
def test_the_verdict(answers: list[bool], used_after: int | None, wanted: list[bool]) -> None:
    found = facts(answers, used_after=used_after)
    assert [check.answer for check in health_check.checks(found)] == wanted
    shown = health_check.section(found)
    assert shown is not None
    assert [check["fit"] for check in shown["checks"]] == answers
