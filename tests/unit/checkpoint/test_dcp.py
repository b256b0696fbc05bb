"""torch.distributed.checkpoint: what it has written is loaded and runs nothing; what is exported it opens by itself."""

import os
import pickle
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Shard

import swift
from swift.checkpoint import command
from swift.checkpoint.dcp import METADATA, alone
from swift.checkpoint.export import _SHARD
from swift.checkpoint.store import CheckpointStore
from swift.errors import UsageError
from tests.unit.checkpoint.damage import DAMAGES
from tests.unit.checkpoint.holding import Holding, unexpected


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    module[2].to(torch.float32)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return module, optimizer


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": module.state_dict(), "optim": optimizer.state_dict(), "step": 0, "extra": {"note": ""}}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """By torch, before swift-ft was there."""
    state = state_of(*trained(0)) | {"step": 7, "extra": {"note": "hello"}}
    with alone():
        save(state, checkpoint_id=tmp_path / "before", no_dist=True)
    return tmp_path / "before", state


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def test_what_torch_has_written_is_loaded(written: tuple[Path, dict[str, Any]]) -> None:
    directory, state = written
    ours = state_of(*trained(1))
    assert not same(ours, state)
    swift.load_dcp(ours, directory)
    assert same(ours, state)


def test_a_key_that_is_not_there_is_named(written: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match=r"before cannot be loaded: Missing key .*: other\.") as raised:
        swift.load_dcp({"other": torch.zeros(2)}, written[0])
    assert "\n" not in str(raised.value)


class Trap:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_no_index_of_a_stranger_runs_anything(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (written[0] / METADATA).write_bytes(pickle.dumps(Trap(tmp_path / "executed")))
    with pytest.raises(
        UsageError, match=r"not what torch.distributed.checkpoint writes: it names posix\.mkdir"
    ):
        swift.load_dcp({}, written[0])
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "owner",
    [
        b"cpathlib\nPosixPath\n",
        b"ctorch\nSize\n",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(K\x00tR",
    ],
    ids=["PurePath", "a function of ours", "a class of DCP's", "a member of an enumeration"],
)
def test_no_index_of_a_stranger_changes_what_others_use(
    owner: bytes, written: tuple[Path, dict[str, Any]]
) -> None:
    """With another `PurePath.name` any file would be one of the directory's."""
    path = written[0] / METADATA
    index = pickle.dumps(FileSystemReader(written[0]).read_metadata(), protocol=2)
    change = b"(N}U\x04nameU\x05otherstb0"  # (None, {"name": "other"}), BUILD, POP
    path.write_bytes(index[:2] + owner + change + index[2:])
    with pytest.raises(UsageError, match="it gives attributes to"):
        swift.load_dcp(written[1], written[0])
    assert isinstance(PurePath.__dict__["name"], property)
    assert not hasattr(Metadata, "name")


def test_no_value_of_a_stranger_runs_anything(tmp_path: Path) -> None:
    with alone():
        save({"note": Trap(tmp_path / "executed")}, checkpoint_id=tmp_path / "d", no_dist=True)
    with pytest.raises(UsageError, match="cannot be loaded: Weights only load failed"):
        swift.load_dcp({"note": ""}, tmp_path / "d")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", "..", "linked"])
def test_files_outside_of_the_directory_are_not_read(
    name: str, written: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, state = written
    (directory / "linked").symlink_to("/etc/passwd")
    index = FileSystemReader(directory).read_metadata()
    for info in index.storage_data.values():
        info.relative_path = name
    (directory / METADATA).write_bytes(pickle.dumps(index))
    with pytest.raises(UsageError, match="names a file outside of its directory"):
        swift.load_dcp(state, directory)


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "folder", "gone"])
def test_an_index_that_is_none_is_refused_in_one_line(
    damage: str, written: tuple[Path, dict[str, Any]]
) -> None:
    path = written[0] / METADATA
    content = path.read_bytes()
    path.unlink()
    match damage:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "other":
            path.write_bytes(pickle.dumps([1, 2]))
        case "folder":
            path.mkdir()
    with pytest.raises(UsageError, match=r"\.metadata") as raised:
        swift.load_dcp({}, written[0])
    assert "\n" not in str(raised.value)


# --- export ---


def saved(directory: Path, version: int, states: list[dict[str, Any]]) -> None:
    for rank, state in enumerate(states):
        store = CheckpointStore(directory / "job", rank, Holding(entered=1))
        store.save(version, {"version": version, **state}, lambda _version: None, unexpected)
        store.wait()


