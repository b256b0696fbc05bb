"""Inputs and results of this rank's collectives in a step: recorded while it runs with its peers, and answered from the
recording in a rehearsal, which has none.

A step always runs the collectives of a group in the same order, so each is identified by its group and its number
there. Inputs are compared (`swift_ft.train.step_digests`), results are kept: all of them for the first step of a
rehearsal (with replicas, these are the reduced gradients), the small ones for the other steps.

    (recording) ``record(all_of_it)`` → the step → ``drain``
    (rehearsal) ``play(results)`` → the step; `blind` once a result is needed that was not kept
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
"""Maximum total size at which a collective's results are kept for every step."""

Place = tuple[str, int]
"""The group, and the collective's number in it, from 0 in each step."""
Results = Mapping[Place, Sequence[torch.Tensor]]
"""Bytes (uint8) of each tensor that a collective fills in."""


class Tape:
    """Recording of one rank's collectives. A group's come one after the other; several groups use several threads."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._numbers: Counter[str] = Counter()
        self._all_of_it = False
        self._kept: dict[Place, list[torch.Tensor]] | None = None
        """(recording) Results kept in this step."""
        self._given: dict[Seen, bytes] = {}
        self._results: Results | None = None
        """(rehearsal) Recorded results of this step."""
        self._heeded = True
        self.blind = False
        """Set once the step continues with other values than the recorded rank received."""

    def record(self, *, all_of_it: bool) -> None:
        """(a step begins) Starts recording. `all_of_it`: keeps results of any size."""
        self._begin()
        self._kept, self._all_of_it = {}, all_of_it

    def play(self, results: Results) -> None:
        """(rehearsal, a step begins) Answers collectives from `results`."""
        self._begin()
        self._results = results

    def _begin(self) -> None:
        self._numbers, self._given, self.blind = Counter(), {}, False

    def drain(self) -> tuple[dict[Seen, bytes], Results]:
        """(after the step) Stops recording. Returns the digests of the inputs, and the kept results."""
        kept, self._kept = self._kept, None
        return dict(self._given), kept or {}

    @contextmanager
    def giving_only(self) -> Iterator[None]:
        """(rehearsal) Encloses collectives whose results come from elsewhere: a missing one does not set `blind`."""
        self._heeded = False
        try:
            yield
        finally:
            self._heeded = True

    def check_seeing(self) -> None:
        """(before an update) Raises Rehearsed if the gradients are not those of the recorded rank."""
        if self.blind:
            raise Rehearsed

    def stop(self) -> None:
        self._kept = self._results = None

    def around(self, group: str, run: Collective) -> Collective:
        """Returns `run` wrapped so that the tape sees this group's collectives."""
        if self._kept is None and self._results is None:
            return run
        return lambda collectives: run(_Taped(collectives, self, group))

    # --- of a collective ---

    def gives(self, group: str, tensors: Sequence[torch.Tensor]) -> Place:
        """Numbers a collective that begins, and compares or records its inputs `tensors`. Returns its place."""
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
        """(rehearsal) Writes the recorded results into `tensors`. Returns False if they were not kept, and sets
        `blind` unless in `giving_only`."""
        if self._results is None or not tensors:
            return False
        results = self._results.get(place, ())
        if [result.numel() for result in results] != [tensor.nbytes for tensor in tensors]:
            if self._heeded:
                self.blind = self._witness.quiet = True
            return False
        with torch.no_grad():
            for tensor, result in zip(tensors, results, strict=True):
                room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
                byte_view(room)[:] = result.numpy()
                tensor.copy_(room, non_blocking=True)
        return True

    def gets(self, place: Place, tensors: Sequence[torch.Tensor]) -> None:
        """(recording) Keeps the results of a completed collective, if small enough or all are kept."""
        kept = self._kept
        if kept is not None and (self._all_of_it or sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES):
            kept[place] = [as_bytes(plain(tensor)).clone() for tensor in tensors]


class _Taped:
    """`Collectives` of a group whose inputs and results pass through the tape."""

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
        # Called only while ranks are missing, when there is no recording.
        return self._inner.begin_all_to_all(incoming, outgoing)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        # The input of a rank that is not the root is arbitrary, since it is overwritten.
        self._carry_out([], [tensor], lambda: self._inner.broadcast(tensor, root))

    def barrier(self, ballot: torch.Tensor | None = None) -> None:
        gotten = [] if ballot is None else [ballot]
        self._carry_out(gotten, gotten, lambda: self._inner.barrier(ballot))
