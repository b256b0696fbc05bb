"""torch's functions over the default group, which is the session's: they give what torch documents. Real processes."""

import textwrap
from pathlib import Path

from tests.integration.forked import Forks, Meeting

EVERYTHING = textwrap.dedent(
    """
    import json, sys
    import torch, torch.distributed as dist
    from swift_ft.comm.gloo import GlooBackend
    from swift_ft.comm.process_groups import ProcessGroups
    from swift_ft.comm.groups import ReconfigurableGroup
    from tests.integration.master_stores import MasterStore

    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    backend = GlooBackend()
    group = ReconfigurableGroup("default", range(world), rank, backend)
    comm = ProcessGroups(backend, rank, [group], group, stores=MasterStore)
    wrong = []

    def check(name, got, expected):
        if not torch.equal(got, torch.as_tensor(expected, dtype=got.dtype)):
            wrong.append(f"{name}: {got.tolist()} is not {expected}")

    for generation in (1, 2):
        comm.build(generation)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, world, "gloo")
        one = torch.tensor([rank + 1.0, 2.0])
        for name, op, expected in (
            ("sum", dist.ReduceOp.SUM, [6.0, 6.0]), ("max", dist.ReduceOp.MAX, [3.0, 2.0]),
            ("min", dist.ReduceOp.MIN, [1.0, 2.0]), ("product", dist.ReduceOp.PRODUCT, [6.0, 8.0]),
        ):
            mine = one.clone()
            dist.all_reduce(mine, op=op)
            check(name, mine, expected)
        work = dist.all_reduce(later := one.clone(), async_op=True)
        work.wait()
        check("async", later, [6.0, 6.0])
        dist.all_reduce(bits := torch.tensor([1 << rank]), op=dist.ReduceOp.BXOR)
        check("bxor", bits, [7])
        dist.broadcast(told := one.clone(), src=1)
        check("broadcast", told, [2.0, 2.0])
        dist.reduce(mine := one.clone(), dst=2)
        check("reduce", mine, [6.0, 6.0] if rank == 2 else one.tolist())
        parts = [torch.zeros(world, 2)[r] if r else torch.zeros(2, 2)[:, 0] for r in range(world)]
        dist.all_gather(parts, one)
        check("all_gather", torch.stack(parts), [[1.0, 2.0], [2.0, 2.0], [3.0, 2.0]])
        dist.all_gather_into_tensor(whole := torch.zeros(6), one)
        check("all_gather_into_tensor", whole, [1.0, 2.0, 2.0, 2.0, 3.0, 2.0])
        matrix = torch.arange(4.0).view(2, 2) + 10.0 * rank
        rows = [[0.0, 1.0], [2.0, 3.0], [10.0, 11.0], [12.0, 13.0], [20.0, 21.0], [22.0, 23.0]]
        dist.all_gather_into_tensor(whole := torch.zeros(6, 2), matrix)
        check("all_gather_into_tensor of matrices", whole, rows)
        dist.all_gather_into_tensor(whole := torch.zeros(3, 2, 2), matrix.T.contiguous().T)
        check("all_gather_into_tensor, stacked and transposed", whole.view(6, 2), rows)
        room = [torch.zeros(2) for _ in range(world)] if rank == 0 else None
        dist.gather(one, room, dst=0)
        if rank == 0:
            check("gather", torch.stack(room), [[1.0, 2.0], [2.0, 2.0], [3.0, 2.0]])
        given = [torch.full((2,), 10.0 + r) for r in range(world)] if rank == 1 else None
        dist.scatter(got := torch.zeros(2), given, src=1)
        check("scatter", got, [10.0 + rank] * 2)
        dist.reduce_scatter(got := torch.zeros(1), [torch.tensor([r + rank * 1.0]) for r in range(world)])
        check("reduce_scatter", got, [3.0 * rank + 3.0])
        dist.reduce_scatter_tensor(got := torch.zeros(1), torch.arange(3.0) + rank)
        check("reduce_scatter_tensor", got, [3.0 * rank + 3.0])
        dist.reduce_scatter_tensor(got := torch.zeros(2, 1), torch.arange(6.0).view(6, 1) + rank)
        check("reduce_scatter_tensor of matrices", got, [[6.0 * rank + 3.0], [6.0 * rank + 6.0]])
        incoming = [torch.zeros(1) for _ in range(world)]
        dist.all_to_all(incoming, [torch.tensor([10.0 * rank + r]) for r in range(world)])
        check("all_to_all", torch.cat(incoming), [10.0 * r + rank for r in range(world)])
        dist.all_to_all_single(got := torch.zeros(3), 10.0 * rank + torch.arange(3.0))
        check("all_to_all_single", got, [10.0 * r + rank for r in range(world)])
        dist.all_to_all_single(got := torch.zeros(3, 2), (10.0 * rank + torch.arange(3.0)).repeat(2, 1).T.contiguous())
        check("all_to_all_single of matrices", got, [[10.0 * r + rank] * 2 for r in range(world)])
        dist.barrier()
        dist.monitored_barrier()
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(note := torch.full((2,), float(5 - 5 * rank)), 1 - rank)
            check("p2p", note, [5.0, 5.0])
        dist.all_gather_object(said := [None] * world, {"rank": rank})
        if said != [{"rank": r} for r in range(world)]:
            wrong.append(f"objects: {said}")
        dist.broadcast_object_list(said := [rank], src=2)
        if said != [2]:
            wrong.append(f"broadcast objects: {said}")
        if rank != 1:  # some of them, beside what all do
            part = group.part([0, 2])
            room = [torch.zeros(2) for _ in part.ranks]
            part.run(lambda collectives: collectives.all_gather(room, one))
            check("part", torch.stack(room), [[1.0, 2.0], [3.0, 2.0]])
        dist.all_reduce(mine := one.clone())
        check("behind a part", mine, [6.0, 6.0])
    comm.tear_down()
    print(json.dumps({"wrong": wrong}))
    """
)


def test_every_function_gives_what_it_is_documented_to(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "member.py").write_text(EVERYTHING)
    with Meeting(forks, tmp_path) as met:
        members = [met.start(tmp_path / "member.py", rank, 3) for rank in range(3)]
        assert [met.answer(member)["wrong"] for member in members] == [[], [], []]
