"""`swift-ft inspect --directory` tells of records that were acknowledged and are gone, as a server would."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft.log.directory import NAME as ACKED
from swift_ft.log.directory import encode_place, read_acked
from swift_ft.log.segment import SEGMENT_HEADER_BYTES, SEQUENCE_MAX
from swift_ft.tools.inspect import main as inspect
from tests.unit.log.frames import JOB, STREAM
from tests.unit.log.test_storage import FRAME, crash, files, fill, on_disk, recovered


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a server that was killed with 5 records of a file that was not sealed."""
    storage = on_disk(tmp_path / "data")
    fill(storage, 0, 5)
    crash(storage)
    return tmp_path / "data"


def shown(directory: Path, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> str:
    assert inspect(["--directory", str(directory), *flags]) == code
    return capsys.readouterr().out


def test_a_last_file_that_is_cut_on_a_boundary(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gone" not in shown(directory, capsys, "--verify")
    os.truncate(files(directory)[0], SEGMENT_HEADER_BYTES + 3 * FRAME)
    why = "records 3 to 4 were acknowledged and are gone"
    assert [hole.reason for hole in recovered(directory).holes] == [why]
    assert f"problem: {JOB}/{STREAM}: {why}" in shown(directory, capsys)
    assert f"damaged: {JOB}/{STREAM}: {why}" in shown(directory, capsys, "--verify", code=1)


@pytest.mark.parametrize(
    "put", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")], ids=["directory", "pipe", "link"]
)
def test_something_else_in_its_place_is_told(
    directory: Path, put: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / ACKED).unlink()
    put(directory / ACKED)
    text = shown(directory, capsys)
    assert f"alarm: {directory / ACKED} cannot be read" in text
    assert STREAM in text


def test_without_it_nothing_is_known(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / ACKED).unlink()
    assert read_acked(directory) == {}
    assert "gone" not in shown(directory, capsys)


def test_what_nobody_has_written_counts_for_nothing(directory: Path) -> None:
    before = read_acked(directory)
    with (directory / ACKED).open("ab") as file:
        for sequence in (SEQUENCE_MAX + 1, (1 << 64) - 1):
            file.write(encode_place((bytes(16), 7), sequence))
        file.write(b"x" * 64 + bytes(1000))
    assert read_acked(directory) == before
    assert list(before.values()) == [5]
