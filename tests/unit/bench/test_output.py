"""What all benchmarks share: the JSON is refused early or written whole."""

import errno
import json
import os
from pathlib import Path

import pytest

from swift_ft.cli_parser import check_file, write_json
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output


def test_a_path_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    check_file("--json", None)
    check_file("--json", tmp_path / "new.json")
    for bad in (tmp_path, tmp_path / "nowhere" / "new.json"):
        with pytest.raises(UsageError, match=r"^--json .*: give a file in a directory that exists"):
            check_file("--json", bad)


def test_a_result_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    write_json(None, {"a": 1})
    with pytest.raises(ServiceError, match="cannot write"):
        write_json(tmp_path / "gone" / "result.json", {})


def test_a_link_is_written_through(tmp_path: Path) -> None:
    """So is /dev/fd/N, which is one."""
    link, descriptor = tmp_path / "link.json", os.open(tmp_path / "there.json", os.O_RDWR | os.O_CREAT)
    try:
        link.symlink_to(tmp_path / "there.json")
        for n, path in enumerate((link, Path(f"/dev/fd/{descriptor}"))):
            write_json(path, {"a": n})
            assert json.loads((tmp_path / "there.json").read_text()) == {"a": n}
        assert link.is_symlink()
    finally:
        os.close(descriptor)


def test_a_file_whose_place_cannot_be_taken_is_written_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is mounted by itself, or in a folder without permission."""
    (tmp_path / "result.json").write_text("old")

    def busy(self: Path, target: Path) -> Path:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "replace", busy)
    write_json(tmp_path / "result.json", {"a": 1})
    assert json.loads((tmp_path / "result.json").read_text()) == {"a": 1}
    with pytest.raises(ServiceError, match="busy; give another place"):
        write_json(tmp_path / "new.json", {"a": 1})


def test_a_full_disk_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "result.json").write_text("old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ServiceError, match="No space left on device; give another place"):
        write_json(tmp_path / "result.json", {"a": 1})
    assert (tmp_path / "result.json").read_text() == "old"


def test_a_result_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.touch(0o600)
    write_json(path, {"a": 1})
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_machine_in_words() -> None:
    words = output.machine()
    assert "cores (" in words
    assert "load " in words
    assert output.cpu_model() in words


def test_a_directory_that_cannot_be_worked_in_is_refused_in_one_line(tmp_path: Path) -> None:
    with output.place(tmp_path) as place:
        assert Path(place).parent == tmp_path
    (tmp_path / "file").touch()
    for bad in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(UsageError, match=f"^--directory {bad}: .*; give one that can be written$"):
            output.place(bad)


def test_ratios_are_of_the_same_round() -> None:
    rounds = output.Rounds()
    for plain, other in ((1.0, 2.0), (10.0, 10.0), (100.0, 90.0)):
        rounds.note("plain", plain)
        rounds.note("other", other)
    assert (rounds.ratio("other", "plain"), rounds.median("plain")) == (1.0, 10.0)
    assert rounds.summary_ms("other") == {"median": 10_000.0, "max": 90_000.0}
    with rounds.timed("block"):
        pass
    assert 0 <= rounds.values["block"][0] < 1


def test_an_end_that_does_not_come_is_said() -> None:
    assert output.await_end(lambda: 3, 0.0) == 3
    with pytest.raises(ServiceError, match="not at its end after 0 s"):
        output.await_end(lambda: None, 0.0)
