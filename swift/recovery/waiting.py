"""For how long a job waits for a process that may take a lost rank's place, before the others go on without it.

Nobody knows when one comes. To wait costs the time that it takes. To go on costs two more generations (one now, and one
when a process has come), and steps that take longer until then. The rule is that of renting or buying (Karlin, Manasse,
Rudolph, Sleator 1988: "Competitive snoopy caching"): wait until waiting has cost as much as going on at once would have
cost until then. Whenever the process comes, not more than twice the least possible time is lost.
"""

from collections.abc import Iterable, Sequence

from swift.recovery.measured import RankMeasured

GENERATION_S = 0.5
"""What all ranks take to stop, agree and connect again, without the copy of a state. `swift-ft drill` prints what it
took; on two cores it is 0.2 to 0.4 s."""
COPY_BYTES_PER_S = 1e9
"""At which a replica's state comes to another rank, if nobody has measured it."""


def worth_waiting_s(measured: Iterable[RankMeasured], *, replicas: int, reroutes: bool) -> float | None:
    """Seconds. None: no rank has measured its steps yet. `replicas`: of each stage, in a full world. `reroutes`: the
    peers of a lost rank share its microbatches; else one of them computes all of its batch."""
    known = list(measured)
    if not known:
        return None
    return two_generations_s(known) * slower(replicas, reroutes=reroutes)


def two_generations_s(known: Sequence[RankMeasured]) -> float:
    """What it costs to go on without a rank and to take one back. `known`: at least one rank's."""
    step_s = max(rank.step_s for rank in known)
    copy_s = max((rank.state_bytes or 0) for rank in known) / COPY_BYTES_PER_S
    stall_s = max((rank.checkpoint_stall_s or 0.0) for rank in known)
    # Each generation cuts a step short. Behind the second one a checkpoint is made: the log lacks steps.
    return 2 * (GENERATION_S + step_s) + copy_s + stall_s


def quickest(pipeline_ranks: int, replicas: int) -> str:
    """The `lost_shard` with which a step takes least while a rank is missing (`slower`)."""
    return "reroute" if pipeline_ranks > 1 and replicas > 1 else "redistribute"


def slower(replicas: int, *, reroutes: bool) -> float:
    """How many times as long a step takes while one rank is missing, at best. A second costs then what it costs to wait
    for a second, less what is trained in it."""
    return replicas / (replicas - 1) if reroutes and replicas > 1 else 2.0
