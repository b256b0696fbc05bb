"""torch.distributed.checkpoint: what it has written is loaded and runs nothing; what is exported it opens by itself."""

import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import swift_ft
from swift_ft.errors import UsageError
from swift_ft.state.export import METADATA, alone
from swift_ft.tools import export as command
from tests.unit.checkpoint.damage import DAMAGES
from tests.unit.checkpoint.holding import saved


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
    swift_ft.load_dcp(ours, directory)
    assert same(ours, state)


def test_a_key_that_is_not_there_is_named(written: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match=r"before cannot be loaded: Missing key .*: other\.") as raised:
        swift_ft.load_dcp({"other": torch.zeros(2)}, written[0])
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
        swift_ft.load_dcp({}, written[0])
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
        swift_ft.load_dcp(written[1], written[0])
    assert isinstance(PurePath.__dict__["name"], property)
    assert not hasattr(Metadata, "name")


def test_no_value_of_a_stranger_runs_anything(tmp_path: Path) -> None:
    with alone():
        save({"note": Trap(tmp_path / "executed")}, checkpoint_id=tmp_path / "d", no_dist=True)
    with pytest.raises(UsageError, match="cannot be loaded: Weights only load failed"):
        swift_ft.load_dcp({"note": ""}, tmp_path / "d")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", "..", "linked"])
def test_files_outside_of_the_directory_are_not_read(name: str, written: tuple[Path, dict[str, Any]]) -> None:
    directory, state = written
    (directory / "linked").symlink_to("/etc/passwd")
    index = FileSystemReader(directory).read_metadata()
    for info in index.storage_data.values():
        info.relative_path = name
    (directory / METADATA).write_bytes(pickle.dumps(index))
    with pytest.raises(UsageError, match="names a file outside of its directory"):
        swift_ft.load_dcp(state, directory)