def hybrid(seed: int = 0) -> list[dict[str, Any]]:
    """Two stages of two replicas each; replicas have optimizers alike, and loaders of their own."""
    states = []
    for rank in range(4):
        module, optimizer = trained(seed + rank // 2)
        states.append(
            {
                "stages": {str(rank // 2): module.state_dict()},
                "optimizers": [optimizer.state_dict()],
                "objects": {"loader": {"position": rank}},
            }
        )
    return states


def export(directory: Path, *arguments: str) -> int:
    words = ["--checkpoint-dir", str(directory), "--job", "job", *arguments, str(directory / "out")]
    return command.main(words)


def test_a_whole_job_is_opened_by_torch_alone(tmp_path: Path) -> None:
    states = hybrid()
    saved(tmp_path, 20, states)
    assert export(tmp_path) == 0
    module, optimizer = trained(7)
    for stage in (0, 1):
        ours: dict[str, Any] = {
            "stages": {str(stage): module.state_dict()},
            "ranks": {
                str(2 * stage): {
                    "optimizers": [optimizer.state_dict()],
                    "objects": {"loader": {"position": -1}},
                }
            },
            "version": -1,
        }
        with alone():
            load(ours, checkpoint_id=tmp_path / "out", no_dist=True)
        assert ours["version"] == 20
        assert same(ours["stages"][str(stage)], states[2 * stage]["stages"][str(stage)])
        assert same(
            ours["ranks"][str(2 * stage)], {k: v for k, v in states[2 * stage].items() if k != "stages"}
        )
        optimizer.load_state_dict(ours["ranks"][str(2 * stage)]["optimizers"][0])
    others: dict[str, Any] = {
        "ranks": {"3": {"objects": {"loader": {"position": -1}}, "same": {"optimizers": -1}}}
    }
    with alone():
        load(others, checkpoint_id=tmp_path / "out", no_dist=True)
    assert others["ranks"]["3"] == {"objects": {"loader": {"position": 3}}, "same": {"optimizers": 2}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "out"]


def test_shards_are_put_together(tmp_path: Path) -> None:
    assert _SHARD.fullmatch(f"{Shard(1)} 1/2 of [4, 5]"), "as swift.runtime.manifest.placement says it"
    weights, moments = torch.randn(2, 5, 3), torch.randn(2, 5, 3)  # of two pipeline ranks
    states = []
    for rank in range(4):
        pipeline, shard = divmod(rank, 2)
        rows = slice(0, 3) if shard == 0 else slice(3, 5)
        words = f"S(0) {shard + 1}/2 of [5, 3]"
        states.append(
            {
                "stages": {str(pipeline): {"w": weights[pipeline, rows].clone()}},
                "optimizers": [{"state": {0: {"m": moments[pipeline, rows].clone()}}}],
                "placements": {f"state.stages.{pipeline}.w": words, "state.optimizers.0.state.0.m": words},
            }
        )
    saved(tmp_path, 3, states)
    assert export(tmp_path, "--version", "3") == 0
    for pipeline in (0, 1):
        stage, rank = str(pipeline), str(2 * pipeline)
        ours = {
            "stages": {stage: {"w": torch.zeros(5, 3)}},
            "ranks": {rank: {"optimizers": [{"state": {"0": {"m": torch.zeros(5, 3)}}}]}},
        }
        with alone():
            load(ours, checkpoint_id=tmp_path / "out", no_dist=True)
        assert torch.equal(ours["stages"][stage]["w"], weights[pipeline])
        optimizers: Any = ours["ranks"][rank]["optimizers"]
        assert torch.equal(optimizers[0]["state"]["0"]["m"], moments[pipeline])


def test_a_damaged_version_is_passed_over_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 10, hybrid())
    saved(tmp_path, 20, hybrid(5))
    DAMAGES["bit in the tensors"][0](tmp_path / "job" / "v00000020" / "rank3")
    assert export(tmp_path, "--version", "20") == 3
    assert not (tmp_path / "out").exists()
    assert export(tmp_path) == 0
    told = capsys.readouterr()
    assert "swift: version 20 is not taken: checkpoint " in told.err
    assert "is not what its checksum says" in told.err
    assert told.out.startswith("version 10 of 4 ranks: ")
    assert export(tmp_path) == 2
    assert "is there already" in capsys.readouterr().err


def test_nothing_to_export_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(tmp_path) == 2
    (tmp_path / "job").mkdir()
    assert export(tmp_path) == 2
    saved(tmp_path, 4, hybrid()[:2])
    assert export(tmp_path, "--ranks", "4") == 3
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("swift: ") for line in lines] == [True] * 4, lines
