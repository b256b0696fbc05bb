"""`swift-ft run --warm-up` with scripts of strangers (trainers/warmed_up.py): real processes, real SIGKILL."""

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.launch.spares import FAILURES_MAX
from tests.integration.forked import Forks
from tests.integration.trainer_world import Run, run_trainer, undisturbed

pytestmark = pytest.mark.timeout(240)

MATRIX = pytest.mark.matrix
TRAINER, STEPS, RANKS, VICTIM = "warmed_up.py", 12, 2, 1
Event = dict[str, Any]


def run(directory: Path, mode: str, ready: Any) -> Run:
    """Rank 1 is lost in the middle of a step, once `ready` says so."""
    fault = {"rank": VICTIM, "step": 6, "phase": "backward", "microbatch": 1, "hold": True}
    return run_trainer(
        directory,
        TRAINER,
        mode,
        STEPS,
        ranks=RANKS,
        faults=[fault],
        spares=1,
        saved=4,
        launcher_flags=["--warm-up"],
        ready=ready,
    )


def named(seen: list[Event], event: str) -> list[Event]:
    return [each for each in seen if each["event"] == event]


def warm(seen: list[Event]) -> bool:
    return any(event["rank"] == VICTIM and not event["why_not"] for event in named(seen, "warmed_up"))


def replacement(found: Run) -> Event:
    """Of the lost rank."""
    first, second = (event for event in named(found["events"], "spare_assigned") if event["rank"] == VICTIM)
    assert first["pid"] != second["pid"]
    return second


def runs(directory: Path, pid: int) -> list[dict[str, Any]]:
    """What the script has found each time that this process ran it."""
    return [json.loads(line) for line in (directory / "digests" / f"found-{pid}").read_text().splitlines()]


def check_bits(found: Run, twin: Run) -> None:
    assert not named(found["events"], "not_exact")
    for rank in range(RANKS):
        bits, wanted = (each["digests"][f"bits-{rank}.json"] for each in (found, twin))
        assert str(STEPS - 1) in bits
        assert bits.items() <= wanted.items()


@pytest.fixture(scope="module")
def twin(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in which nothing fails and no spare is warmed up."""
    return undisturbed(forks, tmp_path_factory.mktemp("twin"), TRAINER, "plain", STEPS, ranks=RANKS)


@pytest.mark.parametrize("mode", ["plain", pytest.param("forks", marks=MATRIX)])
def test_the_process_is_as_new_and_the_run_ends_with_the_same_bits(
    mode: str, twin: Run, tmp_path: Path
) -> None:
    found = run(tmp_path, mode, warm)

    used = replacement(found)
    assert used["warmed_up"]
    *rehearsed, real = runs(tmp_path, used["pid"])
    assert [each.pop("warming") for each in rehearsed] == [True, True]
    assert not real.pop("warming")
    assert [each.pop("master") for each in rehearsed] == [False, False], "it is told of no peer"
    assert real.pop("master")
    assert rehearsed == [real, real], "each time the script finds what it has found the first time"
    check_bits(found, twin)
    assert "trainer: warming=True" not in found["output"]
    assert len([e for e in named(found["events"], "joined") if e["rank"] == VICTIM]) == 2, "it joins once"


FAIL = {
    "raises": "ValueError: not without the others",
    "ends": "the script has ended with exit code 0",
    "exits": "its process has ended (exit code 7)",
    "once": "the second time: RuntimeError: Tried to register an operator",
    "patches": "the script computes other gradients the second time",
    "thread": "the script has left a thread running (mine)",
    "workers": "the script has left processes running",
    "keeps": "the script's model stays in memory",
}


@pytest.mark.parametrize(
    "mode",
    [mode if mode == "patches" else pytest.param(mode, marks=MATRIX) for mode in FAIL],
)
def test_what_is_not_as_it_was_is_not_used_and_after_three_there_are_no_more(
    mode: str, forks: Forks, tmp_path: Path
) -> None:
    twin = undisturbed(forks, tmp_path / "twin", TRAINER, mode, STEPS, ranks=RANKS)
    line = f"swift: spares are not warmed up any more, after {FAILURES_MAX} that could not be: {FAIL[mode]}"

    found = run(tmp_path / "lost", mode, lambda seen: named(seen, "warm_ups_given_up"))

    used = replacement(found)
    assert not used["warmed_up"]
    assert [each["warming"] for each in runs(tmp_path / "lost", used["pid"])] == [False]
    assert found["output"].count(line) == 1
    check_bits(found, twin)


def test_a_loss_does_not_wait_for_a_warm_up(twin: Run, tmp_path: Path) -> None:
    found = run(tmp_path, "hangs", lambda seen: named(seen, "warm_up_begin"))

    warming = [event["pid"] for event in named(found["events"], "warm_up_begin")]
    used = replacement(found)
    assert used["pid"] not in warming
    ended = [event for event in named(found["events"], "spare_exit") if event["pid"] == warming[0]]
    assert ended[0]["t"] < named(found["events"], "replay_end")[0]["t"], "it takes nothing from the recovery"
    check_bits(found, twin)
