"""Which runs are made, and the verdict."""

import json
from collections.abc import Sequence

from swift_ft.lab.determinism import command
from swift_ft.lab.determinism.verify import (
    DIFFERS,
    EQUAL,
    INCONCLUSIVE,
    NOT_DETERMINISTIC,
    Interrupted,
    Record,
    Run,
    Verdict,
    verify,
)
from tests.unit.determinism.runs import digest, record, run, steps, whole

STEPS, KILLED, RESUMED = 8, 6, 4


class Made:
    """Runs that are there already."""

    def __init__(self, second: Run | None = None, after: Sequence[Record] | None = None) -> None:
        self.asked: list[str] = []
        self.second = second or whole(STEPS)
        self.after = after if after is not None else steps(RESUMED, STEPS)
        self.before = steps(0, KILLED)

    def uninterrupted(self, name: str) -> Run:
        self.asked.append(name)
        return self.second if name == "second" else whole(STEPS)

    def interrupted(self, base: Run) -> Interrupted:
        assert base.num_steps == STEPS
        self.asked.append("interrupted")
        started = [self.after] if self.after else []
        return Interrupted(run(self.before, *started), KILLED, started, session=False)


def with_change(first: int, at: int, **changed: bytes) -> list[Record]:
    return [record(step, changed=changed if step == at else {}) for step in range(first, STEPS)]


def named(verdict: Verdict) -> tuple[str, list[str]]:
    return verdict.word, [cause.name for cause in verdict.causes]


def test_equal_takes_two_runs() -> None:
    made = Made()
    assert verify(made).word == EQUAL
    assert made.asked == ["first", "interrupted"]


def test_a_difference_is_looked_at_with_a_second_run() -> None:
    made = Made(after=with_change(RESUMED, 5, mean=b"?"))
    verdict = verify(made)
    assert named(verdict) == (DIFFERS, ["buffer-not-saved"])
    assert verdict.found is not None
    assert verdict.found.record.step == 5
    assert made.asked == ["first", "interrupted", "second"]


def test_a_second_run_that_differs_is_no_matter_of_checkpoints() -> None:
    verdict = verify(Made(run(with_change(0, 3, g=b"?")), with_change(RESUMED, 5, g=b"?")))
    assert named(verdict) == (NOT_DETERMINISTIC, ["unordered-reduction"])
    assert verdict.found is not None
    assert verdict.found.record.step == 3


def test_nor_is_a_difference_before_the_interruption() -> None:
    made = Made()
    made.before = with_change(0, 2, loss=b"?")[:KILLED]
    assert verify(made).word == NOT_DETERMINISTIC


def test_what_a_survivor_does_again_is_behind_the_interruption() -> None:
    """Also steps with smaller numbers, and the one that was cut short."""
    for behind in (with_change(RESUMED, RESUMED, loss=b"?"), with_change(KILLED, KILLED, loss=b"?")):
        made = Made()
        made.before = [*made.before, *behind]
        assert verify(made).word == DIFFERS


def test_a_generator_that_nobody_seeds_and_nothing_depends_on() -> None:
    def noted(first: int, state: str) -> list[Record]:
        return [record(step, changed={"torch": f"{state} {step}".encode()}) for step in range(first, STEPS)]

    verdict = verify(Made(run(noted(0, "b")), noted(RESUMED, "c")))
    assert (verdict.word, list(verdict.apart)) == (EQUAL, ["generator torch"])
    assert "note: torch begin with other states" in shown(verdict)
    # That is not so if two uninterrupted runs have it in common.
    assert verify(Made(after=noted(RESUMED, "c"))).word == DIFFERS


def test_nothing_was_resumed() -> None:
    assert verify(Made(after=[])).word == INCONCLUSIVE
    assert verify(Made(after=steps(0, STEPS))).word == INCONCLUSIVE


def test_a_step_that_a_started_process_need_not_do() -> None:
    """The others had saved it."""
    assert verify(Made(after=steps(KILLED + 1, STEPS))).word == EQUAL


def test_who_ends_too_early_or_too_late_differs() -> None:
    assert named(verify(Made(after=steps(RESUMED, STEPS - 1)))) == (DIFFERS, ["other-steps"])
    assert named(verify(Made(after=steps(RESUMED, STEPS + 1)))) == (DIFFERS, ["other-steps"])


def shown(verdict: Verdict) -> str:
    return "\n".join(command.verdict_lines(verdict))


def test_the_report() -> None:
    verdict = verify(Made(after=with_change(RESUMED, RESUMED, mean=digest("mean", 0), g=b"?")))
    assert shown(verdict).splitlines() == [
        "DIFFERS: 8 steps of 1 rank, killed in step 6, resumed at step 4: the run is not resumed exactly",
        "first difference: step 4, rank 0: buffer Net.mean",
        "likely cause: a buffer that is not saved (buffer-not-saved)",
        "  buffer Net.mean: the value of step 0 of the uninterrupted run",
        "also different there: 1",
        "  the gradient of parameter Net.w",
    ]
    said = json.loads(json.dumps(command.as_json(verdict)))
    assert (said["verdict"], said["first_difference"]) == ("DIFFERS", {"step": 4, "rank": 0})
    assert said["differences"] == ["buffer Net.mean", "the gradient of parameter Net.w"]
    assert [cause["name"] for cause in said["causes"]] == ["buffer-not-saved"]
    assert shown(verify(Made())).startswith("EQUAL: 8 steps of 1 rank, killed in step 6, resumed at step 4")
    assert "had nothing left to do" in shown(verify(Made(after=[])))
