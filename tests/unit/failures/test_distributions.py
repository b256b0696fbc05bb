"""Failures that a seed draws: the same again, and with the rates that were asked for."""

import itertools
import math
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.fault_grammar import RankFault
from swift_ft.lab.failures.schedule import Drawn, hosts_of, parse_entry
from tests.unit.failures.drawn import any_distribution


def drawn(spec: str, ranks: int = 8, per_host: int = 1) -> list[RankFault]:
    entry = parse_entry(spec)
    assert isinstance(entry, Drawn)
    found = entry.faults(hosts_of(ranks, per_host))
    return [fault for fault in found if isinstance(fault, RankFault)]


@given(any_distribution(), st.integers(2, 16))
def test_the_same_seed_draws_the_same_failures(spec: str, ranks: int) -> None:
    assert drawn(spec, max(ranks, 6)) == drawn(spec, max(ranks, 6))


def test_these_are_the_failures_of_that_seed() -> None:
    """Of every Python and every machine: a schedule that is written down stays what it is."""
    spec = "every=weibull,mtbf=30,shape=0.6,seed=11,count=6,together=0.5"
    assert [(f.rank, f.step) for f in drawn(spec, ranks=4, per_host=2)] == GOLDEN


GOLDEN = [(2, 13), (3, 13), (3, 26), (2, 26), (1, 51), (0, 56), (1, 56), (2, 86)]


def test_another_seed_draws_others() -> None:
    specs = [f"every=exponential,mtbf=20,until=200,seed={seed}" for seed in range(20)]
    assert len({tuple(drawn(spec)) for spec in specs}) == 20


@given(st.integers(0, 10**6))
def test_a_longer_run_and_more_hosts_have_the_same_failures_and_more(seed: int) -> None:
    short, long = (drawn(f"every=exponential,mtbf=30,until={n},seed={seed}", ranks=4) for n in (40, 80))
    assert long[: len(short)] == short
    more = drawn(f"every=exponential,mtbf=30,until=40,seed={seed}", ranks=6)
    assert [fault for fault in more if fault.rank < 4] == short


def gaps(spec: str, ranks: int) -> list[float]:
    """Between the failures of each rank, in seconds."""
    times: dict[int, list[float]] = {}
    for fault in drawn(spec, ranks=ranks):
        assert fault.at_s is not None
        times.setdefault(fault.rank, [0.0]).append(fault.at_s)
    return [b - a for of_rank in times.values() for a, b in itertools.pairwise(of_rank)]


@pytest.mark.parametrize(
    ("law", "shape"), [("exponential", 1.0), ("weibull,shape=0.6", 0.6), ("weibull,shape=2", 2.0)]
)
def test_the_time_between_failures_has_the_mean_and_the_spread_of_its_law(law: str, shape: float) -> None:
    # By number, not until a time: long gaps would be cut off there.
    specs = [f"every={law},mtbf=10,unit=seconds,count=300,seed={seed}" for seed in range(40)]
    found = [gap for spec in specs for gap in gaps(spec, ranks=1)]
    mean, spread = statistics.fmean(found), statistics.pstdev(found)
    expected = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
    assert len(found) > 10_000
    assert mean == pytest.approx(10.0, rel=0.06)
    assert spread / mean == pytest.approx(expected, rel=0.06)


def test_lemons_fail_so_much_more_often() -> None:
    count: Counter[bool] = Counter()
    for seed in range(60):
        found = drawn(f"every=exponential,mtbf=200,until=400,seed={seed},lemons=1,lemon=10", ranks=4)
        by_rank = Counter(fault.rank for fault in found)
        for rank in range(4):
            count[by_rank[rank] == max(by_rank.values())] += by_rank[rank]
    # One of four at ten times the rate: three others together have three tenths of its failures.
    assert count[False] / count[True] == pytest.approx(0.3, abs=0.07)


@pytest.mark.parametrize(("together", "share"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_hosts_fail_together(together: float, share: float) -> None:
    whole = alone = 0
    for seed in range(80):
        spec = f"every=exponential,mtbf=50,until=200,unit=seconds,seed={seed},together={together:g}"
        at: dict[float | None, list[int]] = {}
        for fault in drawn(spec, ranks=4, per_host=2):
            at.setdefault(fault.at_s, []).append(fault.rank)
        whole += sum(len(ranks) == 2 and ranks[0] // 2 == ranks[1] // 2 for ranks in at.values())
        alone += sum(len(ranks) == 1 for ranks in at.values())
    assert whole / (whole + alone) == pytest.approx(share, abs=0.08)


def test_phase_any_draws_from_all_of_them() -> None:
    found = drawn("every=exponential,mtbf=4,until=200,phase=any,microbatches=3,seed=1")
    assert {fault.phase for fault in found} == {"forward", "backward", "optimizer", "idle"}
    assert {fault.microbatch for fault in found if fault.phase == "forward"} == {0, 1, 2}
