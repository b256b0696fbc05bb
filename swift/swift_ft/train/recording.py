"""Recording of some of a rank's steps, with which a rehearsal is compared (`swift_ft.train.rehearsal`).

The first steps after a checkpoint are recorded while the View says that this rank is still to be rehearsed: the
observations of a thorough witness, and the results of collectives (`Tape`). Both go into this rank's log when the step
is done, and are trimmed with it.

    (at a checkpoint) ``begins_at(version)`` → (each step) ``begin_step``, ``step_begun`` → ``end_step``, or
                      ``drop_step``
    (a new generation) ``abandon``: later steps may run differently from the recorded ones

Streams: `swift_ft.log.record`. The key's microbatch is the generation that recorded a transcript or results.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import xxhash
from torch.overrides import TorchFunctionMode

from swift_ft import torch_private
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.backend import Collective, Collectives, Op, Pending, Rehearsed
from swift_ft.log.record import RecordKey, results, transcripts
from swift_ft.state.tensors import as_bytes, byte_view, plain, to_tensor
from swift_ft.state.transfer import local
from swift_ft.state.tree import split
from swift_ft.train.participants import Participant, Site, Step
from swift_ft.train.step_digests import Witness, digest_of, digests_of, tensors_of
from swift_ft.train.transcript import (
    CALLED,
    ENTERS,
    GIVEN,
    GRADIENT,
    LEAVES,
    STATE,
    Seen,
    Transcript,
    as_json,
    from_json,
)

# Inputs and results of this rank's collectives in a step: recorded while it runs with its peers, and answered from the
# recording in a rehearsal, which has none.
#
# A step always runs the collectives of a group in the same order, so each is identified by its group and its number
# there. Inputs are compared (`swift_ft.train.step_digests`), results are kept: all of them for the first step of a
# rehearsal (with replicas, these are the reduced gradients), the small ones for the other steps.
#
#     (recording) ``record(all_of_it)`` → the step → ``drain``
#     (rehearsal) ``play(results)`` → the step; `blind` once a result is needed that was not kept

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


# The script's own computations in a recorded step: torch functions that change a tensor in place, called without
# gradients and outside of modules, as for an average of weights or a statistic. A loss does not show whether such state
# is captured, so the results of these calls are compared too (`swift_ft.train.step_digests`), by the script's line that
# has called them.


class ScriptCalls(TorchFunctionMode):
    """``begin`` … ``end``: a step. ``enters``, ``leaves``: a module, in which the mode is lifted, because it would
    double the time of each function that a model calls."""

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self._witness = witness
        self._inside = 0
        self._lifted = False

    def begin(self) -> None:
        self._inside, self._lifted = 0, False  # a forward that raised an error did not call `leaves`
        if not torch_private.has_compiled():  # else the mode would be compiled too
            torch_private.push_mode(self)

    def end(self) -> None:
        torch_private.remove_mode(self)

    def enters(self) -> None:
        if not self._inside and torch_private.is_innermost_mode(self):
            torch_private.remove_mode(self)
            self._lifted = True
        self._inside += 1

    def leaves(self) -> None:
        self._inside -= 1
        if not self._inside and self._lifted:
            torch_private.push_mode(self)
            self._lifted = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside or torch.is_grad_enabled() or not _is_in_place(getattr(func, "__name__", "")):
            return result
        line = "" if torch_private.is_in_backward() else _line()
        if line and self._witness.thorough:
            name = f"{func.__name__} in {line}"
            number = self._witness.count(CALLED, name)
            for slot, tensor in enumerate(tensors_of(result) or tensors_of(args[:1])):
                self._witness.saw(CALLED, 0, number, slot, tensor, name)
        return result


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")


def _line() -> str:
    """Returns the line of the script, or of a library that it uses; empty if the session itself made the call."""
    frame: Any = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "contextlib"):
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").partition(".")[0] == "swift_ft":
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


STEPS = 4
"""Steps after a checkpoint that are rehearsed, in addition to the state with which the next one begins."""
TIMES_AT_START = 2
"""Rehearsals of each rank at the start. One is not enough: at the first checkpoint there is little state yet that a new
process could lack."""

_ITEMS_MAX = 1000
"""Length of a list up to which differing items are named."""

Names = Callable[[], Mapping[torch.nn.Parameter, str]]


class ThoroughWatch:
    """Hooks through which a witness sees more in a thorough step than the channel's tensors."""

    def __init__(self, witness: Witness, stages: Sequence[Any], names: Names) -> None:
        """`stages`: this rank's, as far as they are created. `names`: names of their parameters."""
        self._witness = witness
        self._stages = stages
        self._names = names
        self._named: Mapping[torch.nn.Parameter, str] = {}
        self._hooks: list[Any] = []
        self._watched: set[torch.nn.Module] = set()
        self.calls = ScriptCalls(witness)

    def begin(self) -> None:
        self._witness.thorough = True
        self.calls.begin()
        self._named = self._names()
        for key, stage in enumerate(self._stages):
            self.also(stage, stage.submod, str(key) if key else "")

    def also(self, stage: Any, module: torch.nn.Module, name: str) -> None:
        """(the step has begun) Watches this module and those inside. `stage`: the stage that it belongs to, if any."""
        for of_part, part in _plain_modules(module, name):
            if part not in self._watched:
                self._watched.add(part)
                self._watch(stage, of_part or "(the whole)", part)

    def _watch(self, stage: Any, name: str, module: torch.nn.Module) -> None:
        for kind, register in (
            (ENTERS, module.register_forward_pre_hook),
            (LEAVES, module.register_forward_hook),
        ):
            hook = torch_private.ModuleHook(partial(self._passes, stage, kind, name))
            self._hooks.append(register(hook, with_kwargs=True))

    def _passes(self, stage: Any, kind: str, name: str, args: Any, kwargs: Any, outputs: Any = None) -> None:
        if kind == ENTERS:
            self.calls.enters()
        else:
            self.calls.leaves()
        if not self._witness.thorough or getattr(stage, "inferring", False):
            return
        number = self._witness.count(kind, name)
        for slot, tensor in enumerate(tensors_of((args, kwargs) if kind == ENTERS else outputs)):
            self._witness.saw(kind, 0, number, slot, tensor, name)

    def end(self) -> None:
        self._witness.thorough = False
        self.calls.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._watched.clear()

    def state(self, parts: Mapping[str, Any]) -> None:
        """Notes the state with which the step begins, by part names for messages."""
        for name, digest in told_digests(parts, whole=self._witness.whole):
            self._witness.note(Seen(STATE, 0, 0, 0, name), digest)

    def gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Notes complete gradients, before they are reduced, or applied where no reduction takes place."""
        for parameter in parameters if self._witness.thorough else ():
            name = self._named.get(parameter)
            if parameter.grad is not None and name is not None:
                number = self._witness.count(GRADIENT, name)
                self._witness.saw(GRADIENT, 0, number, 0, local(parameter.grad), name)


def _plain_modules(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields modules whose forward runs in Python. A compiled module is left out with all of its parts: hooks in it
    would be compiled too."""
    if torch_private.is_compiled(module):
        return
    yield name, module
    for part, child in module.named_children():
        yield from _plain_modules(child, f"{name}.{part}" if name else part)


