"""What the planner asks of a strategy."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from swift.recovery.types import FROM_CHECKPOINT, Report, Strategy


class Begins(enum.Enum):
    """With whose state a rank goes on."""

    OWN = "own"
    COPY = "copy"
    """Other ranks': they have, or get to, the version that is copied."""
    CHECKPOINT = "checkpoint"
    SNAPSHOT = "snapshot"
    """A copy in host memory, its own or one that another rank keeps."""


class Policy:
    """The planner's side of one strategy. Without state: there is one object of each class, in the table.

    A subclass names its strategy and overrides what is not so by default.
    """

    strategy: ClassVar[Strategy]
    begins: ClassVar[Begins] = Begins.OWN
    replays: ClassVar[bool] = False
    """It does nothing but replay. (The others are followed by a replay if they lead to an older version than the
    target.) Whoever refuses one of these refuses all of them."""
    rests: ClassVar[bool] = False
    """The rank holds the target: it has nothing to do but wait, and may help others meanwhile."""
    finishes_step: ClassVar[bool] = False
    """The step under way is finished, not dropped."""
    together: ClassVar[bool] = False
    """It is a way to a version only if all ranks of the group finish their step to it."""
    own_step: ClassVar[bool] = False
    """A rank that refuses it has lost the step under way, which says nothing of the others, unless it happens again."""
    goes_back: ClassVar[bool] = False
    """Planned for all ranks or for none: the run goes back to an older version, and what the log has beyond is given
    up. (`swift.recovery.going_back`)"""
    excluded_by: ClassVar[frozenset[str]] = FROM_CHECKPOINT
    """The settings of `PlanConfig.strategy` under which it is not used."""
    verb: ClassVar[str] = ""
    """Of a rank that others copy from, for people: "rank 1 <verb> version 7"."""

    noun: ClassVar[str] = ""
    """(of one that may not be bit for bit) For people: "<noun> of rank 1"."""

    def reach(self, report: Report) -> "Way | None":
        """How the rank gets to a version by itself, with what it reports; None: not in this way."""
        return None

    def share(
        self, own: Mapping[int, "Way"], replicas: Sequence[int], distance: Callable[[int, int], object]
    ) -> "Mapping[int, Way]":
        """(Begins.COPY) How each of the `replicas` gets to the version that the ranks of `own` reach by themselves; at
        least one does. `distance`: orders the ranks that another one can copy from, the nearest first."""
        raise AssertionError(f"{self.strategy} copies nothing")

    @property
    def behind(self) -> "Policy":
        """What it is called where the version that it leads to is older than the target."""
        return self

    def reason(self, report: Report, ways: "Mapping[int, Way]", target: int) -> str:
        """Why the rank does this, for people. `ways`: of all ranks of its stage group."""
        raise AssertionError(f"{self.strategy} is planned for all ranks at once, for one reason")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How one rank gets to a version, from where it may have to replay."""

    by: Policy
    version: int
    exact: bool = True
    sources: tuple[int, ...] = ()
    """(Begins.COPY) The ranks to copy from, the nearest first."""
    note: str = ""
    """What else there is to say of it."""


def held(report: Report) -> str:
    """What a rank has, for people."""
    if report.version is not None:
        return f"holds version {report.version}"
    return "holds no state" if report.newest is None else "is between two versions"
