"""What `scripts/compat` makes of what it sees."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swift_ft.lab.drill import command
from tests.compat import environment, seams, table
from tests.compat.table import Row
from tests.gpu import overlay

SUITE, TRAINERS, DRILLS = {"passed": 9, "failed": 0}, {"ddp": "ok"}, {"zbv": "PASS"}


def row(torch: str, python: str = "3.11", verdict: str = table.WORKS) -> Row:
    return Row(torch=torch, python=python, date="2026-11-24", verdict=verdict)


def test_a_pair_works_if_everything_passes() -> None:
    assert table.judged(SUITE, TRAINERS, DRILLS) == (table.WORKS, "")


@pytest.mark.parametrize(
    ("suite", "trainers", "drills", "reason"),
    [
        ({"passed": 9, "failed": 2}, TRAINERS, DRILLS, "2 tests fail"),
        ({"passed": 0, "failed": 0}, TRAINERS, DRILLS, "no test ran"),
        (SUITE, {"ddp": "MISS"}, DRILLS, "trainer ddp: MISS"),
        (SUITE, TRAINERS, {"zbv": "INCONCLUSIVE"}, "drill zbv: INCONCLUSIVE"),
    ],
)
def test_anything_else_fails_with_its_reason(
    suite: dict[str, int], trainers: dict[str, str], drills: dict[str, str], reason: str
) -> None:
    assert table.judged(suite, trainers, drills) == (table.FAILS, reason)


@pytest.mark.parametrize("options", seams.DRILLS.values(), ids=list(seams.DRILLS))
def test_every_drill_can_be_run(options: tuple[str, ...]) -> None:
    command.parse(options)


def test_every_test_and_trainer_is_there() -> None:
    assert all((environment.ROOT / path).exists() for path in (*seams.SUITE, *seams.FLOORS_SUITE))
    assert seams.SHARDED in seams.TRAINERS
    assert all((environment.ROOT / "tests" / "trainers" / f"{name}.py").is_file() for name in seams.TRAINERS)


def test_what_is_refused_does_not_fail_but_is_named() -> None:
    trainers = {"ddp": "ok", "fsdp2": table.REFUSED}
    assert table.judged(SUITE, trainers, DRILLS) == (table.WORKS, "fsdp2 refused")


def test_rows_are_kept_but_for_the_pair_that_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = table.with_row([row("2.9.1"), row("2.13.0", verdict=table.FAILS)], row("2.13.0"))
    table.write(path, table.with_row(rows, row("2.11.0", "3.12")))
    kept = table.read(path)
    assert [(r.torch, r.verdict) for r in kept] == [
        ("2.9.1", table.WORKS),
        ("2.11.0", table.WORKS),
        ("2.13.0", table.WORKS),
    ]
    assert table.markdown(kept).count("\n") == 2 + len(kept)


def test_what_is_installed_beside_torch_is_what_tests_need() -> None:
    names = {environment.name_of(each) for each in environment.requirements()}
    assert {"grpcio", "numpy", "numcodecs", "pytest", "hatchling"} <= names
    assert not names & {"torch", "swift-ft"}
    assert "torch==" not in environment.constraints()


def test_floors_take_the_place_of_pins() -> None:
    pinned, oldest = (environment.constraints(floors=floors).splitlines() for floors in (False, True))
    assert {environment.name_of(line).lower() for line in pinned} == {
        environment.name_of(line).lower() for line in oldest
    }
    assert "protobuf==4.22.1" in oldest
    assert set(pinned) & set(oldest) >= {line for line in pinned if line.startswith("pytest==")}


def test_a_row_with_floors_stands_beside_the_one_without() -> None:
    rows = table.with_row([row("2.13.0")], replace(row("2.13.0"), floors=True))
    assert [each.floors for each in rows] == [False, True]
    assert "oldest dependencies" in table.markdown(rows).splitlines()[-1]


def test_an_interpreter_that_is_not_here_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(environment.Unavailable, match=r"no python2\.0 here"):
        environment.Environment.make(environment.Pair(torch="2.13.0", python="2.0"), tmp_path)


def test_what_it_runs_ends_with_it() -> None:
    here = environment.Environment(python=Path(sys.executable), build="CPU")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    began = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        with pytest.raises(SystemExit):
            seams._run(here, ["-c", "import time; time.sleep(60)"], 60.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - began < 30


def test_the_overlay_replaces_the_pipelining_of_an_older_torch_and_keeps_it(tmp_path: Path) -> None:
    source = Path(torch.__file__).parent / "distributed" / "pipelining"
    (tmp_path / "pipelining").mkdir()
    (tmp_path / "pipelining" / "old.py").touch()
    for _ in range(2):
        overlay.lay(source, tmp_path)
        assert [each.name for each in (tmp_path / overlay.BEFORE).iterdir()] == ["old.py"]
        laid = {each.name for each in (tmp_path / "pipelining").iterdir()}
        assert laid == {each.name for each in source.iterdir()} - {"__pycache__"}
        text = (tmp_path / "pipelining" / "schedules.py").read_text()
        assert 'device_type=device_type or "cuda")' in text  # the pinned torch has the line that is replaced
