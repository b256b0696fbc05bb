"""`swift-ft plan --apply`: what the job is told, what is printed, and how it is refused."""

from dataclasses import dataclass, field

import pytest

from swift.errors import ServiceError, SwiftError, UsageError
from swift.plan.command import main
from swift.plan.profile import Profile
from swift.plan.running import Given
from tests.unit.plan.profiles import profile

JOB = ["--coordinator", "127.0.0.1:1", "--job", "j"]


@dataclass
class Job:
    changes: bool = True
    refuses: SwiftError | None = None
    unmeasured: SwiftError | None = None
    told: list[str] = field(default_factory=list)
    closed: int = 0

    def connect(self, coordinator: str, job: str) -> "Job":
        assert (coordinator, job) == ("127.0.0.1:1", "j")
        return self

    def profile(self, given: Given) -> tuple[Profile, list[str]]:
        if self.unmeasured is not None:
            raise self.unmeasured
        return profile(machines=8), ["nothing"]

    def regroup(self, groups: str) -> bool:
        if self.refuses is not None:
            raise self.refuses
        self.told.append(groups)
        return self.changes

    def close(self) -> None:
        self.closed += 1


def test_the_plan_is_applied_and_only_if_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job()
    assert main([*JOB, "--storage-cap", "6.6kB"], job.connect) == 0
    assert job.told == []
    assert main([*JOB, "--storage-cap", "6.6kB", "--apply"], job.connect) == 0
    (groups,) = job.told
    assert len(groups.split(",")) == 4
    assert capsys.readouterr().out.endswith(f'job j gets groups="{groups}", from the next checkpoint on\n')
    assert job.closed == 3


def test_groups_that_are_named_need_no_profile(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(unmeasured=ServiceError("not yet"))
    assert main([*JOB, "--apply", "--groups", "0-3,4-7"], job.connect) == 0
    assert job.told == ["0-3,4-7"]
    assert capsys.readouterr().out == 'job j gets groups="0-3,4-7", from the next checkpoint on\n'


def test_the_groups_in_force_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--apply", "--groups", "0-3,4-7"], Job(changes=False).connect) == 0
    assert capsys.readouterr().out == 'job j has groups="0-3,4-7"\n'


@pytest.mark.parametrize(
    ("job", "flags", "code", "words"),
    [
        (Job(refuses=UsageError("groups 0-1 are of 2 stages")), ["--groups", "0-1"], 2, "are of 2 stages"),
        (Job(refuses=UsageError("job j is FINISHED")), ["--storage-cap", "6.6kB"], 2, "is FINISHED"),
        (Job(refuses=ServiceError("no answer")), ["--groups", "0-1"], 3, "no answer"),
        (Job(unmeasured=ServiceError("not measured yet")), [], 3, "not measured yet"),
        (Job(), ["--recovery-cap", "1"], 1, "no groups recover within 1 s"),
        (Job(), ["--groups", "0-1", "--storage-cap", "5"], 2, "--storage-cap has no use with it"),
        (Job(), ["--groups", "0-1", "--json", "plan.json"], 2, "--json has no use with it"),
        (Job(), ["--groups", "0-1", "--machine-per-rank"], 2, "--machine-per-rank has no use with it"),
    ],
)
def test_what_is_refused_is_one_line_and_changes_nothing(
    job: Job, flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB, "--apply", *flags], job.connect) == code
    shown = capsys.readouterr()
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1, shown.err
    assert job.told == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["profile.json", "--apply"], "--apply is for a running job"),
        (["profile.json", "--groups", "0"], "--groups is for a running job"),
        ([*JOB, "--groups", "0-1"], "--groups needs --apply"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags, Job().connect) == 2
    assert words in capsys.readouterr().err
