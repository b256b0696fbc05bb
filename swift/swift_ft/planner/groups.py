"""Recovery groups: runs of neighbouring stages that fail and recover together.

Transfers between two stages of one group are not logged. If the state of one of them is lost, so that it must be
replayed, all of them go back to the same version and replay together, as a small pipeline: tensors that cross the
group's two ends come out of the log, the others from each other.

Written as the stages of each group, "0-1,2,3-5". Without groups (the empty text, or "none") every rank is a group by
itself, and everything sent from rank to rank is logged. One group of all stages has no log: it restores the
checkpoint.
"""

import itertools
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NONE = "none"
_RUN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class RecoveryGroups:
    """A division of the pipeline's stages into groups. Frozen and validated on construction."""

    starts: tuple[int, ...] = ()
    """The first stage of each group, ascending from 0. Empty: every rank is a group by itself."""
    num_stages: int = 0
    """Stages of the pipeline; 0 without groups."""

    def __post_init__(self) -> None:
        if self.starts:
            bounds = [*self.starts, self.num_stages]
            if bounds[0] != 0 or any(a >= b for a, b in itertools.pairwise(bounds)):
                raise ValueError(f"groups begin at {self.starts} of {self.num_stages} stages: ascend from 0")
        elif self.num_stages:
            raise ValueError("without groups no number of stages is given")

    @staticmethod
    def parse(text: str) -> "RecoveryGroups":
        """Parses the notation above. Raises ValueError, in one line, unless the runs follow each other from stage 0
        on."""
        if text.strip() in ("", NONE):
            return RecoveryGroups()
        starts, stage = [], 0
        for part in text.split(","):
            run = _RUN.fullmatch(part.strip())
            if run is None:
                raise ValueError(f"groups {text!r}: {part.strip()!r} is no run of stages (such as 0-1 or 2)")
            first, last = int(run[1]), int(run[2] or run[1])
            if first != stage or last < first:
                raise ValueError(
                    f"groups {text!r}: each run begins behind the one before, the first at stage 0; "
                    f"{part.strip()} does not begin at {stage}"
                    if first != stage
                    else f"groups {text!r}: {part.strip()} ends before it begins"
                )
            starts.append(first)
            stage = last + 1
        return RecoveryGroups(tuple(starts), stage)

    def __str__(self) -> str:
        return ",".join(
            f"{first}" if last == first else f"{first}-{last}" for first, last in map(self._ends, self.starts)
        )

    @property
    def logs(self) -> bool:
        """Returns whether anything is logged: there are at least two groups, or none are configured."""
        return len(self.starts) != 1

    def crosses(self, source: int, destination: int) -> bool:
        """Returns whether transfers from stage `source` to stage `destination` are logged."""
        return not self.starts or self._index(source) != self._index(destination)

    def stages(self, stage: int) -> tuple[int, ...]:
        """Returns the stages of the group of `stage`, ascending; without groups `stage` alone."""
        if not self.starts:
            return (stage,)
        first, last = self._ends(self.starts[self._index(stage)])
        return tuple(range(first, last + 1))

    def together(
        self, ranks: Sequence[tuple[int, ...]], stages: Mapping[int, Sequence[int]]
    ) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Returns the stage groups `ranks`, joined by recovery group. `stages`: the stages of each rank."""
        if not self.starts:
            return tuple((members,) for members in ranks)
        members_of: dict[int, list[tuple[int, ...]]] = {}
        for members in ranks:
            members_of.setdefault(self._index(stages[members[0]][0]), []).append(members)
        return tuple(tuple(members) for _, members in sorted(members_of.items()))

    def problem(self, num_stages: int, stages: Mapping[int, Sequence[int]]) -> str:
        """Returns why a pipeline cannot have these groups, in one line; empty if it can. `stages`: the stages of each
        rank."""
        if not self.starts:
            return ""
        if num_stages != self.num_stages:
            return f"groups {self} are of {self.num_stages} stages, the pipeline has {num_stages}"
        for rank, mine in sorted(stages.items()):
            if len({self._index(stage) for stage in mine}) > 1:
                return (
                    f"groups {self} part stages {_listed(mine)}, which are lost together with rank {rank}; schedules "
                    f"with several stages on a rank can have one group of all (0-{num_stages - 1}), or none"
                )
        return ""

    def _index(self, stage: int) -> int:
        return bisect_right(self.starts, stage) - 1

    def _ends(self, start: int) -> tuple[int, int]:
        following = self.starts.index(start) + 1
        return start, (self.starts[following] if following < len(self.starts) else self.num_stages) - 1


def _listed(stages: Sequence[int]) -> str:
    return " and ".join(map(str, stages))
