"""What groups cost: by hand, and against the formulas written down a second time."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.lab.plan.model import CostModel
from swift_ft.lab.plan.profile import Profile
from tests.unit.plan.profiles import (
    choices,
    costs,
    edge_bytes,
    group_s,
    overhead_s,
    profile,
    profiles,
    step_s,
)


def test_by_hand() -> None:
    """4 machines, M = 4, t = 3 s, K = 11: a step is (4 + 4 - 1) 3 s; w machines replay one in (4 + w - 1) 3 s."""
    model = CostModel(profile())
    assert model.step_s == 21.0
    assert [model.replay_step_s[0, w] for w in (1, 2, 3, 4)] == [12.0, 15.0, 18.0, 21.0]
    # Load 1 s, 5 steps on average, half a step that everybody does again.
    assert model.recovery_s[1, 2] == 1.0 + 5 * 12.0 + 10.5
    groups, found = model.groups((1, 3)), model.costs((1, 3))
    assert [group["machines"] for group in groups] == [[0, 1], [1, 3], [3, 4]]
    assert [group["probability"] for group in groups] == pytest.approx([0.25, 0.5, 0.25])
    assert found["recovery_s"] == pytest.approx(0.5 * 71.5 + 0.5 * (1.0 + 5 * 15.0 + 10.5))
    assert found["worst_recovery_s"] == 86.5
    assert found["logged"] == [0, 2]
    assert (found["bytes_per_step"], found["storage_bytes"]) == (400, 4400)
    assert model.means((1, 3), 0.0) == pytest.approx((11.5, 0.5 * 12 + 0.5 * 15))


def test_a_slow_log_is_what_a_replay_waits_for() -> None:
    """A group reads activations on its left and gradients on its right, not what it sends itself."""
    model = CostModel(
        profile(forward_bytes=(100, 200, 300), backward_bytes=(10, 20, 30), log_read_bytes_per_s=5.0)
    )
    assert model.replay_step_s[1, 2] == (100 + 20) / 5
    assert model.replay_step_s[0, 1] == 12.0  # 10 bytes are there in 2 s
    assert model.replay_step_s[3, 4] == 300 / 5


def test_a_measured_step_replaces_the_formula_of_the_schedule() -> None:
    model = CostModel(profile(step_s=40.0))
    assert model.step_s == 40.0
    assert model.recovery_s[0, 1] == 1.0 + 5 * 12.0 + 20.0


@settings(max_examples=50, deadline=None)
@given(profiles())
def test_every_group_costs_what_the_formulas_say(drawn: Profile) -> None:
    model = CostModel(drawn)
    assert model.step_s == pytest.approx(step_s(drawn))
    assert model.mtbf_s == pytest.approx(1 / sum(1 / mtbf for mtbf in drawn.machine_mtbf_s))
    for first, end in itertools.combinations(range(drawn.machines + 1), 2):
        expected, copies = group_s(drawn, first, end)
        assert model.recovery_s[first, end] == pytest.approx(expected)
        assert model.copies[first, end] == copies or model.recovery_s[first, end] == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(profiles(), st.data())
def test_predictions_are_sums_over_groups(drawn: Profile, data: st.DataObject) -> None:
    model = CostModel(drawn)
    cuts = data.draw(st.sampled_from(choices(drawn)))
    found, groups = model.costs(cuts), model.groups(cuts)
    size, recovery = costs(drawn, cuts)
    logged = size + drawn.other_bytes if cuts else 0
    assert found["bytes_per_step"] == logged
    assert found["storage_bytes"] == drawn.checkpoint_interval_steps * logged
    assert found["recovery_s"] == pytest.approx(recovery)
    assert found["overhead_s"] == pytest.approx(overhead_s(drawn, cuts))
    assert sum(group["probability"] for group in groups) == pytest.approx(1.0)
    assert size == sum(edge_bytes(drawn, cut) for cut in cuts)
    # What does not grow with the steps, and what does, make the whole.
    steps = (drawn.checkpoint_interval_steps - 1) / 2
    assert model.means(cuts, steps)[0] == pytest.approx(found["recovery_s"])
    stages = [stage for group in groups for stage in range(*group["stages"])]
    assert stages == list(range(drawn.stages))
