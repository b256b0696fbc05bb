"""`swift-ft bench checkpoint --formats`: what it writes, and what is left when it cannot go on."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from swift_ft.lab.bench.command import main
from swift_ft.lab.bench.formats import GROUPS

COMMAND = [sys.executable, "-P", "-m", "swift_ft.cli", "bench", "checkpoint", "--formats"]
SAVED = ["dcp", "dcp async", "npz", "swift async", "torch"]


@pytest.mark.matrix
def test_what_it_finds(tmp_path: Path) -> None:
    path, place = tmp_path / "found.json", tmp_path / "place"
    place.mkdir()
    words = ["--formats", ",".join(SAVED), "--rounds", "1", "--sizes", "0.25", "--directory", str(place)]
    assert main(["checkpoint", *words, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    (case,) = found["cases"]
    kinds = [(row["format"], row["fsync"]) for row in case["formats"]]
    both = [(name, fsync) for name in SAVED for fsync in (False, True) if name != "swift async" or fsync]
    assert kinds == both
    assert case["state_bytes"] == pytest.approx(3 << 18, rel=0.1)
    assert case["limits"].keys() == {"copy_s", "write_s", "write_fsync_s", "read_s"}
    for row in case["formats"]:
        assert 0 < row["blocked_s"] <= row["total_s"]
        assert row["size"] == pytest.approx(1.5 if row["format"] == "npz" else 1.1, abs=0.1)
    kept: dict[str, list[str]] = {group: [] for group in GROUPS}
    lost = {"bf16": ["dtype"], "moments": ["dtype"], "numbers": ["gone", "type"]}
    lost |= {"numpy rng": ["gone"], "python rng": ["gone"]}
    assert found["losses"] == {name: kept | (lost if name == "npz" else {}) for name in SAVED}
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("file_bytes_max", "words"),
    [
        (2 << 20, "nothing can be saved: OSError: "),
        pytest.param(4 << 20, "npz cannot save or load: OSError: ", marks=pytest.mark.matrix),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(file_bytes_max: int, words: str, tmp_path: Path) -> None:
    """As on a full disk: a file has at most so many bytes. The state has 3 MiB, and half as much again as npz."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes_max, file_bytes_max))

    done = subprocess.run(
        [*COMMAND, "npz", "--sizes", "1", "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 3, done.stderr
    assert list(tmp_path.iterdir()) == []
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"swift: bench checkpoint: {words}")
