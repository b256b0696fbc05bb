"""What the environment says of the job, before it becomes a part of a path."""

import pytest

from swift.errors import UsageError
from swift.runtime.session import Session


@pytest.mark.parametrize("job", ["../up", "/abs", "a/b", "", ".", "..", "x\n", "A", "x" * 65])
def test_a_job_name_cannot_leave_the_checkpoints(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "SWIFT_COORDINATOR": "127.0.0.1:1",
        "SWIFT_JOB": job,
        "SWIFT_INCARNATION": "i",
        "SWIFT_CHECKPOINT_DIR": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="is not allowed"):
        Session.from_env()
