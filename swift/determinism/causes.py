"""From the first values that differ to what has most likely made them differ, with the evidence for it. Pure.

Two cases have causes of their own: two uninterrupted runs differ (`of_chance`), and only a run that was interrupted
does (`of_resumption`). A cause is named because of something that was recorded, or because all else was recorded and is
equal; its evidence says which.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from swift.determinism.compare import ABSENT, Difference, Divergence, drawn
from swift.determinism.compare import STEPS as MISSING
from swift.determinism.records import (
    BUFFERS,
    GRADIENTS,
    HYPERPARAMETERS,
    INPUTS,
    LOSS,
    OBJECTS,
    OPTIMIZER,
    OUTPUTS,
    PARAMETERS,
    RNG,
    STATE,
    Record,
    Run,
)

UNSEEDED = "unseeded-rng"
NOT_RESTORED = "rng-not-restored"
DATA = "data-position"
THREADS = "thread-count"
SETTING = "setting"
ORDER = "unordered-reduction"
HASH = "hash-order"
BUFFER = "buffer-not-saved"
MOMENTUM = "optimizer-not-saved"
SCHEDULER = "scheduler-not-saved"
WEIGHTS = "parameters-not-saved"
OBJECT = "object-not-saved"
HIDDEN = "hidden-state"
STEPS = "other-steps"
INEXACT = "inexact-strategy"

WORDS = {
    UNSEEDED: "a random generator that is not seeded",
    NOT_RESTORED: "the state of a random generator is not restored",
    DATA: "the data position is not restored",
    THREADS: "another number of threads",
    SETTING: "another setting of torch",
    ORDER: "a reduction whose order is not fixed",
    HASH: "the order of a set or a dict (PYTHONHASHSEED)",
    BUFFER: "a buffer that is not saved",
    MOMENTUM: "the optimizer's state is not saved",
    SCHEDULER: "the scheduler is not saved, or a hyperparameter is not restored",
    WEIGHTS: "parameters that are not saved, or not with all bits",
    OBJECT: "the state of a registered object is not restored",
    HIDDEN: "something that a step depends on and that is neither parameter, buffer, optimizer state, input nor "
    "generator: an attribute, a target, a variable of the script",
    STEPS: "another number of steps",
    INEXACT: "the strategy does not lead to the bits of a run that never failed",
}
THREADS_SETTING = "threads"
_ROUNDING = 1e-3
"""Norms of two gradients that differ by their rounding alone are closer to each other, in relation."""
_NAMED_MAX = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """What has most likely made a value differ."""

    name: str
    evidence: tuple[str, ...]

    @property
    def words(self) -> str:
        return WORDS[self.name]


def of_chance(base: Run, found: Divergence, *, fixed_by: Collection[str] = ()) -> Cause:
    """Of a difference between two uninterrupted runs. `fixed_by`: causes that were taken away (one hash seed, one
    thread), each in two more runs, which were equal then."""
    for name, words in (
        (HASH, "with PYTHONHASHSEED=0 two uninterrupted runs are equal"),
        (THREADS, "with one thread two uninterrupted runs are equal"),
    ):
        if name in fixed_by:
            return Cause(name=name, evidence=(words,))
    if found.first.kind == MISSING:
        return Cause(name=STEPS, evidence=(_steps(found),))
    if generators := _generators(base, found):
        states = f"two uninterrupted runs have other states of {_listed(generators)}, which they draw from"
        return Cause(name=UNSEEDED, evidence=(states,))
    if settings := _settings(found):
        return settings
    if found.first.kind in (OUTPUTS, LOSS, GRADIENTS):
        return Cause(name=ORDER, evidence=_of_computation(found))
    what = f"{found.first.kind} differ, and no default generator of torch, random or numpy does"
    return Cause(name=UNSEEDED, evidence=(f"{what}: a generator of the script's own, or an order of files",))


def candidates(base: Run, chance: Divergence) -> list[str]:
    """What may have made two uninterrupted runs differ, and can be taken away to see whether they are equal then."""
    if chance.first.kind == MISSING or _generators(base, chance):
        return []
    found = []
    begun = next((p.begin.hash for p in base.processes if p.rank == chance.process.rank), "")
    if begun != chance.process.begin.hash:
        found.append(HASH)
    threads = chance.base.settings.get(THREADS_SETTING, "1") if chance.base is not None else "1"
    if threads != "1" and chance.first.kind in (OUTPUTS, LOSS, GRADIENTS, PARAMETERS):
        found.append(THREADS)
    return found


def of_resumption(base: Run, found: Divergence, *, inexact: str = "") -> list[Cause]:
    """Of a difference that an interruption makes: the first cause, and others that show in the same step. `inexact`:
    what was asked for and promises no bits."""
    if inexact:
        return [Cause(name=INEXACT, evidence=(f"{inexact} was asked for, and allowed",))]
    if found.first.kind == MISSING:
        return [Cause(name=STEPS, evidence=(_steps(found),))]
    causes = [
        made
        for kind in dict.fromkeys(d.kind for d in found.differences if d.kind in STATE)
        if kind != RNG and (made := _BY_KIND[kind](base, found, found.of(kind)))
    ]
    external = [d for d in found.of(INPUTS) if not d.received]
    generators = _generators(base, found)
    if external and (moved := _elsewhere(base, external[0])) is not None:
        words = f"the inputs of step {found.step} are those of step {moved} of the uninterrupted run"
        causes.append(Cause(name=DATA, evidence=(words,)))
    if generators and (found.of(RNG) or external or not causes):
        causes.append(_not_restored(base, found, generators))
    elif external and not any(cause.name == DATA for cause in causes):
        words = (
            "the inputs are those of no step of the uninterrupted run, and no default generator differs: they come "
            "from a generator of the script's own, or from another place"
        )
        causes.append(Cause(name=DATA, evidence=(words,)))
    if not causes:
        causes.append(_settings(found) or Cause(name=_unseen(found), evidence=_of_computation(found)))
    return causes


def _unseen(found: Divergence) -> str:
    """All that is recorded before it is equal."""
    return ORDER if found.first.kind == GRADIENTS and _is_rounding(found) else HIDDEN


# --- the state that a step begins with ---


def _hyperparameters(base: Run, found: Divergence, differences: list[Difference]) -> Cause:
    return Cause(name=SCHEDULER, evidence=_values(base, differences))


def _parameters(base: Run, found: Divergence, differences: list[Difference]) -> Cause:
    return Cause(name=WEIGHTS, evidence=_values(base, differences))


def _optimizer(base: Run, found: Divergence, differences: list[Difference]) -> Cause:
    assert found.base is not None
    theirs = {value: name for name, value in found.base.of(OPTIMIZER).items()}
    swapped = [d for d in differences if d.other != d.base and theirs.get(d.other, d.name) != d.name]
    swapped = [d for d in swapped if _is_digest(d.other)]
    if swapped:
        first = swapped[0]
        return Cause(
            name=HASH,
            evidence=(
                f"{first.name} has the value that {theirs[first.other]} has in the uninterrupted run: the optimizer "
                "was given its parameters in another order",
            ),
        )
    return Cause(name=MOMENTUM, evidence=_values(base, differences))


def _buffers(base: Run, found: Divergence, differences: list[Difference]) -> Cause:
    evidence = _values(base, differences)
    unsaved = [d.name for d in differences if d.name in found.record.unsaved]
    if unsaved:
        evidence += (f"{_listed(unsaved)} is registered with persistent=False",)
    return Cause(name=BUFFER, evidence=evidence)


def _objects(base: Run, found: Divergence, differences: list[Difference]) -> Cause:
    return Cause(name=OBJECT, evidence=_values(base, differences))


_BY_KIND: dict[str, Callable[[Run, Divergence, list[Difference]], Cause]] = {
    HYPERPARAMETERS: _hyperparameters,
    PARAMETERS: _parameters,
    OPTIMIZER: _optimizer,
    BUFFERS: _buffers,
    OBJECTS: _objects,
}


def _values(base: Run, differences: list[Difference]) -> tuple[str, ...]:
    """What can be said of a few of them."""
    said = []
    for difference in differences[:_NAMED_MAX]:
        if difference.other == ABSENT:
            said.append(f"{difference.name} is absent")
        elif difference.base == ABSENT:
            said.append(f"{difference.name} is there, and absent in the uninterrupted run")
        elif (step := _elsewhere(base, difference)) is not None:
            shown = "" if _is_digest(difference.other) else f" ({difference.other})"
            said.append(f"{difference.name} has the value of step {step} of the uninterrupted run{shown}")
        elif not _is_digest(difference.other):
            said.append(f"{difference.name} is {difference.other}, and {difference.base} uninterrupted")
        else:
            said.append(f"{difference.name} has a value that it has in no step of the uninterrupted run")
    if len(differences) > _NAMED_MAX:
        said.append(f"and {len(differences) - _NAMED_MAX} more")
    return tuple(said)


def _is_digest(value: str) -> bool:
    return len(value) == 32 and set(value) <= set("0123456789abcdef")


def _elsewhere(base: Run, difference: Difference) -> int | None:
    """Another step of the uninterrupted run in which the rank has had this value."""
    for record in base.history(difference.rank):
        if record.of(difference.kind).get(difference.name) == difference.other:
            return record.step
    return None


# --- generators, settings, computation ---


def _generators(base: Run, found: Divergence) -> list[str]:
    """Those whose state differs where the step begins, and that have been drawn from by then."""
    if found.base is None:
        return []
    begun = next((p for p in base.processes if p.rank == found.process.rank), None)
    used = drawn(base) | _drawn_before(found.base, begun.begin.rng if begun is not None else {})
    mine, theirs = found.base.of(RNG), found.record.of(RNG)
    return [name for name, state in mine.items() if name in used and theirs.get(name) != state]


def _drawn_before(first: Record, begun: "dict[str, str] | object") -> set[str]:
    states = begun if isinstance(begun, dict) else {}
    return {name for name, state in first.of(RNG).items() if states.get(name, state) != state}


def _not_restored(base: Run, found: Divergence, generators: list[str]) -> Cause:
    said = [f"the state of {_listed(generators)} differs where the step begins"]
    for name in generators:
        state = found.record.of(RNG)[name]
        for record in base.history(found.process.rank):
            if record.of(RNG).get(name) == state:
                said.append(f"{name} has the state of step {record.step} of the uninterrupted run")
                break
    return Cause(name=NOT_RESTORED, evidence=tuple(said))


def _settings(found: Divergence) -> Cause | None:
    if found.base is None:
        return None
    mine, theirs = found.base.settings, found.record.settings
    other = [name for name in {**mine, **theirs} if theirs.get(name) != mine.get(name)]
    if not other:
        return None
    evidence = tuple(
        f"{name}: {mine.get(name)} uninterrupted, {theirs.get(name)} otherwise" for name in other
    )
    return Cause(name=THREADS if THREADS_SETTING in other else SETTING, evidence=evidence)


def _is_rounding(found: Divergence) -> bool:
    """The gradients that differ have all but the same norms."""
    if found.base is None:
        return False
    mine, theirs = found.base.norms, found.record.norms
    pairs = [
        (mine[d.name], theirs[d.name]) for d in found.of(GRADIENTS) if d.name in mine and d.name in theirs
    ]
    return bool(pairs) and all(abs(a - b) <= _ROUNDING * max(abs(a), abs(b)) for a, b in pairs)


def _of_computation(found: Divergence) -> tuple[str, ...]:
    """All that a step begins with is equal, and what it computes is not."""
    kinds = [kind for kind in (INPUTS, OUTPUTS, LOSS) if kind not in found.kinds]
    before = found.first.kind
    equal = [kind for kind in (PARAMETERS, BUFFERS, *kinds) if kind != before]
    said = [f"{_differ(before)}; {', '.join(equal)}, generators and settings of torch are equal"]
    if found.of(GRADIENTS) and _is_rounding(found):
        said.append("the norms of the gradients are equal but for rounding")
    return tuple(said)


def _differ(kind: str) -> str:
    return "the loss differs" if kind == LOSS else f"{kind} differ"


def _steps(found: Divergence) -> str:
    done, lacking = found.first.base != ABSENT, found.first.other == ABSENT
    who = "the uninterrupted run" if done and lacking else "the other run"
    return f"only {who} has done step {found.step}"


def _listed(names: list[str]) -> str:
    shown = names[:_NAMED_MAX]
    return ", ".join(shown) + (f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else "")
