"""What collectives give is recorded, and given again in a rehearsal, which has no peers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from swift_ft.comm.backend import Rehearsed
from swift_ft.train.recording import SMALL_BYTES, Results, Tape
from swift_ft.train.step_digests import Witness
from swift_ft.train.transcript import GIVEN, Seen
from tests.unit.runtime.wired import ignored

OTHERS = 10.0
"""What another member gives."""


class Peers:
    """Collectives of a group of two, of which the other one gives that number, in every element."""

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        tensor.copy_(op(tensor.clone(), torch.full_like(tensor, OTHERS)))

    def unordered_sum(self, tensor: torch.Tensor) -> None:
        tensor += int(OTHERS)

    def reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor], op: Any) -> None:
        output.copy_(op(parts[0].clone(), torch.full_like(output, OTHERS)))

    def all_gather(self, outputs: list[torch.Tensor], own: torch.Tensor) -> None:
        outputs[0].copy_(own)
        outputs[1].fill_(OTHERS)

    def all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> None:
        incoming[0].copy_(outgoing[0])
        incoming[1].fill_(OTHERS)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if root == 1:
            tensor.fill_(OTHERS)

    def barrier(self, ballot: torch.Tensor | None = None) -> None:
        if ballot is not None:
            ballot.clamp_(min=int(OTHERS))


class Nobody:
    """Whoever asks these is alone."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was carried out")


Asks = Callable[[Any, torch.Tensor], Sequence[torch.Tensor]]


def in_place(name: str, *more: Any) -> Asks:
    def asks(group: Any, own: torch.Tensor) -> Sequence[torch.Tensor]:
        getattr(group, name)(own, *more)
        return [own]

    return asks


reduced, summed, told = in_place("all_reduce", torch.add), in_place("unordered_sum"), in_place("broadcast", 1)


def scattered(group: Any, own: torch.Tensor) -> Sequence[torch.Tensor]:
    output = torch.empty_like(own)
    group.reduce_scatter(output, [own, own * 2], torch.add)
    return [output]


def gathered(group: Any, own: torch.Tensor) -> Sequence[torch.Tensor]:
    outputs = [torch.empty_like(own) for _ in range(2)]
    group.all_gather(outputs, own)
    return outputs


def exchanged(group: Any, own: torch.Tensor) -> Sequence[torch.Tensor]:
    incoming = [torch.empty_like(own) for _ in range(2)]
    group.all_to_all(incoming, [own, own * 2])
    return incoming


def voted(group: Any, own: torch.Tensor) -> Sequence[torch.Tensor]:
    group.barrier()
    group.barrier(own)
    return [own]


ALL: list[Asks] = [reduced, summed, scattered, gathered, exchanged, told, voted]


class Side:
    """A rank, or its rehearsal."""

    def __init__(self, inner: Any) -> None:
        self.words: list[str] = []
        self.witness = Witness(lambda _step, words: self.words.append(words), lambda: False, ignored)
        self.witness.begin(0)
        self.tape = Tape(self.witness)
        self.inner = inner

    def does(self, asks: Asks, own: torch.Tensor, group: str = "data") -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        self.tape.around(group, lambda collectives: out.extend(asks(collectives, own)))(self.inner)
        return out


def recorded(asks: Asks, own: torch.Tensor, *, all_of_it: bool = True) -> tuple[list[Any], Any, Results]:
    """(what the rank goes on with, what it gave, what was kept)"""
    rank = Side(Peers())
    rank.tape.record(all_of_it=all_of_it)
    out = [each.clone() for each in rank.does(asks, own.clone())]
    return out, *rank.tape.drain()


