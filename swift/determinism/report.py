"""A verdict in words, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from swift.determinism.compare import ABSENT, STEPS, Difference
from swift.determinism.verify import DIFFERS, EQUAL, INCONCLUSIVE, NOT_DETERMINISTIC, Verdict

_SHOWN_MAX = 5
_SINGULAR = {
    "hyperparameters": "hyperparameter",
    "parameters": "parameter",
    "optimizer": "optimizer state",
    "buffers": "buffer",
    "objects": "registered object",
    "rng": "generator",
    "inputs": "module",
    "outputs": "module",
    "loss": "the",
    "gradients": "gradient of",
}


def named(difference: Difference) -> str:
    """The difference as a line of the report names it."""
    if difference.kind == STEPS:
        return f"rank {difference.rank}: the step itself"
    return f"rank {difference.rank}: {_SINGULAR[difference.kind]} {difference.name}"


def lines(verdict: Verdict) -> Iterator[str]:
    """For a person."""
    yield f"{verdict.word}: {_summary(verdict)}"
    if verdict.found is not None:
        found = verdict.found
        where = "the state at the end" if found.last else f"step {found.step}"
        yield f"first difference: {where}, {named(found.first)}"
        for number, cause in enumerate(verdict.causes):
            yield f"{'likely cause' if number == 0 else 'and'}: {cause.words} ({cause.name})"
            yield from (f"  {words}" for words in cause.evidence)
        rest = found.differences[1:]
        if rest:
            yield f"also different there: {len(rest)}"
            yield from (f"  {named(difference)}" for difference in rest[:_SHOWN_MAX])
    if verdict.apart:
        yield (
            f"note: {', '.join(verdict.apart)} begin with other states in each run (not seeded), and nothing that was "
            "recorded depends on them"
        )


def _summary(verdict: Verdict) -> str:
    steps, ranks = verdict.base.num_steps, len(verdict.base.ranks)
    killed = f"killed in step {verdict.interrupted.step}"
    at = verdict.interrupted.resumed_at
    resumed = (
        f"{killed}, resumed at step {at}" if at is not None else f"{killed}, gone on without the lost rank"
    )
    size = f"{steps} steps of {ranks} rank{'s' if ranks > 1 else ''}"
    return {
        EQUAL: f"{size}, {resumed}: every recorded bit is that of an uninterrupted run",
        DIFFERS: f"{size}, {resumed}: the run is not resumed exactly",
        NOT_DETERMINISTIC: f"{size}: two runs differ without any interruption",
        INCONCLUSIVE: f"{size}, {killed}: {_nothing_shown(at)} (--kill rank=R,step=S chooses another step)",
    }[verdict.word]


def _nothing_shown(resumed_at: int | None) -> str:
    if resumed_at is None:
        return "the script, started again, had nothing left to do"
    return "the script began again at step 0; it has found no checkpoint, or has saved none by then"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """For a program."""
    found = verdict.found
    return {
        "verdict": verdict.word,
        "steps": verdict.base.num_steps,
        "ranks": list(verdict.base.ranks),
        "killed_in_step": verdict.interrupted.step,
        "resumed_at_step": verdict.interrupted.resumed_at,
        "first_difference": None
        if found is None
        else {"step": found.step, "at_end": found.last, **_difference(found.first)},
        "differences": [_difference(difference) for difference in found.differences] if found else [],
        "causes": [{**asdict(cause), "words": cause.words} for cause in verdict.causes],
        "unseeded_unused": list(verdict.apart),
        "settings": {"uninterrupted": dict(found.base.settings), "other": dict(found.record.settings)}
        if found is not None and found.base is not None
        else {},
    }


def _difference(difference: Difference) -> dict[str, Any]:
    values = {
        "uninterrupted": None if difference.base == ABSENT else difference.base,
        "other": None if difference.other == ABSENT else difference.other,
    }
    return {"rank": difference.rank, "kind": difference.kind, "name": difference.name, **values}
