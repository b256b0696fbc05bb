"""Which cells a study has, what a directory keeps of them, and what the marks of a run say."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import marks
from swift_ft.lab.study import command, running
from swift_ft.lab.study.command import Store
from swift_ft.lab.study.settings import PLAIN, Cell, Settings, failures_spec

GOOD: dict[str, Any] = {
    "tasks": ("bytes",),
    "strategies": ("auto", "shrink"),
    "rates": (2.0,),
    "seeds": 2,
    "steps": 100,
    "checkpoint_every": 25,
    "repair_s": 2.0,
}
CELL = Cell(task="bytes", strategy="auto", rate=2.0, seed=1)


def settings(**changed: Any) -> Settings:
    return Settings(**(GOOD | changed))


def test_cells_come_seed_by_seed() -> None:
    cells = list(settings().cells())
    assert len(cells) == 2 * (1 + 2 * 2)
    assert [cell.seed for cell in cells] == [0] * 5 + [1] * 5
    assert cells[0] == Cell(task="bytes", strategy=PLAIN, rate=0.0, seed=0)
    assert len({cell.name for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--task letters", "there is no 'letters'; there are bytes, digits"),
        ("--task bytes,,letters", "there is no 'letters'"),
        ("--strategy none", "there is no 'none'"),
        ("--rates x", "numbers between commas"),
        ("--rates 0", "above 0 and at most 20"),
        ("--rates nan", "above 0 and at most 20"),
        ("--rates 21", "above 0 and at most 20"),
        ("--seeds 0", "--seeds: 1 to 100"),
        ("--steps 19", "--steps: 20 to"),
        ("--steps 1000000 --rates 20", "failures a run"),
        ("--checkpoint-every 0", "--checkpoint-every: 1 to"),
        ("--checkpoint-every 301", "--checkpoint-every: 1 to"),
        ("--repair-s -1", "--repair-s: 0 to"),
    ],
)
def test_flags_that_are_refused(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        command.arguments_of(words.split())


def test_flags() -> None:
    quick, _ = command.arguments_of(["--quick"])
    assert (quick.tasks, quick.strategies, quick.seeds) == (("bytes",), ("auto", "shrink-drop"), 1)
    full, _ = command.arguments_of(
        ["--rates", "1,3,1.0000001", "--strategy", "auto, replay", "--steps", "40"]
    )
    assert (full.rates, full.strategies, full.steps) == ((1.0, 3.0), ("auto", "replay"), 40)


def test_failures_are_of_the_job() -> None:
    """Two hosts, each of which fails half as often."""
    assert failures_spec(CELL, 100) == "every=exponential,mtbf=100,until=100,seed=1,phase=optimizer"


def test_a_study_goes_on_where_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "study", settings())
    assert store.read(CELL) is None
    store.write(CELL, {"measured": 1.5, "fewer": [(3, [0])]})
    store = Store(tmp_path / "new" / "study", settings())
    assert store.read(CELL) == {"measured": 1.5, "fewer": [[3, [0]]]}
    text = store.path(CELL).read_bytes()
    for damaged in (b"", text[: len(text) // 2], b"3", b"\x00", b"\xff"):
        store.path(CELL).write_bytes(damaged)
        assert store.read(CELL) is None


def test_another_study_is_refused(tmp_path: Path) -> None:
    Store(tmp_path, settings())
    with pytest.raises(UsageError, match="of another study: its steps is 100, not 200"):
        Store(tmp_path, settings(steps=200))
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"environment": {"python": "3.1"}}))
    with pytest.raises(UsageError, match=r"its environment is .*3\.1.*, not"):
        Store(tmp_path, settings())
    path.write_text("{")
    with pytest.raises(UsageError, match="of another study"):
        Store(tmp_path, settings())


@pytest.mark.parametrize("where", ["file", "file/in"])
def test_a_directory_that_cannot_be(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="name a directory that can be written"):
        Store(tmp_path / where, settings())


# --- marks ---


def mark(what: str, at: float, rank: int, step: int | None = None, **more: Any) -> dict[str, Any]:
    return {"what": what, "at": at, "rank": rank, "step": step, **more}


def stepped(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [mark for mark in made if mark["what"] == "stepped"]


def run(steps: int, *more: dict[str, Any], alone: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Both ranks, a step in each second; `alone`: rank 0 does these."""
    made = [mark("begun", 9.0 + rank, rank) for rank in range(2)]
    for step in range(steps):
        for rank in range(1 if step in alone else 2):
            made.append(mark("stepped", 11.0 + step, rank, step, parts=[0] if step in alone else [0, 1]))
    ends = [mark("ended", 99.0, rank, digest="a", measured=2.0, peak_mib=100.0 + rank) for rank in range(2)]
    return [*made, *more, *ends]


