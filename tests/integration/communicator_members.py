"""Members of a `swift_ft.Communicator`: what each process of a scenario does (test_communicator.py).

    python communicator_members.py SCENARIO DIRECTORY

Started by `swift-ft run`. What a member has seen it writes to DIRECTORY, in a file of its own, when it has ended well.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import swift_ft
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import MembersLost

Seen = dict[str, Any]
Communicator = swift_ft.Communicator


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def together(communicator: Communicator) -> None:
    """All have come here before any goes on. A barrier is not enough: others may still stand in it when the first to
    leave it dies, and then it fails for them."""
    communicator.agree()


def total(communicator: Communicator, group: Any = None) -> float:
    """A sum of 1, 2, 4, ... by slot: it tells who has taken part."""
    tensor = torch.tensor([float(1 << communicator.slot)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def fails(call: Callable[[], object]) -> bool:
    """Whether it raises as an operation does that a loss, or a revoke, has ended."""
    try:
        call()
    except RuntimeError:
        return True
    return False


def until_lost(communicator: Communicator, count: int = 1) -> None:
    while len(communicator.failures()) < count:
        time.sleep(0.005)


def numbers(communicator: Communicator) -> Seen:
    return {"rank": dist.get_rank(), "size": dist.get_world_size(), "slots": list(communicator.slots)}


# --- after ULFM's own tests (ICLDisco/ulfm-testing, api/) ---


def err_any(communicator: Communicator, seen: Seen) -> None:
    """Rank 0 takes messages of all others, of whom some die before they have sent all: those that live are heard."""
    rank, size = communicator.rank, communicator.size
    pairs = {other: communicator.group([0, other]) for other in range(1, size) if rank in (0, other)}
    together(communicator)
    message = torch.zeros(1)
    if rank:
        for number in range(5):
            if rank % 2 and number == rank:
                die()
            dist.send(message.fill_(number), group=pairs[rank], group_dst=0)
        _agreed(communicator)  # nobody leaves before all are heard: who has left is not there any more
        return
    heard, lost = [], []
    for other, group in pairs.items():
        message = torch.zeros(1)  # a receive that a loss has ended may still write into its own
        try:
            for number in range(5):
                dist.recv(message, group=group, group_src=0 if rank else 1)
                assert message.item() == number
            heard.append(other)
        except RuntimeError:
            lost.append(other)
    until_lost(communicator, len(lost))
    seen |= {"heard": heard, "lost": lost, "acknowledged": [f.rank for f in communicator.acknowledge()]}
    _agreed(communicator)


def getack(communicator: Communicator, seen: Seen) -> None:
    """One dies, and is acknowledged; then another one. `agree` tells all the same, whatever each has acknowledged."""
    rank, size = communicator.rank, communicator.size
    together(communicator)
    if rank == size - 1:
        die()
    until_lost(communicator)
    seen["before"] = _agreed(communicator)
    if rank == 0:
        communicator.acknowledge()
    seen["one_acknowledged"] = _agreed(communicator)
    communicator.acknowledge()
    seen["all_acknowledged"] = _agreed(communicator)
    if rank == size - 2:
        die()
    until_lost(communicator, 2)
    seen["failures"] = [failure.rank for failure in communicator.failures()]
    seen["another"] = _agreed(communicator)
    seen["acknowledged"] = [failure.rank for failure in communicator.acknowledge()]
    seen["in_the_end"] = _agreed(communicator)


def _agreed(communicator: Communicator) -> list[Any]:
    try:
        return [communicator.agree(0b111 ^ (1 << communicator.rank)), []]
    except MembersLost as lost:
        return [lost.value, list(lost.ranks)]


def revoke(communicator: Communicator, seen: Seen) -> None:
    """One group is revoked by its last member, while the others wait in it; the group of all is in use meanwhile."""
    for _ in range(10):
        some = communicator.group(range(communicator.size))
        seen.setdefault("before", []).append(total(communicator, some))
        dist.barrier()
        if communicator.rank == communicator.size - 1:
            communicator.revoke("a test", some)
        seen.setdefault("revoked", []).append(
            fails(lambda some=some: [total(communicator, some) for _ in range(9999)])
        )
        seen.setdefault("other", []).append(total(communicator))
        seen.setdefault("error", []).append(communicator.revoked)
        communicator.shrink()  # groups end with their generation


def revshrinkkill(communicator: Communicator, seen: Seen) -> None:
    """Members end themselves at random moments, until rank 0 is alone."""
    chance = random.Random(communicator.slot)
    barriers = 0
    while communicator.size > 1:
        if communicator.slot and chance.random() < 0.05:
            die()
        try:
            dist.barrier()
            barriers += 1
        except RuntimeError:
            communicator.revoke()
            communicator.shrink()
    seen |= {"barriers": barriers, **numbers(communicator)}


def buddycr(communicator: Communicator, seen: Seen) -> None:
    """Each keeps a copy of its neighbour's state. One dies; its replacement gets the state from there."""
    state, copy, saved = torch.full((1 << 16,), float(communicator.slot)), torch.empty(1 << 16), 0
    iteration, new, size = 0, communicator.generation > 1, communicator.size
    while iteration < 6:
        try:
            if new:
                iteration, new = _reload(communicator, state, copy), False
                saved = iteration
            if iteration % 2 == 0:
                work = [
                    dist.isend(state, (communicator.rank + 1) % size),
                    dist.irecv(copy, (communicator.rank - 1) % size),
                ]
                for one in work:
                    one.wait()
                saved, kept = iteration, state.clone()
            iteration += 1
            if communicator.slot == size // 2 and iteration == 4 and communicator.generation == 1:
                die()
            dist.all_reduce(torch.ones(1))
            state += 1.0
        except RuntimeError:
            communicator.revoke()
            communicator.shrink()
            while not communicator.grow():
                time.sleep(0.01)
            state.copy_(kept)
            iteration = _reload(communicator, state, copy, saved)
    seen |= {"state": state[0].item(), "alike": bool((state == state[0]).all()), **numbers(communicator)}


