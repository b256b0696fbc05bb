"""Parts of a session for tests: each with stand-ins, that do nothing, for what it needs."""

import os
from pathlib import Path
from typing import Any, cast

from swift_ft.device import Readings
from swift_ft.planner import Assignment
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.state.rng import Randomness
from swift_ft.train.boundary_log import Channel
from swift_ft.train.checkpointing import Saving, UnloggedSteps
from swift_ft.train.config import SessionConfig
from swift_ft.train.engine import Engine
from swift_ft.train.fault_points import FaultInjector
from swift_ft.train.log_session import OwnLog
from swift_ft.train.lossy import CutStep
from swift_ft.train.participants import Participant, Site, Step
from swift_ft.train.pipeline_collectives import Ties
from swift_ft.train.session import Session
from swift_ft.train.step import Ending, Lines
from swift_ft.train.step_digests import Witness
from swift_ft.train.training_state import TrainerState
from swift_ft.train.updates import Updates


class Still:
    """A channel that lends nothing."""

    replaying = False

    def __init__(self, rank: int) -> None:
        self.readings, self.faults = Readings(), FaultInjector(rank)

    def check(self) -> None: ...

    check_whole = check

    def wait_copied(self) -> None: ...


def ignored(*_: object, **__: object) -> None: ...


def updates_of(
    config: SessionConfig | None = None,
    reducer: Any = None,
    *,
    rank: int = 0,
    ties: Ties | None = None,
    cut_step: CutStep | None = None,
    channel: Any = None,
    vote: Any = ignored,
) -> Updates:
    """`vote`: called by the updates."""
    updates = Updates(
        config or SessionConfig(),
        reducer,
        cut_step=cut_step or CutStep(False, rank, reducer, cast(Any, ignored)),
        ties=ties or Ties(cast(Any, None), cast(Any, None)),
        channel=channel or Still(rank),
        votes=reducer is not None,
    )
    updates.vote, updates.before_update, updates.unreduced = vote, ignored, ignored
    updates.before_reduction = updates.reduced = ignored
    return updates


def channel_of(rank: int = 0, ranks: int = 4, store: Any = None) -> Channel:
    """A channel of a pipeline of `ranks`. `store`: returns the store for shapes."""
    faults = FaultInjector(rank)
    return Channel(rank, Assignment.grid(ranks), 3, faults, store, ignored, ignored, RecoveryGroups())


def session_of_nothing() -> Session:
    """A session of one rank without parts."""
    session = Session.__new__(Session)
    session.rank, session._assignment = 0, Assignment.grid(1)
    return session


def state_of(seed: int = 1, updates: Updates | None = None) -> TrainerState:
    return TrainerState(Randomness(seed, 0), updates or updates_of(), None)


class Unrecorded(Participant):
    """No step is recorded for a rehearsal."""

    under_way = False

    def abandon(self) -> None: ...

    def begins_at(self, _version: int, _view: Any, _generation: int) -> bool:
        return False


def step_of(number: int = 0, *, due: bool = False) -> Step:
    return Step(
        number=number,
        replaying=False,
        due=due,
        train=ignored,
        drop=ignored,
        wait_vote=ignored,
        by_all=True,
    )


def site_of(
    rank: int = 0,
    config: SessionConfig | None = None,
    *,
    member: Any = None,
    channel: Any = None,
    state: Any = None,
    store: Any = None,
    world: Any = None,
    communicator: Any = None,
    witness: Any = None,
) -> Site:
    return Site(
        rank=rank,
        config=config or SessionConfig(),
        assignment=Assignment.grid(4),
        member=member,
        communicator=communicator,
        world=world,
        channel=channel,
        state=state,
        store=store,
        faults=FaultInjector(rank),
        witness=witness or Witness(ignored, lambda: False, ignored),
    )


def engine_of(rank: int, config: SessionConfig, *, member: Any, channel: Any, state: Any) -> Engine:
    site = site_of(rank, config, member=member, channel=channel, state=state)
    recording, lines = cast(Any, Unrecorded()), Lines(Path(os.devnull))
    log = OwnLog(site)
    saving = Saving(site, recording)
    ending = Ending(site, saving)
    unlogged = UnloggedSteps(member, lambda: log.writer)
    return Engine(
        site,
        [recording, ending, lines, saving, unlogged],
        log=log,
        saving=saving,
        ending=ending,
        lines=lines,
        recording=recording,
    )
