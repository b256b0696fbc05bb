"""Every microbatch is somebody's, in order, and nobody waits for a share that is larger than it must be."""

from hypothesis import given
from hypothesis import strategies as st

from swift_ft.train.shared_replay import shares, workers

counts = st.integers(1, 40)


@given(microbatches=counts, available=counts)
def test_every_microbatch_once_and_in_order(microbatches: int, available: int) -> None:
    each = shares(microbatches, workers(microbatches, available))
    assert [mb for share in each for mb in share] == list(range(microbatches))
    sizes = [len(share) for share in each]
    assert sizes == sorted(sizes, reverse=True)  # the last one is the owner
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[-1] >= 1


@given(microbatches=counts, available=counts)
def test_no_more_workers_than_make_it_quicker(microbatches: int, available: int) -> None:
    chosen = workers(microbatches, available)
    assert 1 <= chosen <= available
    largest = max(map(len, shares(microbatches, chosen)))
    assert largest == -(-microbatches // min(available, microbatches))
    assert chosen == 1 or max(map(len, shares(microbatches, chosen - 1))) > largest


def test_shares_of_eight() -> None:
    assert [workers(8, available) for available in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 3, 4, 4, 8, 8]
    assert shares(8, 3) == [range(3), range(3, 6), range(6, 8)]