@pytest.mark.parametrize(
    "damaged",
    [lambda content: content[: len(content) // 2], lambda _: b"", lambda _: pickle.dumps([1, 2])],
    ids=["cut", "empty", "other"],
)
def test_an_index_that_is_none_is_refused_in_one_line(
    damaged: Callable[[bytes], bytes], written: tuple[Path, dict[str, Any]]
) -> None:
    path = written[0] / METADATA
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(UsageError, match=r"\.metadata") as raised:
        swift_ft.load_dcp({}, written[0])
    assert "\n" not in str(raised.value)


# --- export ---


def job_of(directory: Path, version: int, states: list[dict[str, Any]]) -> None:
    for rank, state in enumerate(states):
        saved(directory / "job", version, {"version": version, **state}, rank)


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
    job_of(tmp_path, 20, states)
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
    weights, moments = torch.randn(2, 5, 3), torch.randn(2, 5, 3)  # of two pipeline ranks
    states = []
    for rank in range(4):
        pipeline, shard = divmod(rank, 2)
        rows = slice(0, 3) if shard == 0 else slice(3, 5)
        words = f"S(0) {shard + 1}/2 by 1 on shard of [5, 3]"
        states.append(
            {
                "stages": {str(pipeline): {"w": weights[pipeline, rows].clone()}},
                "optimizers": [{"state": {0: {"m": moments[pipeline, rows].clone()}}}],
                "placements": {f"state.stages.{pipeline}.w": words, "state.optimizers.0.state.0.m": words},
            }
        )
    job_of(tmp_path, 3, states)
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


def test_parts_over_two_dimensions_of_a_mesh_are_put_together(tmp_path: Path) -> None:
    """Shards of layers that are split over ranks: along two dimensions, along one of them, or nested in it."""
    weight, bias, nested = torch.randn(5, 4), torch.randn(6), torch.randn(8, 2)
    states = []
    for rank in range(4):
        shard, tensor = divmod(rank, 2)
        mesh = "on shard×tensor of"
        rows, columns = slice(0, 3) if shard == 0 else slice(3, 5), slice(2 * tensor, 2 * tensor + 2)
        begin = 4 * tensor + 2 * shard  # FSDP2 shards what a rank has of a layer
        tensors = {
            "w": weight[rows, columns].clone(),
            "b": bias[3 * shard : 3 * shard + 3].clone(),
            "n": nested[begin : begin + 2].clone(),
            "same": torch.ones(2),
        }
        words = {
            "w": f"S(0) {shard + 1}/2 by 2, S(1) {tensor + 1}/2 by 1 {mesh} [5, 4]",
            "b": f"S(0) {shard + 1}/2 by 2 on shard of [6]",
            "n": f"_S(0/2) {shard + 1}/2 by 2, S(0) {tensor + 1}/2 by 1 {mesh} [8, 2]",
            "same": f"R, R {mesh} [2]",
        }
        placements = {f"state.stages.0.{name}": each for name, each in words.items()}
        states.append({"stages": {"0": tensors}, "optimizers": [], "placements": placements})
    job_of(tmp_path, 3, states)
    assert export(tmp_path, "--version", "3") == 0
    ours = {"stages": {"0": {"w": torch.zeros(5, 4), "b": torch.zeros(6), "n": torch.zeros(8, 2)}}}
    with alone():
        load(ours, checkpoint_id=tmp_path / "out", no_dist=True)
    for name, expected in (("w", weight), ("b", bias), ("n", nested)):
        assert torch.equal(ours["stages"]["0"][name], expected), name


def test_a_damaged_version_is_passed_over_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_of(tmp_path, 10, hybrid())
    job_of(tmp_path, 20, hybrid(5))
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
    job_of(tmp_path, 4, hybrid()[:2])
    assert export(tmp_path, "--ranks", "4") == 3
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("swift: ") for line in lines] == [True] * 4, lines


# --- made-up directories ---

Change = Callable[[Metadata], None]


def saved_in_parts(directory: Path) -> torch.Tensor:
    """A tensor whose file says that it is two chunks, of rows 0 to 2 and of row 3."""
    whole = torch.arange(8.0).reshape(4, 2) + 1
    with alone():
        save({"w": whole[:3].clone(), "last": whole[3:].clone()}, checkpoint_id=directory, no_dist=True)
    index = FileSystemReader(directory).read_metadata()
    described: Any = index.state_dict_metadata["w"]
    last = index.state_dict_metadata.pop("last")
    assert isinstance(last, TensorStorageMetadata)
    described.size = torch.Size([4, 2])
    described.chunks.append(chunk([3, 0], [1, 2]))
    (place,) = [place for key, place in index.storage_data.items() if key.fqn == "last"]
    index.storage_data[MetadataIndex("w", torch.Size([3, 0]))] = place
    (directory / METADATA).write_bytes(pickle.dumps(index))
    return whole


def chunks(*described: Any) -> Change:
    """In place of those that are there."""

    def changed(index: Metadata) -> None:
        of_w: Any = index.state_dict_metadata["w"]
        of_w.chunks[:] = described

    return changed


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def no_tensor(index: Metadata) -> None:
    index.state_dict_metadata["w"] = BytesStorageMetadata()


FIRST, LAST = chunk([0, 0], [3, 2]), chunk([3, 0], [1, 2])
CORNER = (chunk([0, 0], [3, 1]), chunk([2, 0], [2, 2]), chunk([3, 1], [1, 1]))
NO_TENSOR = "do not make a tensor"
NOT_WHOLE: dict[str, tuple[Change, str]] = {
    "no chunk": (chunks(), NO_TENSOR),
    "the first chunk alone": (chunks(FIRST), NO_TENSOR),
    "the last chunk alone": (chunks(LAST), NO_TENSOR),
    "a gap and an overlap": (chunks(FIRST, chunk([2, 0], [1, 2])), NO_TENSOR),
    "one chunk twice": (chunks(chunk([0, 0], [2, 2]), chunk([0, 0], [2, 2])), NO_TENSOR),
    "chunks that overlap in a corner": (chunks(*CORNER), NO_TENSOR),
    "a chunk outside": (chunks(FIRST, chunk([4, 0], [1, 2])), NO_TENSOR),
    "a chunk of less than nothing": (chunks(FIRST, LAST, chunk([1, 0], [-1, 2])), NO_TENSOR),
    "a chunk of other dimensions": (chunks(FIRST, chunk([3], [1])), ""),
    "chunks that are none": (chunks(FIRST, "chunk"), ""),
    "a chunk in no file": (lambda index: index.storage_data.popitem() and None, ""),
    "no tensor": (no_tensor, "w is no tensor there"),
}


def test_a_tensor_in_chunks_is_loaded(tmp_path: Path) -> None:
    whole, ours = saved_in_parts(tmp_path), torch.zeros(4, 2)
    swift_ft.load_dcp({"w": ours}, tmp_path)
    assert torch.equal(ours, whole)


@pytest.mark.parametrize(("change", "words"), NOT_WHOLE.values(), ids=NOT_WHOLE)
def test_a_tensor_that_is_not_all_there_is_not_loaded(change: Change, words: str, tmp_path: Path) -> None:
    """torch's load leaves what was there, and says nothing."""
    saved_in_parts(tmp_path)
    index = FileSystemReader(tmp_path).read_metadata()
    change(index)
    (tmp_path / METADATA).write_bytes(pickle.dumps(index))
    with pytest.raises(UsageError, match=rf"cannot be loaded: .*{words}") as raised:
        swift_ft.load_dcp({"w": torch.zeros(4, 2)}, tmp_path)
    assert str(raised.value).isprintable()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [METADATA, "__0_0.distcp"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, Path.unlink])