def _reload(communicator: Communicator, state: torch.Tensor, copy: torch.Tensor, saved: int = -1) -> int:
    """All go on at one iteration; whoever is new takes its state from the neighbour to its right."""
    at = torch.full((communicator.size,), -1.0)
    at[communicator.rank] = saved
    dist.all_reduce(at, op=dist.ReduceOp.MAX)
    for rank, iteration in enumerate(at.tolist()):
        if iteration >= 0:
            continue
        holder = (rank + 1) % communicator.size
        if communicator.rank == holder:
            dist.send(copy, rank)
        elif communicator.rank == rank:
            dist.recv(state, holder)
    return int(at.max().item())


# --- after torch's test/distributed/test_c10d_fault_tolerance.py ---


def shrink_middle(communicator: Communicator, seen: Seen) -> None:
    """The one in the middle leaves; the others renumber, and reduce, broadcast and pass a ring of messages."""
    together(communicator)
    if communicator.rank == communicator.size // 2:
        return
    until_lost(communicator)
    communicator.shrink()
    seen |= {"total": total(communicator), **numbers(communicator)}
    tensor = torch.full((4,), 42.0 if communicator.rank == 0 else 0.0)
    dist.broadcast(tensor, 0)
    seen["broadcast"] = tensor.tolist()
    own, other = torch.tensor([float(communicator.rank)]), torch.zeros(1)
    work = [
        dist.isend(own, (communicator.rank + 1) % communicator.size),
        dist.irecv(other, (communicator.rank - 1) % communicator.size),
    ]
    for one in work:
        one.wait()
    seen["ring"] = other.item()


def late_join(communicator: Communicator, seen: Seen) -> None:
    """One is lost and comes again after the others have worked on; they let it in between two steps."""
    steps, worked = 0, Path(os.environ["MAY_JOIN"])
    if communicator.generation == 1:
        if communicator.rank == 1:
            die()
        until_lost(communicator)
        communicator.shrink()
        while not communicator.grow():
            seen["meanwhile"] = total(communicator)
            steps += 1
            worked.touch()
    seen |= {"steps": steps, "total": total(communicator), **numbers(communicator)}


