"""Transcript of a step: digests of its tensors in the order of the computation, and differences between two runs. Pure.

In a rank, `swift_ft.train.step_digests` fills it in and compares on the fly. `swift_ft.lab.determinism` compares the
files of two runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

INPUT, TARGET, RESULT, LOSS, OUTPUT = "input", "target", "result", "loss", "output"
# Kinds recorded in thorough steps only.
STATE, ENTERS, LEAVES, SENT, GIVEN, GRADIENT = "state", "enters", "leaves", "sent", "given", "gradient"
CALLED = "called"

_WORDS = {
    INPUT: "external input {slot} of stage {stage}, microbatch {microbatch},",
    TARGET: "the target of stage {stage}, microbatch {microbatch},",
    RESULT: "the result of collective {slot}",
    LOSS: "the loss of microbatch {microbatch}",
    OUTPUT: "output {slot} of the module in its forward {microbatch}",
    STATE: "{name}",
    ENTERS: "input {slot} of module {name} in its forward {microbatch}",
    LEAVES: "output {slot} of module {name} for equal inputs, in its forward {microbatch},",
    SENT: "what stage {stage} sends, microbatch {microbatch},",
    GIVEN: "what is given to collective {microbatch} of group {name}",
    GRADIENT: "the gradient of parameter {name}",
    CALLED: "what {name} gives, call {microbatch},",
}
_LOADER = "is what it comes from registered (session.register(loader=...))?"
_KEPT = (
    "the module keeps something that is not captured: make it a buffer, return it by get_extra_state, or register the "
    "object that holds it"
)
_CAPTURED = "the step depends on something that is not captured: register it (session.register(NAME=...))"
_OBJECT = "state_dict must hold all of it that changes, and load_state_dict must set all of it"
_ADVICE = {
    INPUT: _LOADER,
    TARGET: _LOADER,
    LEAVES: _KEPT,
    OUTPUT: _KEPT,
    GRADIENT: "its backward depends on something that is not captured (a hook, a function of its own): register it",
}


class Seen(NamedTuple):
    kind: str
    stage: int
    microbatch: int
    slot: int
    name: str = ""

    def what(self) -> str:
        return _WORDS[self.kind].format(**self._asdict())


Transcript = Mapping[Seen, bytes]
"""Digests of one step, in the order in which they were taken."""


class Difference(NamedTuple):
    seen: Seen
    before: bytes | None
    """Digest in the first run; None if the tensor was absent."""
    now: bytes | None

    def words(self, step: int) -> str:
        what = f"{self.seen.what()} of step {step}"
        if self.before is None:
            return f"{what} was not there the first time"
        if self.now is None:
            return f"{what} was there the first time, and is not now"
        return f"{what} differs from the first time: {self._advice()}"

    def _advice(self) -> str:
        if self.seen.kind == STATE and self.seen.name.startswith("register("):
            return _OBJECT
        return _ADVICE.get(self.seen.kind, _CAPTURED)


def differences(before: Transcript, now: Transcript) -> Iterator[Difference]:
    """Yields the differences in the order of the computation: the first causes the others."""
    for seen in {**before, **now}:
        if before.get(seen) != now.get(seen):
            yield Difference(seen, before.get(seen), now.get(seen))


def as_json(transcript: Transcript) -> list[Any]:
    return [[*seen, digest.hex()] for seen, digest in transcript.items()]


def from_json(told: Sequence[Any]) -> Transcript:
    return {Seen(*entry[:-1]): bytes.fromhex(entry[-1]) for entry in told}
