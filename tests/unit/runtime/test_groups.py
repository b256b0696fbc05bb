"""Groups in a generation in which a rank is missing. Ranks are threads, over the local backend."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from swift_ft import torch_private
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import UsageError
from tests.local_backend import LocalBackend, in_parallel

RANKS = (0, 1, 2, 3)
PRESENT = (0, 1, 3)


def on_all(run: Callable[[ReconfigurableGroup, int], Any]) -> dict[int, Any]:
    """What ``run(group, rank)`` gives, by rank."""
    backend, store = LocalBackend(), HashStore()

    def one(own: int) -> Any:
        group = ReconfigurableGroup("world", RANKS, PRESENT[own], backend)
        fabric = backend.open()
        group.attach(fabric.connect(store, own, len(PRESENT), timedelta(seconds=30)), PRESENT)
        found = run(group, PRESENT[own])
        fabric.close()
        return found

    return dict(zip(PRESENT, in_parallel(len(PRESENT), one), strict=True))


def test_those_that_are_there_sum_up() -> None:
    def run(group: ReconfigurableGroup, rank: int) -> list[Any]:
        total, told = torch.tensor([10.0**rank]), torch.tensor([rank])
        group.allreduce([total]).wait()
        options = dist.BroadcastOptions()
        options.rootRank = 3
        group.broadcast([told], options).wait()
        group.barrier().wait()
        return [total.item(), told.item(), [part.item() for part in group.gathered(torch.tensor(rank))]]

    assert on_all(run) == {rank: [1011.0, 3, list(PRESENT)] for rank in PRESENT}


def test_a_mean_is_of_those_that_are_there() -> None:
    def run(group: ReconfigurableGroup, rank: int) -> list[float]:
        mean, alone = torch.tensor([10.0**rank]), torch.tensor([10.0**rank])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        group.allreduce([mean], options).wait()
        with group.quiet():
            group.allreduce([alone], options).wait()
        return [mean.item(), alone.item()]

    assert on_all(run) == {rank: [337.0, 10.0**rank] for rank in PRESENT}


@pytest.mark.parametrize("texts", [("", "a part of it", "alle: ä"), ("", "", "")])
def test_texts_of_those_that_are_there(texts: tuple[str, ...]) -> None:
    found = on_all(lambda group, rank: group.gathered_texts(texts[PRESENT.index(rank)]))
    assert found == {rank: list(texts) for rank in PRESENT}


def test_messages_go_to_the_rank_that_is_named() -> None:
    def run(group: ReconfigurableGroup, rank: int) -> Any:
        note = torch.tensor([rank])
        if rank == 0:
            group.send([note], 3).wait()
        if rank == 3:
            group.recv([note], 0).wait()
        with pytest.raises(RuntimeError, match="process group world: rank 2 is not in this generation"):
            group.send([note], 2)
        return note.item()

    assert on_all(run) == {0: 0, 1: 1, 3: 0}


def test_what_has_a_part_for_every_rank_is_refused() -> None:
    def run(group: ReconfigurableGroup, rank: int) -> None:
        with pytest.raises(UsageError, match="all_gather has a part for ranks that are not there"):
            group.allgather([[torch.zeros(1) for _ in RANKS]], [torch.ones(1)])

    assert on_all(run) == dict.fromkeys(PRESENT)


def test_what_only_a_missing_rank_has_is_refused() -> None:
    def run(group: ReconfigurableGroup, rank: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 2
        with pytest.raises(UsageError, match="broadcast from rank 2, which is not there now"):
            group.broadcast([torch.ones(1)], options).wait()

    assert on_all(run) == dict.fromkeys(PRESENT)


def test_parts_are_of_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "register_group", lambda *_: None)  # a process of torch's is one rank

    def run(group: ReconfigurableGroup, rank: int) -> Any:
        if rank == 1:
            return None
        return [part.item() for part in group.part([0, 2, 3]).gathered(torch.tensor(rank))]

    assert on_all(run) == {0: [0, 3], 1: None, 3: [0, 3]}


def on_routes(run: Callable[[ReconfigurableGroup, int], Any]) -> dict[int, Any]:
    """Pipelines of three, (0, 2, 4) and (1, 3, 5), of which rank 2 is missing: rank 3 sits in its place."""
    backend, store, present = LocalBackend(), HashStore(), (0, 1, 3, 4, 5)
    routes = {0: (0, 3, 4), 1: (1, 3, 5)}

    def one(number: int) -> Any:
        rank = present[number]
        own = rank % 2
        ranks = (own, own + 2, own + 4)
        group = ReconfigurableGroup("pipeline", ranks, ranks.index(rank), backend)
        fabric = backend.open()
        connections = {
            origin: fabric.connect(
                dist.PrefixStore(f"route-{origin}", store), route.index(rank), 3, timedelta(seconds=30)
            )
            for origin, route in routes.items()
            if rank in route
        }
        group.attach_routes(connections, own)
        found = run(group, rank)
        fabric.close()
        return found

    return dict(zip(present, in_parallel(len(present), one), strict=True))


def test_who_sits_in_two_pipelines_is_in_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "register_group", lambda *_: None)

    def told(group: ReconfigurableGroup, rank: int) -> list[Any]:
        number = torch.tensor(rank)
        everybody = [part.item() for part in group.gathered(number)]
        neighbour = torch.tensor([-1])
        if group.rank() == 1:
            group.send([number.view(1)], 2).wait()
        if group.rank() == 2:
            group.recv([neighbour], 1).wait()
        some = [part.item() for part in group.part([1, 2]).gathered(number)] if group.rank() else []
        return [everybody, neighbour.item(), some]

    def run(group: ReconfigurableGroup, rank: int) -> Any:
        found = []
        for _ in range(2):
            for origin in (0, 1):
                with group.on_route(origin):
                    if origin == rank % 2 or rank == 3:
                        found.append(told(group, rank))
        return found

    first, second = [0, 3, 4], [1, 3, 5]
    assert on_routes(run) == {
        0: [[first, -1, []]] * 2,
        1: [[second, -1, []]] * 2,
        3: [[first, -1, [3, 4]], [second, -1, [3, 5]]] * 2,
        4: [[first, 3, [3, 4]]] * 2,
        5: [[second, 3, [3, 5]]] * 2,
    }
