"""Parts of a session for tests: each with stand-ins, that do nothing, for what it needs."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from swift.recovery import Assignment
from swift.runtime.config import SessionConfig
from swift.runtime.cut_step import CutStep
from swift.runtime.differences import Differences
from swift.runtime.engine import Engine
from swift.runtime.faults import FaultInjector
from swift.runtime.lines import Lines
from swift.runtime.rng import Randomness
from swift.runtime.state import TrainerState
from swift.runtime.ties import Ties
from swift.runtime.updates import Lends, Updates
from swift.runtime.witness import Witness


class Still:
    """A channel that lends nothing."""

    replaying = False

    def settle(self) -> None: ...


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
) -> Updates:
    """`vote`, `before_update`, `before_reduction`, `reduced`: None: the test binds it, or leaves it out."""
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
    return updates


def state_of(seed: int = 1, updates: Updates | None = None) -> TrainerState:
    return TrainerState(Randomness(seed, 0, None), updates or updates_of(), None)


class Unstaggered:
    """Every step waits for its vote."""

    committed = 0

    def __init__(self) -> None:
        self.lasts = SimpleNamespace(bind=ignored)
        self.settle = self.begin_step = self.forget = self.agreed = self.clipped = ignored

    def blamed(self, error: Exception) -> Exception:
        return error

    def standing(self, own: Any) -> Any:
        return own

    def waits(self) -> bool:
        return True

    def take_back(self, _version: int) -> None:
        return None


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
        differences=Differences(nothing),
        adoption=cast(
            Any, SimpleNamespace(before=ignored, after=ignored, arm=ignored, check=ignored, repeats=True)
        ),
        audit=None,
        lines=Lines(Path(os.devnull)),
        staggering=cast(Any, Unstaggered()),
    )