class Recording(Participant):
    def __init__(self, site: Site, watch: ThoroughWatch, tape: Tape) -> None:
        self._site = site
        self._tape = tape
        self._watch = watch
        self._from: int | None = None
        self._generation = 0
        self.under_way = False

    def begins_at(self, version: int, view: pb.View | None, generation: int) -> bool:
        """Called when a checkpoint of this version is saved. Returns whether the steps from here on are recorded."""
        self._from, self._generation = None, generation
        if view is not None and self._wanted(version, view):
            self._from = version
        return self._from is not None

    def _wanted(self, version: int, view: pb.View) -> bool:
        if self._site.config.rehearse == "off" or view.vacant or self._site.config.staggered:
            return False
        done = next((known.done for known in view.rehearsals if known.rank == self._site.rank), 0)
        if done < TIMES_AT_START:
            return True
        turn = version // self._site.config.checkpoint_every % view.world_size
        return self._site.config.rehearse == "always" and turn == self._site.rank

    def abandon(self) -> None:
        self._from = None

    def begin_step(self, step: Step) -> None:
        if step.replaying:
            return
        self.under_way = self._from is not None and self._from <= step.number <= self._from + STEPS
        if self.under_way:
            self._watch.begin()
            self._tape.record(all_of_it=step.number == self._from)

    def step_begun(self, step: Step) -> None:
        if not self.under_way:
            return
        self._watch.state(self._site.state.begun_with())
        if self._from is not None and step.number == self._from + STEPS:
            self._write(step.number)  # only the state of this step is compared

    def end_step(self, step: Step) -> None:
        if self.under_way:
            self._write(step.number)

    def _write(self, step: int) -> None:
        given, gotten = self._tape.drain()
        self._stop()
        body = encoded(
            {**self._site.witness.transcript(), **given}, gotten, held=self._site.state.updates.held
        )
        rank, note = self._site.rank, self._site.channel.note
        note(transcripts(rank), RecordKey(step, self._generation, 0), body)
        for slot, tensor in enumerate(tensor for tensors in gotten.values() for tensor in tensors):
            note(results(rank), RecordKey(step, self._generation, slot), tensor)

    def drop_step(self) -> None:
        if self.under_way:
            self._stop()

    def _stop(self) -> None:
        self.under_way = False
        self._watch.end()
        self._tape.stop()


