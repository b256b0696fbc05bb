"""What the environment says of the job, before it becomes a part of a path."""

import pytest

from swift_ft.errors import UsageError
from swift_ft.train.session import Session

ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "SWIFT_COORDINATOR": "127.0.0.1:1",
    "SWIFT_JOB": "j",
    "SWIFT_INCARNATION": "i",
}


@pytest.mark.parametrize("job", ["../up", "/abs", "a/b", "", ".", "..", "x\n", "x" * 65])
def test_a_job_name_cannot_leave_the_checkpoints(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (ENVIRONMENT | {"SWIFT_JOB": job, "SWIFT_CHECKPOINT_DIR": "/nowhere"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="is not allowed"):
        Session.from_env()


def test_a_job_without_a_directory_for_checkpoints_is_told_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SWIFT_CHECKPOINT_DIR", raising=False)
    with pytest.raises(UsageError, match="swift-ft run --checkpoint-dir DIR"):
        Session.from_env()
