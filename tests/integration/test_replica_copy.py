"""A state is copied between real processes over gloo, and interrupted: by a call, and by a real SIGKILL."""

import json
from pathlib import Path
from typing import Any

from tests.integration.forked import Forked, Forks, Meeting
from tests.integration.replica_world import digest_of, make_state
from tests.patience import eventually

DEADLINE_S = 60.0


class World(Meeting):
    """Ranks, and what they have said."""

    def rank(self, rank: int, world: int, case: str) -> Forked:
        return self.start("tests.integration.replica_world", rank, world, self.place, case)

    def said(self, name: str, rank: int) -> dict[str, Any]:
        path = self.place / f"{name}-{rank}"
        eventually(path.exists, lambda: f"{path.name}, and not {list(self.place.iterdir())}", DEADLINE_S)
        return dict(json.loads(path.read_text()))


def test_a_copy_that_is_called_off_writes_nothing_more(tmp_path: Path, forks: Forks) -> None:
    with World(forks, tmp_path) as world:
        for rank in range(2):
            world.rank(rank, 2, "interrupted")
        assert world.said("failed", 1)["kind"] == "Interrupted"
        assert world.said("failed", 0)["kind"] == "RuntimeError"
        assert world.said("untouched", 1) == {"all": True}
        assert [process.wait(20) for process in world.started] == [0, 0]


def test_a_source_dies_and_another_one_takes_over(tmp_path: Path, forks: Forks) -> None:
    with World(forks, tmp_path) as world:
        for rank in range(3):
            world.rank(rank, 3, "source_dies")
        assert world.started[0].wait(60) == -9
        # Without a notice: it was in touch with the dead.
        assert world.said("failed", 2)["kind"] == "RuntimeError"
        world.rank(0, 3, "replacement")
        (tmp_path / "notice").touch()
        for joiner in (0, 2):
            assert world.said("received", joiner)["digest"] == digest_of(make_state(1))
        for rank in range(3):
            assert world.said("threads", rank) == {"names": ["MainThread"]}
        assert [process.wait(20) for process in world.started[1:]] == [0, 0, 0]