def encoded(transcript: Transcript, gotten: Results, *, held: bool) -> torch.Tensor:
    """Encodes as uint8 JSON: the transcript in its order, and the collectives whose results are recorded, in the order
    of their records. `held`: see `Updates.held`."""
    said = {
        "held": held,
        "seen": as_json(transcript),
        "results": [[*place, len(tensors)] for place, tensors in gotten.items()],
    }
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def decoded(record: Any) -> tuple[Transcript, list[tuple[str, int, int]], bool]:
    """Decodes `encoded`: (transcript; group, number in it and number of tensors of each recorded collective; held)."""
    said = json.loads(to_tensor(record).numpy().tobytes())
    gotten = [(group, number, count) for group, number, count in said["results"]]
    return from_json(said["seen"]), gotten, said["held"]


def told_digests(parts: Mapping[str, Any], *, whole: bool = False) -> Iterator[tuple[str, bytes]]:
    """Yields (name, digest) of each part of a state: tensors one by one, other values down to nested dictionaries and
    short lists. `whole`: see `digest_of`."""
    apart = {name: split(value, name) for name, value in parts.items()}
    found = iter(
        digests_of([tensor for tensors, _ in apart.values() for tensor in tensors.values()], whole=whole)
    )
    for name, (tensors, skeleton) in apart.items():
        yield from ((path, next(found)) for path in tensors)
        yield from _values(name, skeleton)


def _values(path: str, skeleton: Any) -> Iterator[tuple[str, bytes]]:
    if isinstance(skeleton, dict) and len(skeleton) == 1:
        [(kind, items)] = skeleton.items()
        if kind in ("dict", "ordered", "counter"):
            yield f"the keys of {path}", _digest([key for key, _ in items])
            for key, value in items:
                yield from _values(f"{path}.{key}", value)
            return
        if kind in ("list", "tuple") and len(items) <= _ITEMS_MAX and any(isinstance(i, dict) for i in items):
            for number, item in enumerate(items):
                yield from _values(f"{path}.{number}", item)
            return
    if not (isinstance(skeleton, dict) and "tensor" in skeleton):
        yield path, _digest(skeleton)


def _digest(told: Any) -> bytes:
    return xxhash.xxh3_128_digest(json.dumps(told).encode())
