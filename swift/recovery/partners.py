"""Who keeps whose snapshot: for each rank another one, which should not be lost together with it."""

from collections.abc import Mapping, Sequence

Transfer = tuple[int, int]
"""(rank whose copy it is, rank that keeps it)"""


def partners(ranks: Sequence[int], host_of: Mapping[int, str], group_of: Mapping[int, int]) -> dict[int, int]:
    """Rank -> the rank that keeps its copy; none for a rank that is alone.

    On another host if hosts are known (no empty text), in another recovery group if there is one, then with the fewest
    copies so far, then the next one. All ranks work out the same.
    """
    keeps = dict.fromkeys(ranks, 0)
    chosen: dict[int, int] = {}
    for index, rank in enumerate(ranks):
        others = [*ranks[index + 1 :], *ranks[:index]]
        if not others:
            break
        chosen[rank] = min(
            others,
            key=lambda other: (
                host_of[other] == host_of[rank],
                group_of[other] == group_of[rank],
                keeps[other],
            ),
        )
        keeps[chosen[rank]] += 1
    return chosen


def in_order(chosen: Mapping[int, int]) -> list[Transfer]:
    """All transfers, in the order in which every rank carries out its own: as many at once as ranks allow.

    One order for all, so none waits for another one in a circle.
    """
    left, ordered = sorted(chosen.items()), list[Transfer]()
    while left:
        busy: set[int] = set()
        for transfer in left:
            if busy.isdisjoint(transfer):
                busy.update(transfer)
                ordered.append(transfer)
        left = [transfer for transfer in left if transfer not in ordered]
    return ordered