def test_a_calm_run() -> None:
    found = running.measured(run(20))
    assert (found["measured"], found["digests"], found["peak_mib"]) == (2.0, ["a"], 101.0)
    assert (found["train_s"], found["step_s"]) == (20.0, 1.0)
    assert (found["steps_lost"], found["batches_dropped"], found["fewer"]) == (0, 0, [])


def test_steps_that_are_done_again() -> None:
    again = [
        mark("stepped", 40.0 + step, rank, step, parts=[0, 1]) for step in (17, 18, 19) for rank in (0, 1)
    ]
    found = running.measured(run(20, *again))
    assert (found["steps_lost"], found["train_s"], found["fewer"]) == (3, 49.0, [])


def test_a_rank_that_is_gone() -> None:
    found = running.measured(run(20, alone=(5, 6)))
    assert (found["batches_dropped"], found["fewer"]) == (2, [(5, [0]), (6, [0])])


def test_a_step_is_as_it_was_done_for_the_last_time() -> None:
    """Both have a part in steps 17 to 19; then both are lost, and rank 0 alone does two of them again."""
    again = [mark("stepped", 40.0 + step, 0, step, parts=[0]) for step in (17, 18)]
    assert running.with_fewer(stepped(run(20, *again))) == [(17, [0]), (18, [0])]
    whole = mark("stepped", 90.0, 1, 17, parts=[1, 0])
    assert running.with_fewer(stepped(run(20, *again, whole))) == [(18, [0])]


def test_a_rank_that_dies_in_its_update_had_a_part_in_the_step() -> None:
    """Rank 0 alone has ended step 5, whose update has both ranks' batches."""
    made = [m for m in run(20) if (m["what"], m["rank"], m["step"]) != ("stepped", 1, 5)]
    assert running.measured(made)["batches_dropped"] == 0


def test_ranks_that_differ() -> None:
    made = run(20)
    made[-1]["digest"] = "b"
    assert running.measured(made)["digests"] == ["a", "b"]


def test_no_rank_came_to_its_end() -> None:
    assert "failed" in running.measured(run(20)[:-2])
    assert "failed" in running.measured([])


def test_a_line_that_is_cut_short_is_left_out(tmp_path: Path) -> None:
    assert marks.read(tmp_path) == []
    marks.mark(str(tmp_path), "begun", rank=0)
    with (tmp_path / "marks").open("a") as file:
        file.write('{"what": "st')
    assert [mark["what"] for mark in marks.read(tmp_path)] == ["begun"]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("Traceback\nValueError: no\nswift: job: stopped\n  more\n", "job: stopped"),
        ("Traceback\n  ValueError: no\nelse\n", "ValueError: no"),
        ("swift: failures: killed rank 0\n", "exit code 3"),
        ("swift: job: no\nswift: failures: 0 of 1\nswift:   rank=0: did not happen\n", "job: no"),
        ("", "exit code 3"),
    ],
)
def test_why_a_run_failed(output: str, reason: str) -> None:
    assert running.reason(output, "exit code 3") == reason


def test_a_repair_is_waited_for_by_a_python_whose_path_has_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their launchers refused the check: there is no such command."""
    given: dict[str, Any] = {}

    def cluster(directory: Path, **settings: Any) -> None:
        given.update(settings)
        raise ServiceError("enough was seen")

    monkeypatch.setattr(running, "Cluster", cluster)
    monkeypatch.setattr(sys, "executable", "/home/me/my project/bin/python")
    cell = Cell(task="bytes", strategy="shrink", rate=0.0, seed=0)
    assert running.run(cell, settings(), tmp_path) == {"failed": "enough was seen", "planned": 0}
    flags = given["launcher_flags"]
    check = shlex.split(flags[flags.index("--health-check") + 1])
    assert check == [sys.executable, "-S", "-c", "import time; time.sleep(2.0)"]


@pytest.mark.parametrize("missing", ["torch", "matplotlib"])
def test_a_library_that_is_missing_is_named_before_the_first_run(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "swift_ft.lab.study.page", raising=False)
    monkeypatch.setattr(command, "study", lambda *_: pytest.fail("a cell is run"))
    with pytest.raises(
        UsageError, match=rf"^study: {missing} is not installed: pip install 'swift-ft\[lab\]'$"
    ):
        command.run(["--out", str(tmp_path / "study")])
