"""How many ranks share a replay: the formulas, the choice, and what a plan says of both."""

import itertools
import math
import random
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.planner import (
    Assignment,
    Help,
    Plan,
    PlanConfig,
    RecoveryGroups,
)
from swift_ft.planner.plan import plan
from swift_ft.planner.replay_cost import (
    BUCKET_BYTES,
    LINK_BYTES_PER_S,
    READ_BYTES_MIN,
    StageCost,
    costs_of,
    fewest,
    step_s,
)
from tests.unit.recovery.planned import full_log, measured, mesh, reports

MB = 1_000_000
FREE_LINK = 1e30


class TestAStep:
    def test_alone(self) -> None:
        cost = StageCost(microbatches=7, microbatch_s=0.5, update_s=0.25, weight_bytes=10**12)
        assert step_s([cost]) == 7 * 0.5 + 0.25

    @pytest.mark.parametrize(("workers", "largest"), [(2, 4), (3, 3), (4, 2), (6, 2), (7, 1), (9, 1)])
    def test_the_largest_share_counts(self, workers: int, largest: int) -> None:
        cost = StageCost(microbatches=7, microbatch_s=0.5, update_s=0.25, weight_bytes=10**9)
        assert step_s([cost], workers, FREE_LINK) == pytest.approx(largest * 0.5 + 0.25)

    def test_weights_down_and_gradients_up_a_bucket_for_each_hop_more(self) -> None:
        cost = StageCost(microbatches=12, microbatch_s=0.0, weight_bytes=500 * MB)
        assert step_s([cost], 2) == 2 * 500 * MB / LINK_BYTES_PER_S
        assert step_s([cost], 4) == 2 * (500 * MB + 2 * BUCKET_BYTES) / LINK_BYTES_PER_S
        small = StageCost(microbatches=12, microbatch_s=0.0, weight_bytes=1000)
        assert step_s([small], 4, 1000.0) == 2 * 3000 / 1000

    def test_no_quicker_than_the_log(self) -> None:
        cost = StageCost(microbatches=4, microbatch_s=1.0, read_bytes=300, log_bytes_per_s=100.0)
        assert step_s([cost]) == 4.0
        assert step_s([cost], 2) == 3.0
        assert step_s([cost], 4) == 3.0

    def test_neighbours_that_replay_together_are_a_pipeline(self) -> None:
        slow = StageCost(microbatches=4, microbatch_s=2.0, update_s=0.5)
        quick = StageCost(microbatches=4, microbatch_s=1.0, update_s=1.0)
        assert step_s([slow, quick, quick]) == (2 + 1 + 1) + 3 * 2 + 1
        assert step_s([slow, quick], 2, FREE_LINK) == pytest.approx((2 + 1) + 1 * 2 + 1)


class TestHowManyHelp:
    def test_without_a_replay(self) -> None:
        assert fewest({}, 3) == {}

    @pytest.mark.parametrize("seed", range(30))
    def test_against_every_choice_there_is(self, seed: int) -> None:
        draw = random.Random(seed)
        free = draw.randint(0, 5)
        owners = range(draw.randint(1, 3))
        seconds = {one: [float(draw.randint(1, 6)) for _ in range(1 + free)] for one in owners}
        choices = [
            dict(zip(owners, counts, strict=True))
            for counts in itertools.product(*(range(len(seconds[one])) for one in owners))
        ]
        possible = [choice for choice in choices if sum(choice.values()) <= free]

        def slowest(choice: dict[int, int]) -> float:
            return max(seconds[one][n] for one, n in choice.items())

        best = min(slowest(choice) for choice in possible)
        chosen = fewest(seconds, free)
        assert chosen in possible
        assert slowest(chosen) == best
        assert sum(chosen.values()) == min(sum(c.values()) for c in possible if slowest(c) == best)


def changed(measured: pb.RankMeasured, **by: Any) -> pb.RankMeasured:
    """More stages, or other numbers."""
    made = pb.RankMeasured.FromString(measured.SerializeToString())
    made.MergeFrom(pb.RankMeasured(**by))
    return made


