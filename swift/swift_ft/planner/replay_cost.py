"""Predicted times of a plan's replays, and the number of helpers that follows from them; and the time that a job waits
for a replacement process. Pure.

Without known costs of a stage there is no prediction, and as many ranks help as are configured and able.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.planner.assignment import Assignment
from swift_ft.planner.decision import Help, Plan, Prediction, RankPlan
from swift_ft.planner.groups import RecoveryGroups

# Predicted time of a replay, and the number of ranks for which it is shortest.
#
# Formulas (4) to (6) of docs/planning.md, for the line of docs/replay.md. Neighbouring stages that replay together, or
# one alone, whose M microbatches d ranks share. t: seconds of a stage for a microbatch; u: its update; G: bytes of its
# weights, and as many of gradients; b: a bucket; V: bytes that it reads per step:
#
#     step(d) = max(sum(t) + (ceil(M / d) - 1) max(t) + max(u) + line(d), max(V) / B_log)
#     line(d) = 2 (G + (d - 2) b) / B_link if d > 1, else 0
#
# Without a measurement a link is assumed to have LINK_BYTES_PER_S. A log of which hardly anything was read is assumed
# to cause no wait.

LINK_BYTES_PER_S = 1e9
"""Assumed rate between two ranks: the usable part of 10 Gbit/s."""
BUCKET_BYTES = 4 << 20
"""Bytes of a bucket of the line (`swift_ft.train.gradient_chain`)."""
READ_BYTES_MIN = 8 << 20
"""Fewest bytes read for a valid rate; with fewer, the wait shows the latency of the log rather than its rate."""
_EQUAL = 1 + 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """Costs of one stage, as measured during training."""

    microbatches: int
    microbatch_s: float
    """Seconds of forward and backward of one microbatch."""
    update_s: float = 0.0
    """Seconds of a step outside of its microbatches."""
    weight_bytes: int = 0
    read_bytes: int = 0
    """Bytes read from the log per step."""
    log_bytes_per_s: float = math.inf


def of_rank(stages: Sequence[StageCost]) -> StageCost:
    """Returns the costs of a rank with several stages: it computes them sequentially and updates them together."""
    first, *more = stages
    return (
        replace(
            first,
            microbatch_s=sum(stage.microbatch_s for stage in stages),
            weight_bytes=sum(stage.weight_bytes for stage in stages),
            read_bytes=sum(stage.read_bytes for stage in stages),
        )
        if more
        else first
    )


def step_s(costs: Sequence[StageCost], workers: int = 1, link_bytes_per_s: float = LINK_BYTES_PER_S) -> float:
    """Returns the seconds of a step of neighbouring stages that replay together, each shared by `workers` ranks."""
    largest = -(-max(cost.microbatches for cost in costs) // workers)
    took = sum(cost.microbatch_s for cost in costs)
    took += (largest - 1) * max(cost.microbatch_s for cost in costs) + max(cost.update_s for cost in costs)
    if workers > 1:
        weights = max(cost.weight_bytes for cost in costs)
        took += 2 * (weights + (workers - 2) * min(BUCKET_BYTES, weights)) / link_bytes_per_s
    return max([took, *(cost.read_bytes / cost.log_bytes_per_s for cost in costs)])


def fewest(seconds: Mapping[int, Sequence[float]], free: int) -> dict[int, int]:
    """Returns owner -> the number of ranks that help it, of `free` ranks. `seconds`: of each, its replay with 0, 1, 2 …
    helpers.

    All ranks wait for the longest replay. It is made as short as possible, with the fewest helpers that achieve it.
    Help that does not shorten it is not used.
    """
    for limit in sorted({option_s for options in seconds.values() for option_s in options}):
        wanted = {
            owner: next((n for n, option_s in enumerate(options) if option_s <= limit * _EQUAL), None)
            for owner, options in seconds.items()
        }
        chosen = {owner: count for owner, count in wanted.items() if count is not None}
        if len(chosen) == len(seconds) and sum(chosen.values()) <= free:
            return chosen
    return dict.fromkeys(seconds, 0)


def costs_of(measured: Mapping[int, pb.RankMeasured], groups: RecoveryGroups) -> dict[int, StageCost]:
    """Returns stage -> its replay costs, where measured."""
    rate = _read_rate(measured)
    arriving: dict[int, int] = {}
    for rank in measured.values():
        for stage in rank.stages:
            here = {other.stage for other in rank.stages}
            for sent in stage.sent:
                if sent.destination not in here and groups.crosses(stage.stage, sent.destination):
                    arriving[sent.destination] = arriving.get(sent.destination, 0) + sent.bytes
    return {
        stage.stage: StageCost(
            microbatches=rank.microbatches,
            microbatch_s=stage.forward_s + stage.backward_s,
            update_s=rank.update_s,
            weight_bytes=stage.gradient_bytes,
            read_bytes=arriving.get(stage.stage, 0),
            log_bytes_per_s=rate,
        )
        for rank in measured.values()
        for stage in rank.stages
        if rank.microbatches
    }


def _read_rate(measured: Mapping[int, pb.RankMeasured]) -> float:
    """Returns the rate at which replays have read from the log: all their bytes over all their waits."""
    size = sum(rank.log_read_bytes for rank in measured.values())
    waited_s = sum(rank.log_read_wait_s for rank in measured.values())
    return size / waited_s if size >= READ_BYTES_MIN and waited_s > 0 else math.inf


Costs = Mapping[int, StageCost]
"""Costs by stage."""


class Predictor:
    """Predicts replay times: ``wanted`` for `helps`, ``of`` for `plan`."""

    def __init__(self, ranks: Sequence[RankPlan], target: int, assignment: Assignment, costs: Costs) -> None:
        self._plans = {rank_plan.rank: rank_plan for rank_plan in ranks}
        self._target, self._assignment, self._costs = target, assignment, costs

    def wanted(self, spans: Mapping[int, int], at_most: int, free: int) -> dict[int, int]:
        """Returns the number of helpers, for each rank that replays, that makes the recovery shortest; empty if a
        replay's time is unknown. `spans`: the version up to which each may be helped."""
        seconds = {}
        for owner, until in spans.items():
            options = [self._seconds(owner, until, 1 + n) for n in range(min(at_most, free) + 1)]
            seconds[owner] = [option_s for option_s in options if option_s is not None]
            if not seconds[owner]:
                return {}
        return fewest(seconds, free)

    def of(self, help: Iterable[Help]) -> tuple[Prediction, ...]:
        """Returns a prediction for each replay whose costs are known."""
        helped = {shared.owner: shared for shared in help}
        predictions = []
        for rank, rank_plan in sorted(self._plans.items()):
            shared = helped.get(rank)
            workers, until = (
                (1 + len(shared.helpers), shared.until) if shared is not None else (1, self._target)
            )
            steps = self._target - rank_plan.from_version
            seconds = self._seconds(rank, until, workers) if steps > 0 else None
            if seconds is not None:
                alone = self._seconds(rank, self._target, 1)
                predictions.append(
                    Prediction(
                        rank=rank, workers=workers, steps=steps, seconds=seconds, alone_s=alone or seconds
                    )
                )
        return tuple(predictions)

    def _seconds(self, owner: int, until: int, workers: int) -> float | None:
        """Returns the seconds of a replay that `workers` ranks share up to the version `until`; None: unknown."""
        run = self._replayed_beside(owner)
        if not run or any(
            stage not in self._costs for rank in run for stage in self._assignment.stages[rank]
        ):
            return None
        begun = self._plans[owner].from_version
        shared = max(0, until - begun) if workers > 1 else 0
        alone_s = step_s([self._cost(rank) for rank in run])
        return shared * step_s([self._cost(owner)], workers) + (self._target - begun - shared) * alone_s

    def _cost(self, rank: int) -> StageCost:
        return of_rank([self._costs[stage] for stage in self._assignment.stages[rank]])

    def _replayed_beside(self, owner: int) -> list[int]:
        """Returns the owner and the ranks on both sides of its stages that replay without a gap. Empty: their joint
        time is unknown (ranks with several stages feed each other in cycles)."""

        def replays(stage: int) -> int | None:
            ranks = self._assignment.holders(stage) if 0 <= stage < self._assignment.num_stages else ()
            return next((rank for rank in ranks if self._plans[rank].from_version < self._target), None)

        together = [owner]
        for rank in together:
            for stage in self._assignment.stages[rank]:
                beside = {replays(stage - 1), replays(stage + 1)} - {None, *together}
                together += [other for other in beside if other is not None]
        if len(together) > 1 and any(len(self._assignment.stages[rank]) != 1 for rank in together):
            return []
        return together if all(self._assignment.stages[rank] for rank in together) else []


