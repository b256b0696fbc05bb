"""What this rank gives to collectives of a step, and what it gets from them: recorded while it runs with its peers, and
answered from that in a rehearsal, which has none.

A step goes over the collectives of its groups in the same order whenever it is done, so each is known by its group and
its number there. What is given is compared (`swift_ft.train.step_digests`), what is gotten is kept: of the first step
of a rehearsal all of it, which are the reduced gradients where there are replicas, of the others what is small.

    (recording) ``record(all_of_it)`` → the step → ``drain``
    (rehearsal) ``play(results)`` → the step; `blind` once a result was asked for that nobody has kept
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from swift_ft.comm.backend import Collective, Collectives, Op, Pending, Rehearsed
from swift_ft.state.tensors import as_bytes, byte_view, plain
from swift_ft.train.step_digests import Witness, digest_of
from swift_ft.train.transcript import GIVEN, Seen

SMALL_BYTES = 64 << 10
"""A collective whose results are not larger is kept of every step."""

Place = tuple[str, int]
"""The group, and the collective's number in it, from 0 in each step."""
Results = Mapping[Place, Sequence[torch.Tensor]]
"""uint8, of each tensor that a collective fills in."""


class Tape:
    """Of one rank. Collectives of a group come one after the other; those of several groups from several threads."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._numbers: Counter[str] = Counter()
        self._all_of_it = False
        self._kept: dict[Place, list[torch.Tensor]] | None = None
        """(recording)"""
        self._given: dict[Seen, bytes] = {}
        self._results: Results | None = None
        """(rehearsal)"""
        self._heeded = True
        self.blind = False
        """What the step goes on with is not what the rank has gotten."""

    def record(self, *, all_of_it: bool) -> None:
        """(a step begins)"""
        self._begin()
        self._kept, self._all_of_it = {}, all_of_it

    def play(self, results: Results) -> None:
        """(a step begins, in a rehearsal)"""
        self._begin()
        self._results = results

    def _begin(self) -> None:
        self._numbers, self._given, self.blind = Counter(), {}, False

    def drain(self) -> tuple[dict[Seen, bytes], Results]:
        """(the step is done) What was given, and what was gotten of it is kept."""
        kept, self._kept = self._kept, None
        return dict(self._given), kept or {}

    @contextmanager
    def giving_only(self) -> Iterator[None]:
        """(rehearsal) What collectives give meanwhile is known otherwise."""
        self._heeded = False
        try:
            yield
        finally:
            self._heeded = True

    def check_seeing(self) -> None:
        """(an update is next) Raises Rehearsed: gradients are not what the rank has had."""
        if self.blind:
            raise Rehearsed

    def stop(self) -> None:
        """The step is over, or dropped."""
        self._kept = self._results = None

    def around(self, group: str, run: Collective) -> Collective:
        """`run`, as it is carried out in this group."""
        if self._kept is None and self._results is None:
            return run
        return lambda collectives: run(_Taped(collectives, self, group))

    # --- of a collective ---

    def gives(self, group: str, tensors: Sequence[torch.Tensor]) -> Place:
        """It begins, and this rank gives these to it."""
        place = group, self._numbers[group]
        self._numbers[group] += 1
        for slot, tensor in enumerate(tensors):
            seen = Seen(GIVEN, 0, place[1], slot, group)
            if self._results is not None:
                self._witness.note(seen, digest_of(tensor))
            elif self._kept is not None:
                self._given[seen] = digest_of(tensor)
        return place

    def answers(self, place: Place, tensors: Sequence[torch.Tensor]) -> bool:
        """(rehearsal) True: they hold what the rank has gotten there. False, and from then on: nobody knows it."""
        if self._results is None or not tensors:
            return False
        results = self._results.get(place, ())
        if [result.numel() for result in results] != [tensor.nbytes for tensor in tensors]:
            if self._heeded:
                self.blind = self._witness.quiet = True
            return False
        with torch.no_grad():
            for tensor, result in zip(tensors, results, strict=True):
                room = torch.empty(tensor.shape, dtype=tensor.dtype)
                byte_view(room)[:] = result.numpy()
                tensor.copy_(room)
        return True

    def gets(self, place: Place, tensors: Sequence[torch.Tensor]) -> None:
        """(recording) It is done."""
        kept = self._kept
        if kept is not None and (self._all_of_it or sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES):
            kept[place] = [as_bytes(plain(tensor)).clone() for tensor in tensors]


class _Taped:
    """See `base.Collectives`: those of a group, which the tape sees."""

    def __init__(self, inner: Collectives, tape: Tape, group: str) -> None:
        self._inner, self._tape, self._group = inner, tape, group

    def _carry_out(self, given: Sequence[torch.Tensor], gotten: Sequence[torch.Tensor], run: Any) -> None:
        place = self._tape.gives(self._group, given)
        if not self._tape.answers(place, gotten):
            run()
        self._tape.gets(place, gotten)

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        self._carry_out([tensor], [tensor], lambda: self._inner.all_reduce(tensor, op))

    def unordered_sum(self, tensor: torch.Tensor) -> None:
        self._carry_out([tensor], [tensor], lambda: self._inner.unordered_sum(tensor))

    def reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor], op: Op) -> None:
        self._carry_out(parts, [output], lambda: self._inner.reduce_scatter(output, parts, op))

    def all_gather(self, outputs: list[torch.Tensor], own: torch.Tensor) -> None:
        self._carry_out([own], outputs, lambda: self._inner.all_gather(outputs, own))

    def all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> None:
        self._carry_out(outgoing, incoming, lambda: self._inner.all_to_all(incoming, outgoing))

    def begin_all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> Pending:
        # Only while ranks are missing, when nothing is recorded.
        return self._inner.begin_all_to_all(incoming, outgoing)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        # What those give who are not the root is overwritten, and may be anything.
        self._carry_out([], [tensor], lambda: self._inner.broadcast(tensor, root))

    def barrier(self, ballot: torch.Tensor | None = None) -> None:
        gotten = [] if ballot is None else [ballot]
        self._carry_out(gotten, gotten, lambda: self._inner.barrier(ballot))
