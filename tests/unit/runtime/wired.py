"""Parts of a session for tests: each with stand-ins, that do nothing, for what it needs."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from swift_ft.planner import Assignment
from swift_ft.state.rng import Randomness
from swift_ft.train.config import SessionConfig
from swift_ft.train.engine import Engine
from swift_ft.train.fault_points import FaultInjector
from swift_ft.train.lossy import CutStep
from swift_ft.train.step import Lines
from swift_ft.train.step_digests import Witness
from swift_ft.train.tied_weights import Ties
from swift_ft.train.training_state import TrainerState
from swift_ft.train.updates import Lends, Updates


class Still:
    """A channel that lends nothing."""

    replaying = False

    def wait_copied(self) -> None: ...


def ignored(*_: object, **__: object) -> None: ...


def updates_of(
    config: SessionConfig | None = None,
    reducer: Any = None,
    *,
    rank: int = 0,
    ties: Ties | None = None,
    cut_step: CutStep | None = None,
    channel: Lends | None = None,
    vote: Any = ignored,
    before_update: Any = ignored,
    before_reduction: Any = ignored,
    reduced: Any = ignored,
    unreduced: Any = ignored,
) -> Updates:
    """`vote`, `before_update`, `before_reduction`, `reduced`, `unreduced`: None: the test binds it, or
    leaves it out."""
    updates = Updates(
        config or SessionConfig(),
        reducer,
        FaultInjector(rank),
        cut_step=cut_step or CutStep(False, rank, reducer, cast(Any, ignored)),
        ties=ties or Ties(cast(Any, None), cast(Any, None)),
        channel=channel or Still(),
        check=ignored,
        groups_whole=ignored,
    )
    if vote is not None:
        updates.vote.bind(vote)
    if before_update is not None:
        updates.before_update.bind(before_update)
    if before_reduction is not None:
        updates.before_reduction.bind(before_reduction)
    if reduced is not None:
        updates.reduced.bind(reduced)
    if unreduced is not None:
        updates.unreduced.bind(unreduced)
    return updates


def state_of(seed: int = 1, updates: Updates | None = None) -> TrainerState:
    return TrainerState(Randomness(seed, 0, None), updates or updates_of(), None)


class Unstaggered:
    """Every step waits for its vote."""

    committed = 0

    def __init__(self) -> None:
        self.lasts = SimpleNamespace(bind=ignored)
        self.wait_copied = self.wait_vote = self.begin_step = self.forget = self.agreed = self.clipped = (
            ignored
        )

    def blamed(self, error: Exception) -> Exception:
        return error

    def standing(self, own: Any) -> Any:
        return own

    def waits(self) -> bool:
        return True

    def take_back(self, _version: int) -> None:
        return None


class Unrecorded:
    """No step is recorded for a rehearsal."""

    under_way = False

    def __init__(self) -> None:
        self.begin = self.state_told = self.end = self.drop = self.abandon = ignored

    def begins_at(self, _version: int, _view: Any, _generation: int) -> bool:
        return False


class Nobody:
    """Who holds a rank by a line to the coordinator, and has nothing to say."""

    def interrupt(self, generation: int) -> None: ...

    def measured(self) -> None: ...

    def unsaved(self) -> None: ...


def engine_of(
    rank: int, config: SessionConfig, *, member: Any, channel: Any, state: Any, store: Any = None
) -> Engine:
    """Without a communicator, faults or groups."""
    nothing: Any = None
    return Engine(
        rank,
        config,
        member,
        nothing,
        channel,
        state,
        store,
        nothing,
        nothing,
        Assignment.grid(4),
        witness=Witness(ignored, lambda: False, ignored),
        adoption=cast(
            Any, SimpleNamespace(before=ignored, after=ignored, arm=ignored, check=ignored, repeats=True)
        ),
        audit=None,
        lines=Lines(Path(os.devnull)),
        staggering=cast(Any, Unstaggered()),
        recording=cast(Any, Unrecorded()),
    )
