"""What is there already when a job begins under a name: an earlier job's, this process's own, or its heir's."""

import shutil
from pathlib import Path

import pytest
import torch

from swift_ft.errors import Fenced
from swift_ft.state.checkpoint_store import CheckpointStore
from tests.unit.checkpoint.holding import Holding, keep, load, shard_of, store_of


def held() -> None:
    """This process holds its rank."""


def test_what_an_earlier_job_left_is_neither_used_nor_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = shard_of(tmp_path, {"x": torch.zeros(4)}, generation=9)
    store = store_of(tmp_path)
    store.set_aside(held)
    assert "earlier job" in capsys.readouterr().err
    shard_of(tmp_path, {"x": torch.ones(4)}, generation=1)
    assert torch.equal(load(tmp_path, 1)["x"], torch.ones(4))
    assert len(list(tmp_path.glob(f"v*/.former-*-rank0/{old.name}"))) == 1
    shutil.rmtree(tmp_path)
    store.set_aside(held)
    store_of(tmp_path).set_aside(held)


def test_what_it_has_adopted_is_there_until_it_is_saved_again(tmp_path: Path) -> None:
    """A rank died before the adopted job ran, and the others begin again: a kill of all loses no checkpoint."""
    shard_of(tmp_path, {"x": torch.ones(4)}, generation=3)
    holder = Holding()
    store = CheckpointStore(tmp_path, 0, holder)
    for holder.entered in (1001, 1002):
        state = store.load(version=1)
        store.set_aside(held, above=1)
        assert torch.equal(load(tmp_path, 1)["x"], torch.ones(4))
        keep(store, 1, state)
    assert [path.name.partition("-")[0] for path in tmp_path.glob("v*/rank0/*")] == ["g1002"]


def test_a_process_that_begins_again_takes_its_own_for_no_earlier_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank died before the job ran: the others begin again in the next generation, perhaps with another session."""
    holder = Holding(entered=1)
    store = CheckpointStore(tmp_path, 0, holder)
    store.set_aside(held)
    for version in (0, 1):
        keep(store, version, {"x": torch.ones(4)})
    (tmp_path / "v00000000" / "rank0" / f".g1-{store._process}-7").mkdir()
    heirs = shard_of(tmp_path, {"x": torch.zeros(4)}, version=1, generation=2)
    for session in (store, CheckpointStore(tmp_path, 0, holder)):
        holder.entered += 1
        session.set_aside(held)
        assert [*tmp_path.glob("v00000000/rank0/*")] == [], "what is of an older generation is nobody's"
        keep(session, 0, {"x": torch.full((4,), 2.0)})
        session.set_aside(held)
        assert len([*tmp_path.glob("v00000000/rank0/*")]) == 1, "what is of this one stays"
    assert heirs.is_dir()
    assert list(tmp_path.glob("v*/.former-*")) == []
    assert capsys.readouterr().err == ""
    assert torch.equal(load(tmp_path, 0)["x"], torch.full((4,), 2.0))


@pytest.mark.parametrize("told", ["by nobody", "while it asks", "before"])
def test_a_zombie_sets_nothing_of_its_heir_aside(tmp_path: Path, told: str) -> None:
    """It was paused before it looked at what was there, and has a job's first checkpoint to save."""
    holder = Holding(entered=1, fenced=told == "before")
    zombie = CheckpointStore(tmp_path, 0, holder)
    heirs = [shard_of(tmp_path, {"x": torch.zeros(4)}, version=v, generation=2) for v in (0, 10)]

    def asked() -> None:
        if told == "by nobody":
            raise Fenced("another one has it")
        holder.fenced = True

    if told == "by nobody":
        with pytest.raises(Fenced):
            zombie.set_aside(asked)
    else:
        zombie.set_aside(asked)
    assert all(shard.is_dir() for shard in heirs)


def test_what_an_heir_saves_beside_it_stays_where_it_is(tmp_path: Path) -> None:
    """It is paused behind the question, while its heir begins."""
    old = shard_of(tmp_path, {"x": torch.zeros(4)}, generation=9)
    heirs: list[Path] = []
    store = store_of(tmp_path, generation=1)

    def asked() -> None:
        store_of(tmp_path, generation=2).set_aside(held)
        heirs.append(shard_of(tmp_path, {"x": torch.ones(4)}, generation=2))

    store.set_aside(asked)
    assert [shard.is_dir() for shard in heirs] == [True]
    assert len(list(tmp_path.glob(f"v*/.former-*-rank0/{old.name}"))) == 1
    assert len(list(tmp_path.glob("v*/.former-*"))) == 1


def test_a_link_in_the_way_is_set_aside_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "v00000001").mkdir()
    (tmp_path / "v00000001" / "rank0").symlink_to(elsewhere)
    store_of(tmp_path).set_aside(held)
    (link,) = tmp_path.glob("v00000001/.former-*-rank0")
    assert link.resolve() == elsewhere
    assert shard_of(tmp_path, {"x": torch.ones(4)}, generation=1).is_dir()
