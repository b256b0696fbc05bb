"""A step is a list of participants: the parts of a rank that take part in its steps and recoveries.

`swift_ft.train.session` makes the list, in the order in which each method is called; a participant is in it only if a
setting asks for it. What every step has (the boundary log, the trainer's state, its updates) is no participant:
`swift_ft.train.step` names it.

::

    (before any step)  check
    (a step)           before_step → begin_step → state kept → step_begun → trainer's function → updates applied
                       → end_step → state of the next version → after_step
    (a failure)        drop_step; PLANNING: offer; RECOVERING: by the strategies; RUNNING: resume
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.process_groups import ProcessGroups
from swift_ft.planner import Assignment
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.train.boundary_log import Channel
from swift_ft.train.config import SessionConfig
from swift_ft.train.coordinator_session import Member
from swift_ft.train.fault_points import FaultInjector
from swift_ft.train.step_digests import Witness
from swift_ft.train.training_state import TrainerState
from swift_ft.train.updates import Standing

if TYPE_CHECKING:
    from swift_ft.train.snapshots import Snapshots
    from swift_ft.train.staggering import Staggering

TrainStep = Callable[[int], object]


@dataclass(kw_only=True, slots=True)
class Step:
    """A step of the trainer on one rank."""

    number: int
    replaying: bool
    due: bool
    """A checkpoint of the version after it is due."""
    train: TrainStep
    """The trainer's function, for participants that also run it for other ranks."""
    drop: Callable[[], None]
    """Restores the state of the step's begin."""
    wait_vote: Callable[[], None]
    """Waits until the step can no longer be taken back by a vote, before its result is saved or compared."""
    by_all: bool = False
    """(after_step) All ranks are at this place: the step was neither replayed nor finished in a recovery."""

    @property
    def version(self) -> int:
        """The version after the step."""
        return self.number + 1


class Copied(NamedTuple):
    """Source of a process's state that was copied from replicas."""

    version: int
    witnesses: tuple[int, ...]
    """Ranks that hold the same state and have logged all of their steps."""


@dataclass(kw_only=True)
class Site:
    """What every rank consists of. Its other parts and its strategies work on it."""

    rank: int
    config: SessionConfig
    assignment: Assignment
    """The full world's."""
    member: Member
    communicator: ProcessGroups
    world: ReconfigurableGroup
    """All ranks, for the session itself."""
    channel: Channel
    state: TrainerState
    store: CheckpointStore
    faults: FaultInjector
    witness: Witness
    snapshots: "Snapshots | None" = None
    """(only if the settings ask for it)"""
    staggering: "Staggering | None" = None
    """(only if the settings ask for it)"""
    generation: int = 0
    """Generation of the plan that is carried out."""
    copied: Copied | None = None
    """Source of this process's state if it was copied, until the log's gaps are declared."""
    flushed: bool = True
    """Set if all records of this process were in the log when it reported."""


class Participant:
    """A part of a rank that takes part in its steps. Called by the trainer's thread. The methods here do nothing."""

    def check(self) -> None:
        """(all parts of the trainer are registered) Raises UsageError if the trainer does not fit."""

    def before_step(self, step: Step) -> None:
        """(all ranks at the same step) Nothing of the step is recorded yet."""

    def begin_step(self, step: Step) -> None:
        """The step begins; the state of its begin is not kept yet."""

    def step_begun(self, step: Step) -> None:
        """The state of the step's begin is kept; the trainer's function is called next."""

    def communicated(self, step: int, *, of_pipeline: bool) -> None:
        """(in a step) The trainer calls a collective. `of_pipeline`: over the ranks of a pipeline. May raise
        UsageError."""

    def scheduled(self) -> None:
        """(in a step) A schedule is called. May raise UsageError."""

    def before_reduction(self) -> None:
        """(in a step) The reduction of gradients begins: they are still this rank's own."""

    def end_step(self, step: Step) -> None:
        """The trainer's function has returned and its updates are applied; the state is still of `step.number`."""

    def after_step(self, step: Step) -> None:
        """The state is of `step.version`."""

    def drop_step(self) -> None:
        """The step is dropped; the state of its begin is restored next."""

    def wait_vote(self) -> None:
        """Waits for a vote that is still under way. Raises the error that takes its step back."""

    def committed(self, version: int) -> int:
        """Returns the newest version that all ranks have or will reach. `version`: this rank's."""
        return version

    def offer(self, own: Standing) -> Standing:
        """(PLANNING) Returns this rank's recovery offer. `own`: the offer without this participant."""
        return own

    def resume(self, *, at_start: bool) -> None:
        """(RUNNING) All ranks go on from one version. `at_start`: the job begins."""
