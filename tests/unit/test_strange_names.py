"""Names are those that we write, and nothing else: whatever lies beside them in a directory is left alone.

`planted` puts every kind of thing under every strange name; each test then does what lists that directory.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swift_ft import events
from swift_ft.lab.drill.run import read_digests
from swift_ft.lab.failures import damage
from swift_ft.log.directory import DROPPED, forget_job, owned, remove_forgotten
from swift_ft.log.manifest import GRANTED
from swift_ft.state import export
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.text import generation_of, port_number, rank_of, version_folder, version_of, whole_number
from swift_ft.tokens import Authority, new_key
from swift_ft.tools.inspect import DirectoryLog
from swift_ft.train.step import Lines
from swift_ft_services.logserver.storage import DirectoryStorage
from tests.unit.checkpoint.holding import Holding, unexpected
from tests.unit.log.frames import JOB, STREAM
from tests.unit.log.storages import FIVE_A_SEGMENT, fill, on_disk

STRANGE = ["²", "１", "٣", "-1", "+1", "1 ", "1.tmp", "1_0", "", "1\n", "0x1", "\udcff"]
KINDS: dict[str, Callable[[Path], None]] = {
    "directory": lambda path: path.mkdir(),
    "file": lambda path: path.write_text("{}"),
    "FIFO": os.mkfifo,
    "dangling": lambda path: path.symlink_to("nowhere"),
}


def names_of(prefix: str, suffix: str = "") -> list[str]:
    long = prefix + "1" * (255 - len(os.fsencode(prefix + suffix)))
    return [name + suffix for name in (*(prefix + strange for strange in STRANGE), long)]


def planted(directory: Path, prefix: str, suffix: str = "") -> list[Path]:
    """Gives all of it."""
    made = []
    directory.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names_of(prefix, suffix)):
        path = directory / name
        kinds = list(KINDS.values())
        kinds[number % len(kinds)](path)
        made.append(path)
    return made


def left_alone(paths: list[Path]) -> bool:
    return all(map(os.path.lexists, paths))


@pytest.mark.parametrize(
    ("number_of", "ours"),
    [
        (version_of, {version_folder(0): 0, version_folder(7): 7, version_folder(10**8): 10**8}),
        (rank_of, {"rank0": 0, "rank12": 12}),
        (generation_of, {"g0-0123abcd-1": 0, ".g12-0123abcd-34": 12}),
        (whole_number, {"0": 0, "7": 7, "123456789012345678": 123456789012345678}),
        (port_number, {"0": 0, "65535": 65535}),
    ],
)
def test_a_number_is_read_as_it_is_written_and_no_other_way(
    number_of: Callable[[str], int | None], ours: dict[str, int]
) -> None:
    assert {name: number_of(name) for name in ours} == ours
    for prefix in ("v", "rank", "g", "g1-0123abcd-", "", "v0000000"):
        strange = {name: number_of(name) for name in names_of(prefix)}
        assert set(strange.values()) == {None}, strange
    others = "v1 v000000001 v01 rank01 g01-0123abcd-1 g1-0123abcd-01 g1-xyz-1 g1-0123abcd"
    assert {number_of(name) for name in others.split()} == {None}
    assert port_number("65536") is None
    assert whole_number("1" * 5000) is None


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, list[Path]]:
    """Version 3 and 5 of ranks 0 and 1; and what lies beside them, at every level."""
    for rank in (0, 1):
        store = CheckpointStore(tmp_path, rank, Holding(entered=1))
        for version in (3, 5):
            state = {"version": version, "stages": {"0": {"w": torch.full((2,), float(version))}}}
            store.save(version, state, lambda _version: None, unexpected)
            store.wait()
    strange = planted(tmp_path, "v") + planted(tmp_path, "v0000000")
    for version in (3, 5):
        strange += planted(tmp_path / version_folder(version), "rank")
        strange += planted(tmp_path / version_folder(version) / "rank0", "g")
        strange += planted(tmp_path / version_folder(version) / "rank0", ".g")
        strange += planted(tmp_path / version_folder(version) / "rank0", "g9-0123abcd-")
    (tmp_path / version_folder(4)).write_text("a file")
    (tmp_path / version_folder(6)).symlink_to("nowhere")
    (tmp_path / version_folder(3) / "rank7").write_text("a file")
    return tmp_path, [*strange, tmp_path / version_folder(4), tmp_path / version_folder(6)]


def test_checkpoints_are_pruned_loaded_and_saved_beside_strange_names(
    checkpoints: tuple[Path, list[Path]],
) -> None:
    directory, strange = checkpoints
    store = CheckpointStore(directory, 0, Holding(entered=1))
    assert store.versions() == [3, 5]
    assert store.load(5)["version"] == 5
    store.save(7, {"version": 7}, lambda _version: None, unexpected)
    store.wait()
    store.prune({7})
    (shard,) = directory.glob("v*/rank0/g1-*")
    assert shard.parent.parent.name == version_folder(7)
    assert left_alone(strange)


def test_what_an_earlier_job_left_is_set_aside_without_strange_names(
    checkpoints: tuple[Path, list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, strange = checkpoints
    CheckpointStore(directory, 0, Holding(entered=1)).set_aside(lambda: None)
    assert "rank 0 finds 2 checkpoints of an earlier job" in capsys.readouterr().err
    assert left_alone(strange)


def test_checkpoints_are_exported_and_damaged_beside_strange_names(
    checkpoints: tuple[Path, list[Path]],
) -> None:
    directory, _ = checkpoints
    assert export.world_size_of(directory) == 2
    assert export.newest(directory, 2, pytest.fail)[0] == 5
    flipped = damage.corrupt_checkpoint(directory, 0, 5, seed=1)
    assert flipped is not None
    assert flipped["file"].startswith("v00000005/rank0/g1-")


def filled(directory: Path, records: int) -> None:
    storage = on_disk(directory, FIVE_A_SEGMENT)
    fill(storage, 0, records)
    storage.close()


def test_a_log_is_served_and_shown_beside_strange_names(tmp_path: Path) -> None:
    filled(tmp_path, 12)
    strange = planted(tmp_path, DROPPED) + planted(tmp_path, "²") + planted(tmp_path, f"{GRANTED}²")
    strange += planted(tmp_path / JOB, "²") + planted(tmp_path / JOB / STREAM, "0" * 18, ".seg")
    before = DirectoryLog(tmp_path).facts(JOB)
    assert before.jobs[0].records == 12
    assert before.jobs[0].problem == ""
    storage = DirectoryStorage(tmp_path, FIVE_A_SEGMENT)
    try:
        assert [job.name for job in storage.recover()] == [JOB]
    finally:
        storage.close()
    assert left_alone(strange)


def test_only_forgotten_jobs_are_removed(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    strange = planted(tmp_path, DROPPED) + planted(tmp_path, f"{DROPPED}{JOB}-0123456789a")
    with owned(tmp_path):
        grave = forget_job(tmp_path, JOB)
        assert grave.is_dir()
        remove_forgotten(tmp_path)
    assert not grave.exists()
    assert left_alone(strange)


def test_bits_are_flipped_in_segments_alone(tmp_path: Path) -> None:
    filled(tmp_path, 12)
    ours = set(tmp_path.glob(f"{JOB}/{STREAM}/*.seg"))
    planted(tmp_path / JOB / STREAM, "0" * 18, ".seg")
    (tmp_path / JOB / STREAM / f"{'9' * 20}.seg").mkdir()
    assert set(damage.segment_files([tmp_path], "*")) == ours


@pytest.mark.timeout(30)
def test_traces_are_read_beside_strange_names(tmp_path: Path) -> None:
    line = json.dumps({"t": 1.0, "event": "ours"}) + "\n"
    (tmp_path / "rank0-12.jsonl").write_text(line)
    strange = planted(tmp_path, "rank0-", ".jsonl")
    os.mkfifo(tmp_path / "rank1-13.jsonl")
    (tmp_path / "rank2-14.jsonl").symlink_to("nowhere")
    (tmp_path / "rank3-15.jsonl").mkdir()
    assert events.read(tmp_path) == events.Tail(tmp_path).read() == [json.loads(line)]
    assert left_alone(strange)


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_trace_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(events.ENV_EVENTS_DIR, str(tmp_path))
    events.configure("held")
    os.mkfifo(tmp_path / f"held-{os.getpid()}.jsonl")
    events.emit("lost")
    events.configure("process")
    os.mkfifo(tmp_path / "rank0.jsonl")
    with pytest.raises(OSError, match="Not a regular file"):
        Lines(tmp_path / "rank0.jsonl")._opened()


@pytest.mark.timeout(30)
def test_evidence_is_read_beside_strange_names(tmp_path: Path) -> None:
    (tmp_path / "rank0-v3.json").write_text('{"w": "0"}')
    (tmp_path / "rank0-v3-g2.json").write_text('{"w": "1"}')
    planted(tmp_path, "rank0-v", ".json")
    os.mkfifo(tmp_path / "rank1-v3.json")
    assert read_digests(tmp_path) == {"rank0-v3": {"w": "0"}, "rank0-v3-g2": {"w": "1"}}


@pytest.mark.timeout(30)
def test_keys_are_read_beside_strange_names(tmp_path: Path) -> None:
    _, verifying = new_key(tmp_path)
    linked = verifying.with_name("linked.pem")
    verifying.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")  # as secrets are mounted
    planted(verifying.parent, "k", ".pem")
    authority = Authority(verifying.parent)
    authority._refresh(0.0)
    assert authority._keys.keys() == {"linked"}
