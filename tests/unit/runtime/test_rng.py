from hypothesis import given
from hypothesis import strategies as st

from swift.runtime.rng import seed_for

GOLDEN = (1195769770526638388, 6442797892194084694)

coordinate = st.tuples(
    st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 2**20), st.integers(0, 2**20)
)


@given(coordinate, coordinate)
def test_every_coordinate_has_its_own_seed(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    assert (seed_for(*a) == seed_for(*b)) == (a == b)


@given(coordinate)
def test_seeds_fit_a_generator(a: tuple[int, ...]) -> None:
    assert 0 <= seed_for(*a) < 2**63


def test_seeds_never_change_between_versions() -> None:
    # A replay after an upgrade draws the same bits only if these stay.
    assert seed_for(0, 0, 0, 0) == GOLDEN[0]
    assert seed_for(7, 17, 2, 3) == GOLDEN[1]