def numbers(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([[1.0, 2.5], [-0.0, 4.0]]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("asks", ALL)
def test_each_collective_gives_again_what_it_gave(asks: Asks, dtype: torch.dtype) -> None:
    out, given, kept = recorded(asks, numbers(dtype))
    assert any(bool((tensor >= OTHERS).any()) for tensor in out), "the others have given something"
    rehearsal = Side(Nobody() if asks is not voted else Peers())  # a barrier alone gives nothing
    rehearsal.witness.expect(0, given)
    rehearsal.tape.play(kept)
    again = rehearsal.does(asks, numbers(dtype))
    assert all(torch.equal(one, other) for one, other in zip(out, again, strict=True))
    rehearsal.witness.check_all_seen()
    assert rehearsal.words == []
    assert not rehearsal.tape.blind
    rehearsal.tape.check_seeing()


@pytest.mark.parametrize("asks", [asks for asks in ALL if asks is not told])
def test_what_is_given_is_compared(asks: Asks) -> None:
    _, given, kept = recorded(asks, numbers())
    rehearsal = Side(Peers())
    rehearsal.witness.expect(0, given)
    rehearsal.tape.play(kept)
    rehearsal.does(asks, numbers() + 1)
    [words] = rehearsal.words
    assert words.startswith(
        f"what is given to collective {int(asks is voted)} of group data of step 0 differs"
    )


def test_what_whoever_is_not_the_root_gives_to_a_broadcast_may_be_anything() -> None:
    _, given, kept = recorded(told, numbers())
    assert given == {}
    rehearsal = Side(Nobody())
    rehearsal.tape.play(kept)
    assert rehearsal.does(told, torch.full((2, 2), float("nan")))[0].unique().tolist() == [OTHERS]


def test_strides_and_the_order_of_collectives_are_kept() -> None:
    rank, groups = Side(Peers()), ("data", "world", "data")
    rank.tape.record(all_of_it=True)
    out = [rank.does(reduced, numbers().t() * place, name)[0] for place, name in enumerate(groups)]
    given, kept = rank.tape.drain()
    assert list(kept) == [("data", 0), ("world", 0), ("data", 1)]
    assert list(given) == [
        Seen(GIVEN, 0, number, 0, name) for name, number in (("data", 0), ("world", 0), ("data", 1))
    ]
    rehearsal = Side(Nobody())
    rehearsal.tape.play(kept)
    again = [rehearsal.does(reduced, numbers().t() * place, name)[0] for place, name in enumerate(groups)]
    assert all(torch.equal(one, other) for one, other in zip(out, again, strict=True))
    assert again[0].stride() == numbers().t().stride()


def test_what_is_kept_is_not_what_the_rank_goes_on_to_change() -> None:
    rank = Side(Peers())
    rank.tape.record(all_of_it=True)
    own = numbers()
    rank.does(reduced, own)
    own.zero_()
    _, kept = rank.tape.drain()
    assert kept["data", 0][0].any()


def test_of_later_steps_only_what_is_small_is_kept() -> None:
    small, large = torch.ones(SMALL_BYTES // 4), torch.ones(SMALL_BYTES // 4 + 1)
    assert len(recorded(reduced, small, all_of_it=False)[2]) == 1
    _, given, kept = recorded(reduced, large, all_of_it=False)
    assert kept == {}
    assert len(given) == 1, "it is compared all the same"
    assert len(recorded(reduced, large)[2]) == 1


def test_a_result_that_was_not_kept_makes_the_step_blind_and_is_no_difference() -> None:
    _, given, _ = recorded(reduced, numbers())
    rehearsal = Side(Peers())
    rehearsal.witness.expect(0, given)
    rehearsal.tape.play({})
    rehearsal.does(reduced, numbers())
    assert rehearsal.tape.blind
    assert rehearsal.witness.quiet
    with pytest.raises(Rehearsed):
        rehearsal.tape.check_seeing()
    rehearsal.does(reduced, numbers() * 5)
    rehearsal.witness.check_all_seen()
    assert rehearsal.words == []


def test_a_result_of_another_size_makes_it_blind() -> None:
    *_, kept = recorded(reduced, numbers())
    rehearsal = Side(Peers())
    rehearsal.tape.play(kept)
    rehearsal.does(reduced, torch.ones(3))
    assert rehearsal.tape.blind


def test_blindness_ends_with_its_step() -> None:
    out, _, kept = recorded(reduced, numbers())
    rehearsal = Side(Peers())
    rehearsal.tape.play({})
    rehearsal.does(reduced, numbers())
    rehearsal.tape.stop()
    rehearsal.tape.play(kept)
    assert not rehearsal.tape.blind
    assert torch.equal(rehearsal.does(reduced, numbers())[0], out[0])


def test_a_step_that_is_not_recorded_is_carried_out_as_if_there_were_no_tape() -> None:
    rank = Side(Peers())

    def run(_collectives: Any) -> None: ...

    assert rank.tape.around("data", run) is run
    rank.tape.record(all_of_it=True)
    assert rank.tape.around("data", run) is not run
    rank.tape.stop()
    assert rank.tape.around("data", run) is run
    assert rank.tape.drain() == ({}, {})