def used_group(communicator: Communicator, seen: Seen) -> None:
    """A group of an older generation is refused, whatever it is used for."""
    old, world = communicator.group(range(communicator.size)), dist.group.WORLD
    communicator.shrink()
    seen["failed"] = [_refused(communicator, group) for group in (old, world)]
    seen["total"] = total(communicator)


def _refused(communicator: Communicator, group: Any) -> bool:
    try:
        return fails(lambda: total(communicator, group))
    except ValueError:  # torch does not know the group any more
        return True


def consistent(communicator: Communicator, seen: Seen) -> None:
    """The first, or whoever it may be, dies inside a collective; all others see an error, and agree on one answer."""
    together(communicator)
    victim = int(os.environ["VICTIM"])
    if communicator.rank == victim:
        tensor = torch.ones(1 << 20)
        dist.all_reduce(tensor, async_op=True)
        die()
    seen["failed"] = fails(lambda: [dist.all_reduce(torch.ones(1 << 20)) for _ in range(9999)])
    seen["agreed"] = _agreed(communicator)
    communicator.shrink()
    seen |= {"total": total(communicator), **numbers(communicator)}


# --- a loss in the middle ---


def dies_in(communicator: Communicator, seen: Seen) -> None:
    """One dies in `agree`, `revoke`, `shrink` or `grow`, before or after it has told the coordinator."""
    together(communicator)
    where, victim = os.environ["WHERE"], communicator.size - 1
    if communicator.rank == victim:
        client = communicator._member.client
        name, _, when = where.partition(":")
        call, last = client.call, pb.RevokeRequest if name == "revoke" else pb.VoteRequest

        def dying(request: Any, **options: Any) -> Any:
            if isinstance(request, last):
                if when == "after":
                    call(request)
                die()
            return call(request, **options)

        client.call = dying  # type: ignore[method-assign]
    name = where.partition(":")[0]
    if name == "agree":
        seen["agreed"] = _agreed(communicator)
    elif name == "revoke":
        if communicator.rank == victim:
            communicator.revoke()
        seen["failed"] = fails(lambda: [dist.barrier() for _ in range(9999)])
    elif name == "grow":
        seen["grown"] = communicator.grow()
    communicator.shrink()
    seen |= {"total": total(communicator), **numbers(communicator)}


def through_restarts(communicator: Communicator, seen: Seen) -> None:
    """They agree, shrink and agree, until the test has killed the coordinator and started it again."""
    go_on = Path(os.environ["GO_ON"])
    answers: list[int] = []
    while not answers or answers[-1]:
        answers.append(communicator.agree(0 if go_on.exists() else len(answers) + 1))
        go_on.with_suffix(".begun").touch()
        if len(answers) % 3 == 0:
            communicator.shrink()
            assert total(communicator) == 7.0
    seen |= {"answers": answers[:-1], "generation": communicator.generation}


def unlike(communicator: Communicator, seen: Seen) -> None:
    """They call different things."""
    try:
        communicator.agree() if communicator.rank else communicator.grow()
    except swift_ft.errors.UsageError as error:
        seen["error"] = str(error)


def _wait_as_replacement(may_join: Path) -> None:
    """Until that file is there, if another process has had this rank before."""
    try:
        may_join.with_name(f"rank-{os.environ['RANK']}-began").touch(exist_ok=False)
    except FileExistsError:
        while not may_join.exists():
            time.sleep(0.005)


def main() -> None:
    """SCENARIO may be several, with a comma between them: the same members go through one after the other. What
    replaces a lost process joins once the file MAY_JOIN is there."""
    scenarios, directory = sys.argv[1].split(","), Path(sys.argv[2])
    if may_join := os.environ.get("MAY_JOIN"):
        _wait_as_replacement(Path(may_join))
    with swift_ft.Communicator.from_env() as communicator:
        slot = communicator.slot
        seen: dict[str, Seen] = {name: {"slot": slot} for name in scenarios}
        for name in scenarios:
            globals()[name](communicator, seen[name])
    (directory / f"{slot}-{os.getpid()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
