"""Groups that outlive their generation, and reductions that are broken in the middle. Real processes, real
sockets."""

import textwrap
from pathlib import Path

import pytest

from tests.integration.forked import Forks, Meeting

BROKEN_REDUCTIONS = textwrap.dedent(
    """
    # One rank's connections break at another moment of the reduction in every trial.
    import json, sys, threading, time
    import torch
    from swift_ft.comm.gloo import GlooBackend
    from swift_ft.comm.process_groups import ProcessGroups
    from swift_ft.comm.groups import ReconfigurableGroup
    from tests.integration.master_stores import MasterStore
    from swift_ft.train.reducer import Reducer

    rank, world, ordered, trials = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True", int(sys.argv[4])
    torch.set_num_threads(1)
    backend = GlooBackend()
    group = ReconfigurableGroup("data", range(world), rank, backend)
    comm = ProcessGroups(backend, rank, [group], group, stores=MasterStore)
    reducer = Reducer(group, lambda: world, ordered=ordered, shares=lambda: None)
    parameters = [torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(4)]
    sums = [torch.full((1 << 20,), sum(r + 1.0 + n for r in range(world)) / world) for n in range(4)]
    found = {"whole": 0, "broken": 0, "half_reduced": 0, "wrong": 0}
    for trial in range(trials):
        comm.build(trial + 1)
        for n, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, rank + 1.0 + n)
        before = [parameter.grad.clone() for parameter in parameters]
        group.run(lambda collectives: collectives.barrier())
        over, fabric = threading.Event(), comm._fabric

        def break_it():  # the others are told, as survivors are
            late = over.wait(trial * 0.0015 + (0.05 if rank != 1 else 0.0))
            while not late:
                fabric.abort()
                late = over.wait(0.02)

        breaker = threading.Thread(target=break_it)
        if trial:
            breaker.start()
        reduction = None
        try:
            reduction = reducer.launch(parameters)
            flat = reduction.flat
            own = flat.clone()
            reducer.finish(reduction)
            found["whole"] += 1
            expected = sums
        except RuntimeError:
            found["broken"] += 1
            expected = before
            if reduction is not None:
                found["half_reduced"] += int(not torch.equal(flat, own))
        found["wrong"] += sum(not torch.equal(p.grad, e) for p, e in zip(parameters, expected))
        over.set()
        if trial:
            breaker.join()
        del reduction
    comm.tear_down()
    print(json.dumps(found))
    """
)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_broken_reduction_changes_no_gradient(ordered: bool, forks: Forks, tmp_path: Path) -> None:
    ranks = 3
    (tmp_path / "member.py").write_text(BROKEN_REDUCTIONS)
    with Meeting(forks, tmp_path) as met:
        members = [met.start(tmp_path / "member.py", rank, ranks, ordered, 40) for rank in range(ranks)]
        found = [met.answer(member) for member in members]
    assert sum(f["wrong"] for f in found) == 0, found
    assert sum(f["broken"] for f in found) > 0, found
    # The danger is real: some rank's buffer was left neither as it was nor as it should be.
    assert sum(f["half_reduced"] for f in found) > 0, found
