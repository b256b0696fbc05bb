"""Which runs are made, and the verdict."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from swift.determinism import causes, report
from swift.determinism.records import Record, Run
from swift.determinism.verify import (
    DIFFERS,
    EQUAL,
    INCONCLUSIVE,
    NOT_DETERMINISTIC,
    Interrupted,
    Verdict,
    verify,
)
from tests.unit.determinism.runs import digest, process, record, run, whole

STEPS, KILLED, RESUMED = 8, 6, 4


class Made:
    """Runs that are there already."""

    def __init__(self, second: Run | None = None, after: Sequence[Record] | None = None) -> None:
        self.asked: list[str] = []
        self.second = second or whole(STEPS)
        self.after = after if after is not None else [record(step) for step in range(RESUMED, STEPS)]
        self.before = [record(step) for step in range(KILLED)]
        self.fixed: dict[str, Run] = {}

    def uninterrupted(self, name: str, environment: Mapping[str, str]) -> Run:
        self.asked.append(name)
        return self.second if name == "second" else self.fixed.get(name, whole(STEPS))

    def interrupted(self, base: Run) -> Interrupted:
        assert base.num_steps == STEPS
        self.asked.append("interrupted")
        resumed = self.after[0].step if self.after else None
        processes = (process(self.before), process(self.after, at=1.0))
        return Interrupted(run=run(*processes), step=KILLED, resumed_at=resumed, session=False)


def with_change(first: int, at: int, **changed: Mapping[str, str]) -> list[Record]:
    return [record(step, **(changed if step == at else {})) for step in range(first, STEPS)]


def test_equal_takes_two_runs() -> None:
    made = Made()
    assert verify(made).word == EQUAL
    assert made.asked == ["first", "interrupted"]


def test_a_difference_is_looked_at_with_a_second_run() -> None:
    made = Made(after=with_change(RESUMED, 5, buffers={"mean": digest("?")}))
    verdict = verify(made)
    assert (verdict.word, [cause.name for cause in verdict.causes]) == (DIFFERS, [causes.BUFFER])
    assert verdict.found is not None
    assert verdict.found.step == 5
    assert made.asked == ["first", "interrupted", "second"]


def test_a_second_run_that_differs_is_no_matter_of_checkpoints() -> None:
    changed = {"gradients": {"w": digest("?")}}
    second = run(process(with_change(0, 3, **changed)))
    verdict = verify(Made(second, with_change(RESUMED, 5, **changed)))
    assert (verdict.word, [cause.name for cause in verdict.causes]) == (NOT_DETERMINISTIC, [causes.THREADS])
    assert verdict.found is not None
    assert verdict.found.step == 3


def test_nor_is_a_difference_before_the_interruption() -> None:
    made = Made()
    made.before = [record(step, **({"loss": {"loss 0": "?"}} if step == 2 else {})) for step in range(KILLED)]
    assert verify(made).word == NOT_DETERMINISTIC


def test_what_a_survivor_does_again_is_behind_the_interruption() -> None:
    """Also steps with smaller numbers, and the one that was cut short."""
    for behind in (
        with_change(RESUMED, RESUMED, loss={"loss 0": "?"}),
        with_change(KILLED, KILLED, loss={"loss 0": "?"}),
    ):
        made = Made()
        made.before += behind
        assert verify(made).word == DIFFERS


def test_causes_are_taken_away_one_by_one() -> None:
    changed = {"gradients": {"w": digest("?")}}
    second = run(process(with_change(0, 3, **changed), hash="2"))
    made = Made(second, with_change(RESUMED, 5, **changed))
    made.fixed = {"hash-order-2": second}
    assert [cause.name for cause in verify(made).causes] == [causes.THREADS]
    assert made.asked[3:] == ["hash-order-1", "hash-order-2", "thread-count-1", "thread-count-2"]
    made = Made(second, with_change(RESUMED, 5, **changed))
    assert [cause.name for cause in verify(made).causes] == [causes.HASH]
    assert made.asked[3:] == ["hash-order-1", "hash-order-2"]
    made = Made(second, with_change(RESUMED, 5, **changed))
    made.fixed = {f"{cause}-2": second for cause in ("hash-order", "thread-count")}
    assert [cause.name for cause in verify(made).causes] == [causes.ORDER]


def test_a_generator_that_nobody_seeds_and_nothing_depends_on() -> None:
    def noted(first: int, state: str) -> list[Record]:
        return [record(step, rng={"torch": digest(state, step)}) for step in range(first, STEPS)]

    verdict = verify(Made(run(process(noted(0, "b"))), noted(RESUMED, "c")))
    assert (verdict.word, list(verdict.apart)) == (EQUAL, ["torch"])
    # That is not so if two uninterrupted runs have it in common.
    assert verify(Made(after=noted(RESUMED, "c"))).word == DIFFERS


def test_nothing_was_resumed() -> None:
    assert verify(Made(after=[])).word == INCONCLUSIVE
    assert verify(Made(after=[record(step) for step in range(STEPS)])).word == INCONCLUSIVE


def test_a_step_that_only_the_killed_rank_lacks() -> None:
    """The others had saved it."""
    assert verify(Made(after=[record(step) for step in range(KILLED + 1, STEPS)])).word == EQUAL
    made = Made(after=[record(step) for step in range(KILLED + 1, STEPS)])
    made.before.pop()
    assert verify(made).word == DIFFERS


def shown(verdict: Verdict) -> str:
    return "\n".join(report.lines(verdict))


def test_the_report() -> None:
    lost = with_change(RESUMED, RESUMED, buffers={"mean": digest("mean", 0)}, gradients={"w": digest("?")})
    lost[0] = replace(lost[0], unsaved=("mean",))
    verdict = verify(Made(after=lost))
    assert shown(verdict).splitlines() == [
        "DIFFERS: 8 steps of 1 rank, killed in step 6, resumed at step 4: the run is not resumed exactly",
        "first difference: step 4, rank 0: buffer mean",
        "likely cause: a buffer that is not saved (buffer-not-saved)",
        "  mean has the value of step 0 of the uninterrupted run",
        "  mean is registered with persistent=False",
        "also different there: 1",
        "  rank 0: gradient of w",
    ]
    said = json.loads(json.dumps(report.as_json(verdict)))
    assert said["verdict"] == "DIFFERS"
    assert said["first_difference"]["kind"] == "buffers"
    assert [cause["name"] for cause in said["causes"]] == ["buffer-not-saved"]
    assert len(said["differences"]) == 2
    assert shown(verify(Made())).startswith("EQUAL: 8 steps of 1 rank, killed in step 6, resumed at step 4")
    assert "had nothing left to do" in shown(verify(Made(after=[])))
