"""What a plan says of the time that its replays take, and so of how many ranks help. Pure.

Where the costs of a stage are not known nothing is predicted, and as many help as are configured and can.
"""

from collections.abc import Iterable, Mapping, Sequence

from swift.recovery.assignment import Assignment
from swift.recovery.cost import StageCost, fewest, of_rank, step_s
from swift.recovery.decision import Help, Plan, Prediction, RankPlan

Costs = Mapping[int, StageCost]
"""By stage."""


class Predictor:
    """(helps) ``wanted``; (plan) ``of``."""

    def __init__(self, ranks: Sequence[RankPlan], target: int, assignment: Assignment, costs: Costs) -> None:
        self._plans = {rank_plan.rank: rank_plan for rank_plan in ranks}
        self._target, self._assignment, self._costs = target, assignment, costs

    def wanted(
        self, spans: Mapping[tuple[int, ...], int], at_most: int, free: int
    ) -> dict[tuple[int, ...], int]:
        """How many copies of the ranks that replay together make the recovery shortest; `spans`: up to which version
        they can help. Nothing, if that is not known of all of them."""
        seconds = {}
        for owners, until in spans.items():
            most = min(at_most, free // len(owners))
            options = [self._seconds(owners, until, 1 + n) for n in range(most + 1)]
            seconds[owners] = [option_s for option_s in options if option_s is not None]
            if not seconds[owners]:
                return {}
        return fewest(seconds, free)

    def of(self, help: Iterable[Help]) -> tuple[Prediction, ...]:
        """Of each replay whose costs are known."""
        helped = {shared.owner: shared for shared in help}
        predictions = []
        for rank, rank_plan in sorted(self._plans.items()):
            shared = helped.get(rank)
            workers, until = (
                (1 + len(shared.helpers), shared.until) if shared is not None else (1, self._target)
            )
            owners = shared.together if shared is not None and shared.together else (rank,)
            steps = self._target - rank_plan.from_version
            seconds = self._seconds(owners, until, workers) if steps > 0 else None
            if seconds is not None:
                alone = self._seconds(owners, self._target, 1)
                predictions.append(
                    Prediction(
                        rank=rank, workers=workers, steps=steps, seconds=seconds, alone_s=alone or seconds
                    )
                )
        return tuple(predictions)

    def _seconds(self, owners: Sequence[int], until: int, workers: int) -> float | None:
        """Of a replay that `workers` ranks share up to the version `until`; None: it is not known."""
        run = self._replayed_beside(owners)
        if not run or any(
            stage not in self._costs for rank in run for stage in self._assignment.stages[rank]
        ):
            return None
        begun = self._plans[owners[0]].from_version
        shared = max(0, until - begun) if workers > 1 else 0
        own, together = ([self._cost(rank) for rank in ranks] for ranks in (owners, run))
        return shared * step_s(own, workers) + (self._target - begun - shared) * step_s(together)

    def _cost(self, rank: int) -> StageCost:
        return of_rank([self._costs[stage] for stage in self._assignment.stages[rank]])

    def _replayed_beside(self, owners: Sequence[int]) -> list[int]:
        """They, and the ranks on both sides of their stages that replay without a gap. Nobody: it is not known how long
        these take together (ranks of several stages feed each other in circles)."""

        def replays(stage: int) -> int | None:
            ranks = self._assignment.holders(stage) if 0 <= stage < self._assignment.num_stages else ()
            return next((rank for rank in ranks if self._plans[rank].from_version < self._target), None)

        together = list(owners)
        for rank in together:
            for stage in self._assignment.stages[rank]:
                beside = {replays(stage - 1), replays(stage + 1)} - {None, *together}
                together += [other for other in beside if other is not None]
        alone = set(together) == set(owners) and len(owners) == 1
        if not alone and any(len(self._assignment.stages[rank]) != 1 for rank in together):
            return []
        return together if all(self._assignment.stages[rank] for rank in together) else []


def predicted_words(plan: Plan, possible: Iterable[int]) -> list[str]:
    """For people. `possible`: the ranks that could have been helped."""
    lines = []
    for prediction in plan.predictions:
        steps = f"{prediction.steps} step{'' if prediction.steps == 1 else 's'}"
        line = f"rank {prediction.rank} replays {steps} in {prediction.seconds:.3g} s"
        if prediction.workers > 1:
            line += f", {prediction.workers} ranks; alone in {prediction.alone_s:.3g} s"
        elif prediction.rank in possible:
            line += ": with help nobody would be back sooner"
        lines.append(line)
    return lines
