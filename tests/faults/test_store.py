"""Fault 44: the coordinator's own files are damaged while it is away. A real process, and members that wait for it."""

from collections.abc import Callable

import pytest

from tests.integration.coordinator_world import Job, finish, recovered
from tests.integration.test_coordinator import run


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("coordinator.sqlite-wal", flipped(20)),
        ("coordinator.sqlite-wal", flipped(32 + 24 + 4096 + 24 + 50)),
        ("coordinator.sqlite-wal", flipped(-50)),
        ("coordinator.sqlite", lambda data: b""),
        ("acknowledged", lambda data: b""),
    ],
    ids=["header of the log", "within the log", "end of the log", "database", "acknowledged"],
)
def test_f45_coordinator_that_would_have_forgotten_something_does_not_start(
    job: Job, name: str, damage: Callable[[bytes], bytes]
) -> None:
    coordinator = job.coordinator()
    members = job.form()
    members[1].kill()
    members[1].report_exit()
    members[1] = job.member(1)
    job.wait(members[0], recovered(2))
    coordinator.kill()
    path = coordinator.directory / name
    sound = path.read_bytes()
    path.write_bytes(damage(sound))
    spoilt = path.read_bytes()
    for _ in range(2):
        done = run("--directory", str(coordinator.directory))
        assert done.returncode == 3, done
        assert "put a copy of the whole directory back" in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert path.read_bytes() == spoilt
    path.write_bytes(sound)
    coordinator.start()
    finish(job, members)