class TestWhatWasMeasured:
    def test_of_each_stage(self) -> None:
        costs = costs_of(measured(4, weights=77), RecoveryGroups())
        assert sorted(costs) == [0, 1, 2, 3]
        assert costs[1].microbatch_s == pytest.approx(0.3)
        assert (costs[1].microbatches, costs[1].update_s, costs[1].weight_bytes) == (8, 0.1, 77)
        assert [costs[stage].read_bytes for stage in range(4)] == [1000, 2000, 2000, 1000]
        assert costs[1].log_bytes_per_s == math.inf

    def test_what_passes_inside_a_group_is_not_read(self) -> None:
        costs = costs_of(measured(4), RecoveryGroups.parse("0,1-2,3"))
        assert [costs[stage].read_bytes for stage in range(4)] == [1000, 1000, 1000, 1000]

    def test_what_a_rank_sends_to_itself_is_not_read(self) -> None:
        said = measured(4)
        both = {0: said[0], 1: changed(said[1], stages=said[2].stages), 3: said[3]}
        costs = costs_of(both, RecoveryGroups())
        assert [costs[stage].read_bytes for stage in range(4)] == [1000, 1000, 1000, 1000]

    def test_the_rate_of_the_log_is_what_replays_have_got_for_their_waits(self) -> None:
        said = measured(3)
        said[1] = measured(3, read_s=4.0)[1]
        said[2] = measured(3, read_s=12.0)[2]
        rates = {cost.log_bytes_per_s for cost in costs_of(said, RecoveryGroups()).values()}
        assert rates == {2 * READ_BYTES_MIN / 16.0}

    def test_a_few_bytes_tell_no_rate(self) -> None:
        said = measured(3)
        said[1] = changed(said[1], log_read_bytes=READ_BYTES_MIN - 1, log_read_wait_s=99.0)
        assert {cost.log_bytes_per_s for cost in costs_of(said, RecoveryGroups()).values()} == {math.inf}


def planned(known: dict[int, pb.RankMeasured], words: str, helpers: int = 3, groups: str = "") -> Plan:
    """`words`: what ranks report."""
    said = reports(words)
    assignment = mesh(len(said))
    config = PlanConfig(helpers=helpers, groups=RecoveryGroups.parse(groups))
    log = full_log(assignment, 0, 14, config.groups)
    outcome, reason = plan(said, assignment, log, (5,), config, measured=known)
    assert outcome is not None, reason
    assert outcome.reason == reason
    return outcome


