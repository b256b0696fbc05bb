"""Which cells a study has, what a directory keeps of them, and what the marks of a run say."""

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import UsageError
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
    ("changed", "word"),
    [
        ({"tasks": ("letters",)}, "--task letters: there are bytes, digits"),
        ({"strategies": ("auto", "auto")}, "each only once"),
        ({"strategies": ("none",)}, "--strategy none"),
        ({"rates": ()}, "one or more"),
        ({"rates": (2.0, 2.0000001)}, "the same in six digits"),
        ({"rates": (0.0,)}, "above 0 and at most 20"),
        ({"rates": (float("nan"),)}, "above 0 and at most 20"),
        ({"rates": (21.0,)}, "above 0 and at most 20"),
        ({"seeds": 0}, "--seeds 0"),
        ({"steps": 19}, "--steps 19"),
        ({"steps": 1_000_000, "rates": (20.0,)}, "more than"),
        ({"checkpoint_every": 0}, "--checkpoint-every 0"),
        ({"checkpoint_every": 101}, "--checkpoint-every 101"),
        ({"repair_s": float("inf")}, "--repair-s inf"),
        ({"repair_s": -1.0}, "--repair-s -1"),
    ],
)
def test_settings_that_are_refused(changed: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        settings(**changed)


@pytest.mark.parametrize(
    "words", ["--rates x", "--rates 1,,2", "--task bytes,", "--strategy auto,unknown", "--seeds x"]
)
def test_flags_that_are_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, SystemExit)):
        command.settings_of(["--out", str(tmp_path), *words.split()])


def test_flags() -> None:
    quick, _ = command.settings_of(["--out", "x", "--quick"])
    assert (quick.tasks, quick.strategies, quick.seeds) == (("bytes",), ("auto", "shrink-drop"), 1)
    full, _ = command.settings_of(
        ["--out", "x", "--rates", "1,3", "--strategy", "auto, replay", "--steps", "40"]
    )
    assert (full.rates, full.strategies, full.steps) == ((1.0, 3.0), ("auto", "replay"), 40)


def test_a_task_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.missing("bytes") == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command.missing("digits") == "it needs sklearn; pip install 'swift-ft[lab]'"
    monkeypatch.setattr("swift_ft.lab.study.trainers.corpus.sources", list)
    assert "standard library are not installed" in command.missing("bytes")


def test_failures_are_of_the_job() -> None:
    """Two hosts, each of which fails half as often."""
    assert failures_spec(CELL, 100) == "every=exponential,mtbf=100,until=100,seed=1,phase=optimizer"


def test_a_study_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(tmp_path / "new" / "study").opened(settings()) as store:
        assert store.read(CELL) is None
        store.write(CELL, {"measured": 1.5, "fewer": [(3, [0])]})
    with store.opened(settings()):
        assert store.read(CELL) == {"measured": 1.5, "fewer": [[3, [0]]]}
        text = store.path(CELL).read_text()
        for damaged in ("", text[: len(text) // 2], text.replace("1.5", "1.6"), "[]", '{"cell": 3}', "\x00"):
            store.path(CELL).write_text(damaged)
            assert store.read(CELL) is None
            assert "is damaged: this cell is done again" in capsys.readouterr().err
        store.path(CELL).write_bytes(b"\xff")
        assert store.read(CELL) is None


def test_another_study_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path).opened(settings()):
        with pytest.raises(UsageError, match="another study runs there"), Store(tmp_path).opened(settings()):
            pass
    with (
        pytest.raises(UsageError, match="of another study: its steps is 100, not 200"),
        Store(tmp_path).opened(settings(steps=200)),
    ):
        pass
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"environment": {"python": "3.1"}}))
    with (
        pytest.raises(UsageError, match=r"was begun with python 3\.1, here is 3"),
        Store(tmp_path).opened(settings()),
    ):
        pass
    path.write_text("{}")
    with (
        pytest.raises(UsageError, match="is damaged, or of another version"),
        Store(tmp_path).opened(settings()),
    ):
        pass


@pytest.mark.parametrize("where", ["file", "file/in"])
def test_a_directory_that_cannot_be(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UsageError, match="name a directory that can be written"),
        Store(tmp_path / where).opened(settings()),
    ):
        pass


def test_the_place_of_a_run_is_removed(tmp_path: Path) -> None:
    with Store(tmp_path).opened(settings()) as store:
        left, others = tmp_path / "run-0123abcd", tmp_path / "run-1"
        for directory in (left, others):
            directory.mkdir()
            (directory / "file").touch()
        with store.place() as place:
            assert list(place.iterdir()) == []
            assert not left.exists()
            assert others.exists()
        assert not place.exists()


# --- marks ---


def mark(what: str, at: float, rank: int, step: int | None = None, **more: Any) -> dict[str, Any]:
    return {"what": what, "at": at, "rank": rank, "step": step, "loss": 1.0, **more}


def stepped(marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [mark for mark in marks if mark["what"] == "stepped"]


def run(steps: int, *more: dict[str, Any], alone: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Both ranks, a step in each second; `alone`: rank 0 does these."""
    marks = [mark("begun", 9.0 + rank, rank) for rank in range(2)]
    for step in range(steps):
        for rank in range(1 if step in alone else 2):
            marks.append(mark("stepped", 11.0 + step, rank, step, parts=[0] if step in alone else [0, 1]))
    ends = [mark("ended", 99.0, rank, digest="a", measured=2.0, peak_mib=100.0 + rank) for rank in range(2)]
    return [*marks, *more, *ends]


def test_a_calm_run() -> None:
    found = running.measured(run(20))
    assert (found["measured"], found["digests"], found["peak_mib"]) == (2.0, ["a"], 101.0)
    assert (found["train_s"], found["step_s"]) == (20.0, 1.0)
    assert (found["steps_lost"], found["batches_dropped"], found["fewer"]) == (0, 0, [])
    assert found["losses"][0] == [0.0, 1.0]


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
    marks = [m for m in run(20) if (m["what"], m["rank"], m["step"]) != ("stepped", 1, 5)]
    assert running.measured(marks)["batches_dropped"] == 0


def test_ranks_that_differ() -> None:
    marks = run(20)
    marks[-1]["digest"] = "b"
    assert running.measured(marks)["digests"] == ["a", "b"]


def test_no_rank_came_to_its_end() -> None:
    assert "failed" in running.measured(run(20)[:-2])
    assert "failed" in running.measured([])


def test_a_line_that_is_cut_short_is_left_out(tmp_path: Path) -> None:
    assert running.read_marks(tmp_path) == []
    (tmp_path / "marks.jsonl").write_text(json.dumps(mark("begun", 1.0, 0)) + '\n{"what": "st')
    assert len(running.read_marks(tmp_path)) == 1


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
