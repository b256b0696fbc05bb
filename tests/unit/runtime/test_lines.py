"""A line for each step, exactly once: through processes that die anywhere."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.train.step import Lines
from tests.unit.runtime.wired import step_of


def written(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(path: Path, first: int, last: int, factor: float = 1.0) -> Lines:
    """A process."""
    lines = Lines(path)
    for step in range(first, last):
        lines.add({"loss": factor * step})
        lines.write(step)
        lines.add({"after": True})
        lines.end_step(step_of(step, due=step % 5 == 4))
    return lines


def test_what_is_given_in_a_step_is_one_line(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "new" / "rank0.jsonl")
    lines.write(0)
    assert not (tmp_path / "new").exists()
    lines.add({"loss": torch.tensor(0.5), "name": "x"})
    lines.add({"ok": True, "none": None, "bad": float("nan")})
    lines.end_step(step_of(3, due=True))
    lines.close()
    assert written(tmp_path / "new" / "rank0.jsonl") == [
        {"step": 3, "loss": 0.5, "name": "x", "ok": True, "none": None, "bad": "nan"}
    ]


@settings(max_examples=60, deadline=None)
@given(
    deaths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 40)), max_size=4),
)
def test_every_step_once_whatever_dies(deaths: list[tuple[int, int, int]], tmp_path_factory: object) -> None:
    """Each process begins at a step that was reached, and dies at another one, in the middle of a line perhaps."""
    path = tmp_path_factory.mktemp("lines") / "rank0.jsonl"  # type: ignore[attr-defined]
    reached = 0
    for begin, end, torn in deaths:
        first = min(begin, reached)
        run(path, first, end).close()
        reached = max(reached, end)
        if path.exists() and torn and reached < 14:
            whole = json.dumps({"step": reached, "loss": float(reached), "after": True}).encode()
            with path.open("ab") as file:
                file.write(whole[:torn])
    run(path, min(reached, 13), 14).close()
    assert written(path) == [
        {"step": step, "loss": float(step), "after": True} for step in range(len(written(path)))
    ]
    assert len(written(path)) == 14


def test_another_history_takes_the_place_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    run(path, 0, 8).close()
    run(path, 5, 7, factor=2.0).close()
    assert [line["loss"] for line in written(path)] == [0, 1, 2, 3, 4, 10, 12]


def test_a_step_costs_the_same_however_long_the_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = run(tmp_path / "rank0.jsonl", 0, 200)
    parsed: list[object] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: (parsed.append(text), loads(text))[1])
    lines.add({"loss": 1.0})
    lines.write(200)
    lines.end_step(step_of(200))
    lines.close()
    assert len(parsed) == 1  # its own line, which is there by then


def test_a_step_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "rank0.jsonl")
    lines.add({"loss": 1})
    lines.drop_step()
    lines.write(0)
    assert not (tmp_path / "rank0.jsonl").exists()


def test_what_cannot_be_a_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"session.log\(loss=...\) was given a Tensor; give a number or a string"
    ):
        Lines(tmp_path / "x").add({"loss": torch.ones(2)})


def test_a_file_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics").write_text("no directory")
    lines = Lines(tmp_path / "metrics" / "rank0.jsonl")
    for step in range(3):
        lines.add({"loss": 1})
        lines.write(step)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("it lacks lines from step 0 on")


def test_a_step_that_was_begun_behind_the_end_leaves_no_line(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    lines = run(path, 0, 10)
    lines.add({"loss": 10.0})
    lines.write(10)
    lines.drop_step()
    lines.cut(10)
    lines.close()
    assert [line["step"] for line in written(path)] == list(range(10))
    heir = Lines(path)  # a process that has written nothing
    heir.cut(7)
    heir.close()
    assert [line["step"] for line in written(path)] == list(range(7))
    Lines(tmp_path / "none.jsonl").cut(7)
    assert not (tmp_path / "none.jsonl").exists()