def predicted_words(plan: Plan) -> list[str]:
    lines = []
    for prediction in plan.predictions:
        steps = f"{prediction.steps} step{'' if prediction.steps == 1 else 's'}"
        line = f"rank {prediction.rank} replays {steps} in {prediction.seconds:.3g} s"
        if prediction.workers > 1:
            line += f", {prediction.workers} ranks; alone in {prediction.alone_s:.3g} s"
        lines.append(line)
    return lines


# The time that a job waits for a process that may take a lost rank's place, before the others go on without it.
#
# It is unknown when such a process comes. Waiting costs the time until then. Going on costs two more generations (one
# now, and one when a process has come), and slower steps until then. The rule is that of renting or buying (Karlin,
# Manasse, Rudolph, Sleator 1988: "Competitive snoopy caching"): wait until waiting has cost as much as going on at once
# would have cost until then. Whenever the process comes, at most twice the least possible time is lost.

GENERATION_S = 0.5
"""Seconds for all ranks to stop, agree and reconnect, without copying a state. `swift-ft drill` prints the measured
time; on two cores it is 0.2 to 0.4 s."""
COPY_BYTES_PER_S = 1e9
"""Assumed rate at which a replica's state is copied to another rank."""


def worth_waiting_s(measured: Iterable[pb.RankMeasured], *, replicas: int, reroutes: bool) -> float | None:
    """Returns the seconds to wait for a replacement; None: no rank has measured its steps yet. `replicas`: of each
    stage, in a full world. `reroutes`: the peers of a lost rank share its microbatches; else one of them computes its
    whole batch."""
    known = list(measured)
    if not known:
        return None
    return two_generations_s(known) * slower(replicas, reroutes=reroutes)


def two_generations_s(known: Sequence[pb.RankMeasured]) -> float:
    """Returns the seconds that it costs to go on without a rank and to take one back. `known`: at least one rank's."""
    step_s = max(rank.step_s for rank in known)
    copy_s = max(rank.state_bytes for rank in known) / COPY_BYTES_PER_S
    stall_s = max(rank.checkpoint_stall_s for rank in known)
    # Each generation interrupts a step. After the second one a checkpoint is saved, because the log lacks steps.
    return 2 * (GENERATION_S + step_s) + copy_s + stall_s


def quickest(pipeline_ranks: int, replicas: int) -> str:
    """Returns the `lost_shard` with the shortest steps while a rank is missing (`slower`)."""
    return "reroute" if pipeline_ranks > 1 and replicas > 1 else "redistribute"


def slower(replicas: int, *, reroutes: bool) -> float:
    """Returns the factor, at best, by which a step takes longer while one rank is missing. A second of such training
    then costs a second of waiting, less the training done in it."""
    return replicas / (replicas - 1) if reroutes and replicas > 1 else 2.0
