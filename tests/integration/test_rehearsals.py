"""Rehearsals of recoveries in real jobs (trainers/rehearsed.py): what they find before anything fails, who is told of
it, and that a real recovery does not wait for one."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.drill_world import drill
from tests.integration.forked import Forks
from tests.integration.trainer_world import Run, named, run_trainer, undisturbed

pytestmark = pytest.mark.timeout(400)

MATRIX = pytest.mark.matrix
TRAINER, RANKS = "rehearsed.py", 2
IN_MODULE = ("output 0 of module hidden for equal inputs, in its forward",)
IN_INPUT = (
    "external input 0 of stage 0, microbatch 0, of step",
    "the target of stage 1, microbatch 0, of step",
)

KINDS = {
    "counter": IN_MODULE,
    "ids": IN_MODULE,
    "iterator": IN_INPUT,
    "file": IN_INPUT,
}
"""Where it is kept -> what is named."""


def rehearsed(
    directory: Path,
    layout: str,
    kind: str,
    steps: int,
    awaited: list[tuple[int, int]],
    *flags: str,
    code_wanted: int = 0,
    spares: int = 0,
) -> Run:
    return run_trainer(
        directory,
        TRAINER,
        layout,
        kind,
        steps,
        *[f"{rank}@{version}" for rank, version in awaited],
        ranks=RANKS,
        faults=[],
        spares=spares,
        code_wanted=code_wanted,
        launcher_flags=flags or ("--rehearse", "start"),
    )


def both(*versions: int) -> list[tuple[int, int]]:
    return [(rank, version) for version in versions for rank in range(RANKS)]


def launcher(directory: Path) -> list[str]:
    return (directory / "output" / "launcher.txt").read_text().splitlines()


def status(directory: Path) -> list[str]:
    return (directory / "digests" / "status.txt").read_text().splitlines()


def ended(run: Run) -> list[dict[str, Any]]:
    """The ends of its rehearsals, without those that the job's own end has cut short."""
    return [end for end in named(run, "rehearsal_end") if not end["passing"]]


def check_found(run: Run, directory: Path, kind: str) -> None:
    """Nothing has failed, all could be rehearsed, and the first difference is of where it is kept."""
    ends = ended(run)
    assert {(end["rank"], end["version"]) for end in ends} == set(both(0, 5))
    assert [end["why_not"] for end in ends] == [""] * len(ends)
    different = [end["difference"] for end in ends if end["difference"]]
    assert different
    assert all(words.startswith(KINDS[kind]) for words in different), different
    assert not named(run, "plan")
    reason = named(run, "not_exact")[0]["reason"]
    assert reason.partition(": ")[2] in different
    assert any("not exact since version " in line for line in launcher(directory))
    assert any(line.startswith("not exact since version ") for line in status(directory))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(
            layout,
            kind,
            marks=() if (layout, kind) in [("pipeline", "counter"), ("replicas", "file")] else MATRIX,
        )
        for layout in ("pipeline", "replicas")
        for kind in KINDS
    ],
)
def test_what_is_hidden_is_named_before_anything_fails(layout: str, kind: str, tmp_path: Path) -> None:
    run = rehearsed(tmp_path, layout, kind, 10, both(0, 5))
    check_found(run, tmp_path, kind)


@pytest.mark.parametrize("layout", ["pipeline", pytest.param("replicas", marks=MATRIX)])
def test_where_nothing_is_hidden_all_is_equal_and_the_bits_are_those_without(
    layout: str, forks: Forks, tmp_path: Path
) -> None:
    run = rehearsed(tmp_path / "run", layout, "nothing", 10, both(0, 5))
    twin = undisturbed(forks, tmp_path / "twin", TRAINER, layout, "nothing", 10, ranks=RANKS)
    assert sorted((end["rank"], end["version"]) for end in ended(run)) == sorted(both(0, 5))
    assert {(end["difference"], end["why_not"]) for end in ended(run)} == {("", "")}
    assert not named(run, "not_exact")
    for name, digests in twin["digests"].items():
        assert run["digests"][name] == digests, name
    line = "rehearsed: ranks 0, 1 at version 5, "
    assert any(each.startswith(line) and each.endswith(", equal") for each in status(tmp_path / "run"))
    assert launcher(tmp_path / "run")[-1].startswith(f"swift: job drill: {line}")
    assert "not rehearsed" in status(tmp_path / "twin")


@MATRIX
def test_a_bit_that_flips_in_the_middle_of_a_run_is_named(tmp_path: Path) -> None:
    """Behind its start one rank after the other is rehearsed: from version 15 on it is rank 1's turn."""
    awaited = [*both(0, 5), (0, 10), (1, 15)]
    run = rehearsed(tmp_path, "pipeline", "flips", 20, awaited, "--rehearse", "always")
    ends = {(end["rank"], end["version"]): end["difference"] for end in ended(run)}
    assert set(awaited) <= set(ends)  # who has not heard of its second one yet records a third time
    assert {place for place, difference in ends.items() if difference} == {(1, 15)}
    [inexact] = named(run, "not_exact")
    assert inexact["since"] == 15
    assert inexact["reason"].startswith("rank 1, rehearsed from version 15: output 0 of module first")
    assert "of step 17 differs" in inexact["reason"]


def test_who_requires_an_exact_job_has_it_ended_at_the_rehearsal(tmp_path: Path) -> None:
    run = rehearsed(
        tmp_path,
        "pipeline",
        "counter",
        10,
        both(0, 5),
        "--rehearse",
        "start",
        "--require-exact",
        code_wanted=1,
    )
    assert named(run, "state")[-1]["state"] == "FAILED"
    assert not named(run, "plan")
    said = [line for line in launcher(tmp_path) if "not exact, and --require-exact was given" in line]
    assert len(said) == 1, launcher(tmp_path)
    assert f": {IN_MODULE[0]}" in said[0]


def test_a_recovery_ends_a_rehearsal_and_has_the_bits_of_a_run_that_never_failed(
    forks: Forks, tmp_path: Path
) -> None:
    """The trainer waits for the end of the rehearsal's process before the run's last step."""
    run = rehearsed(tmp_path / "run", "pipeline", "killed", 12, [], spares=1)
    twin = undisturbed(forks, tmp_path / "twin", TRAINER, "pipeline", "nothing", 12, ranks=RANKS)
    pid = int((tmp_path / "run" / "digests" / "killed").read_text())
    begun = [event["pid"] for event in named(run, "rehearsal_begin")]
    assert pid in begun
    assert pid not in [end["pid"] for end in named(run, "rehearsal_end")], "it has come to no end"
    [plan] = named(run, "plan")
    assert plan["exact"]
    assert not named(run, "not_exact")
    for rank in range(RANKS):
        name = f"rank{rank}-v12.json"
        assert run["digests"][name] == twin["digests"][name]


@pytest.mark.matrix
def test_a_drill_reports_its_rehearsals(tmp_path: Path) -> None:
    """Of stages that take their time: the run is longer than a rehearsal."""
    shape = ["--model", "paced", "--steps", "60", "--checkpoint-every", "20", "--kill", "rank=1,step=50"]
    outcome = drill(*shape, "--stages", "2", "--rehearse", "start", at=tmp_path)
    assert outcome.exit_code == 0, outcome.explain()
    assert outcome.report is not None
    found = outcome.report["rehearsals"]
    assert found
    for entry in found:
        assert set(entry) == {"rank", "version", "steps", "equal", "first_difference"}
        assert (entry["equal"], entry["first_difference"]) == (True, None)
        assert entry["rank"] in (0, 1)
        assert entry["version"] % 20 == 0
        assert entry["steps"] >= 1