class TestAPlan:
    def test_says_who_helps_and_what_that_makes_of_it(self) -> None:
        outcome = planned(measured(6), "15 15 - 15 15 15")
        (help,) = outcome.help
        assert len(help.helpers) == 3
        (one,) = outcome.predictions
        assert (one.rank, one.workers, one.steps) == (2, 4, 10)
        assert one.seconds == pytest.approx(10 * (2 * 0.3 + 0.1))
        assert one.alone_s == pytest.approx(10 * (8 * 0.3 + 0.1))
        assert outcome.reason.endswith(
            "ranks 1, 3, 0 to help rank 2 up to version 15; rank 2 replays 10 steps in 7 s, 4 ranks; alone in 25 s"
        )

    def test_no_more_than_make_it_shorter(self) -> None:
        """Of eight microbatches five ranks compute two at most, as four do."""
        (help,) = planned(measured(6), "15 15 - 15 15 15", helpers=5).help
        assert len(help.helpers) == 3

    def test_nobody_if_weights_and_gradients_cost_more_than_is_saved(self) -> None:
        """alone 2.5 s; two: 1.3 s + 2 G / B; four: 0.7 s + 2 G / B and two hops more."""
        heavy = int(1.5 * LINK_BYTES_PER_S)
        outcome = planned(measured(6, weights=heavy), "15 15 - 15 15 15")
        assert outcome.help == ()
        assert outcome.predictions[0].workers == 1
        assert outcome.reason.endswith("rank 2 replays 10 steps in 25 s")

    def test_fewer_if_the_log_is_the_limit(self) -> None:
        """1.3 s with two ranks, 0.7 s with four; but 2000 bytes take 1.5 s."""
        (help,) = planned(measured(6, read_s=1.5 / 2000 * READ_BYTES_MIN), "15 15 - 15 15 15").help
        assert len(help.helpers) == 1

    def test_as_many_as_may_where_nothing_was_measured(self) -> None:
        outcome = planned({}, "15 15 - 15 15 15", helpers=4)
        assert outcome.help == (Help(owner=2, helpers=(1, 3, 0, 4), until=15),)
        assert outcome.predictions == ()

    def test_as_many_as_may_where_one_of_the_replays_was_not_measured(self) -> None:
        said = measured(7)
        del said[0]
        outcome = planned(said, "- 15 15 - 15 15 15", helpers=5)
        assert sum(len(help.helpers) for help in outcome.help) == 5
        assert [one.rank for one in outcome.predictions] == [3]

    def test_two_replays_share_the_helpers_by_what_they_take(self) -> None:
        """Rank 1 takes 7 s with three. Rank 4 has fewer steps: three take longer than that alone, two do not."""
        outcome = planned(measured(6), "15 - 15 15 12 15", helpers=4)
        assert {help.owner: len(help.helpers) for help in outcome.help} == {1: 3, 4: 1}
        outcome = planned(measured(6), "15 - 15 15 13 15", helpers=4)
        assert {help.owner: len(help.helpers) for help in outcome.help} == {1: 3}

    def test_a_step_beside_a_neighbour_is_a_pipelines(self) -> None:
        """Rank 1 lags by a step, which ranks 1 and 2 do together."""
        outcome = planned(measured(4), "15 14 - 15")
        by_rank = {one.rank: one for one in outcome.predictions}
        together = 2 * 0.3 + 7 * 0.3 + 0.1
        assert by_rank[1].seconds == pytest.approx(together)
        workers = by_rank[2].workers
        assert workers == 3
        assert by_rank[2].seconds == pytest.approx(9 * (3 * 0.3 + 0.1) + together)
        assert "rank 1 replays 1 step in" in outcome.reason

    def test_a_rank_of_two_stages_computes_both(self) -> None:
        assignment = Assignment.from_reports(
            num_stages=6, stages={rank: (rank, rank + 3) for rank in range(3)}
        )
        said = measured(6)
        said = {rank: changed(said[rank], stages=said[rank + 3].stages) for rank in range(3)}
        log = full_log(assignment, 0, 14)
        outcome, _ = plan(reports("15 - 15"), assignment, log, (5,), PlanConfig(helpers=1), measured=said)
        assert outcome is not None
        (one,) = outcome.predictions
        assert (one.rank, one.workers) == (1, 2)
        assert one.seconds == pytest.approx(10 * (4 * 2 * 0.3 + 0.1))
        assert one.alone_s == pytest.approx(10 * (8 * 2 * 0.3 + 0.1))

    def test_a_group_is_a_pipeline(self) -> None:
        """Eight microbatches of 0.3 s through two stages, and 0.1 s; nobody helps."""
        outcome = planned(measured(6), "15 15 - - 15 15", groups="0-1,2-3,4-5")
        assert outcome.help == ()
        assert [(one.rank, one.workers) for one in outcome.predictions] == [(2, 1), (3, 1)]
        assert [one.seconds for one in outcome.predictions] == pytest.approx([10 * 2.8] * 2)

    def test_a_replay_that_could_not_be_helped_is_predicted_all_the_same(self) -> None:
        outcome = planned(measured(4), "15 15 - 15", helpers=0)
        assert outcome.help == ()
        assert outcome.reason.endswith("rank 2 replays 10 steps in 25 s")
