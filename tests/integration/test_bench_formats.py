"""`swift-ft bench checkpoint --formats` with real ranks: what it writes, and what is left when it cannot go on."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from swift_ft.lab.bench.command import main
from swift_ft.lab.bench.formats.states import GROUPS

COMMAND = [sys.executable, "-P", "-m", "swift_ft.cli", "bench", "checkpoint", "--formats"]
SAVED = ["dcp", "dcp async", "npz", "swift async", "torch"]


@pytest.mark.matrix
def test_one_rank_and_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, place = tmp_path / "found.json", tmp_path / "place"
    place.mkdir()
    words = ["--formats", ",".join(SAVED), "--rounds", "1", "--sizes", "0.25", "--directory", str(place)]
    assert main(["checkpoint", *words, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [case["ranks"] for case in found["cases"]] == [1, 2]
    for case in found["cases"]:
        kinds = [(row["format"], row["fsync"]) for row in case["formats"]]
        both = [(name, fsync) for name in SAVED for fsync in (False, True) if name != "swift async" or fsync]
        assert kinds == both
        assert case["state_bytes"] == pytest.approx(3 << 18, rel=0.1)  # of all ranks
        assert case["limits"].keys() == {"copy_s", "write_s", "write_fsync_s", "read_s"}
        for row in case["formats"]:
            assert 0 < row["blocked_s"] <= row["total_s"]
            assert row["size"] == pytest.approx(1.5 if row["format"] == "npz" else 1.1, abs=0.1)
    kept: dict[str, list[str]] = {group: [] for group in GROUPS}
    lost = {"bf16": ["dtype"], "moments": ["dtype"], "numbers": ["gone", "type"]}
    lost |= {"numpy rng": ["gone"], "python rng": ["gone"]}
    assert found["losses"] == {name: kept | (lost if name == "npz" else {}) for name in SAVED}
    assert "2 ranks, each with its shard" in capsys.readouterr().out
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("file_bytes_max", "words"),
    [
        (1 << 20, "nothing can be saved: OSError: "),
        pytest.param(2 << 20, "npz cannot save or load: OSError: ", marks=pytest.mark.matrix),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(file_bytes_max: int, words: str, tmp_path: Path) -> None:
    """As on a full disk: a file has at most so many bytes. A rank's state has 1.5 MiB, and half as much again as npz;
    the other rank must not wait for ever."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes_max, file_bytes_max))

    done = subprocess.run(
        [*COMMAND, "npz", "--ranks", "2", "--sizes", "1", "--directory", str(tmp_path)],
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


@pytest.mark.matrix
def test_it_ends_its_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    command = [*COMMAND, "torch", "--ranks", "2", "--sizes", "1", "--rounds", "1000000"]
    with subprocess.Popen([*command, "--directory", str(tmp_path)], stdout=subprocess.DEVNULL) as bench:
        ranks: list[psutil.Process] = []
        while len(ranks) < 2:
            assert bench.poll() is None
            ranks = psutil.Process(bench.pid).children()
        os.kill(bench.pid, signal.SIGTERM)
        assert bench.wait(60) == 130
        assert [rank for rank in ranks if rank.is_running()] == []
    assert list(tmp_path.iterdir()) == []