def test_what_is_no_file_holds_nobody_up(
    name: str, put: Callable[[Path], None], written: tuple[Path, dict[str, Any]]
) -> None:
    directory, state = written
    (directory / name).unlink()
    if put is not Path.unlink:
        put(directory / name)
    with pytest.raises(UsageError, match=r"Not a regular file|Is a directory|No such file") as raised:
        swift_ft.load_dcp(state, directory)
    assert str(directory / name) in str(raised.value)
    assert str(raised.value).isprintable()


W = torch.ones(2, 2)
MADE_UP: dict[str, Any] = {
    "a list": [W],
    "a tensor": W,
    "no version": {"stages": {}},
    "a tensor for a version": {"version": W, "stages": {}},
    "another version": {"version": 4, "stages": {}},
    "a version that is true": {"version": True, "stages": {}},
    "no stages": {"version": 5},
    "a list of stages": {"version": 5, "stages": [W]},
    "a stage without names": {"version": 5, "stages": {"0": W}},
    "a stage of numbers": {"version": 5, "stages": {"0": {0: W}}},
    "stages of numbers": {"version": 5, "stages": {0: {"w": W}}},
    "a part of a number": {"version": 5, "stages": {}, 7: W},
    "a list of placements": {"version": 5, "stages": {}, "placements": ["state.stages.0.w"]},
    "a placement of a number": {
        "version": 5,
        "stages": {"0": {"w": W}},
        "placements": {"state.stages.0.w": 1},
    },
    **{
        words[:40]: {"version": 5, "stages": {"0": {"w": W}}, "placements": {"state.stages.0.w": words}}
        for words in (
            "",
            "S(0) 1/0 by 1 on shard of [2, 2]",
            "S(0) 1/1 by 1 on shard of [,]",
            "S(0) 1/2 by 1 on shard of [4, 2]",
            "S(0) 2/2 by 1 on shard of [4, 2]",
            "S(0) 1/999999999 by 999999999 on shard of [4, 2]",
            "S(9) 1/1 by 1 on shard of [2, 2]",
            f"S(0) 1/1 by 1 on shard of [{'1' * 5000}]",
            "S(0) 1/1 by 1 on shard of [2, 3]",
            "S(0) 1/1 on shard of [2, 2]",
            "S(0) １/１ by 1 on shard of [2, 2]",
            "R, P on shard of [2, 2]",
            "x" * 5000,
        )
    },
    "a placement of nothing": {
        "version": 5,
        "stages": {},
        "placements": {"nothing": "S(0) 1/1 by 1 on shard of [2, 2]"},
    },
    "names that are one in the end": {"version": 5, "stages": {"0": {"w.x": 1}, "0.w": {"x": 2}}},
}


@pytest.mark.parametrize("state", MADE_UP.values(), ids=MADE_UP)
def test_a_made_up_state_is_not_exported(
    state: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checksums are right: whoever can write there can make them."""
    saved(tmp_path / "job", 5, state)
    assert export(tmp_path, "--version", "5") in (2, 3)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert len(said.err) < 600
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
