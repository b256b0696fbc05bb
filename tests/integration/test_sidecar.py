"""A trainer, its sidecar and a real log server, with SIGKILLs: no record is lost, doubled or out of place."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from swift_ft.errors import Divergence, StaleGeneration
from swift_ft.log import admin
from swift_ft.log.reader import LogReader, never
from swift_ft.log.record import RecordKey, digest_of
from swift_ft.log.ring import Word
from tests.integration.logserver_world import JOB, REPOSITORY, TIMEOUT_S, LogServer
from tests.log_client import Writer
from tests.patience import eventually
from tests.unit.log.clients import rank_writing, reading

STREAMS = ("s1.F", "s1.B", "r1.C")
# Where a sidecar dies, and in front of how many of the 60 records that it is given (or batches of them).
POINTS = [
    *("before-take:1", "after-take:7", "after-take:60"),
    *("before-message:1", "before-message:2", "after-message:1"),
    *("assigned:1", "assigned:2", "assigned:30", "assigned:60"),
    *(
        "before-reply:1",
        "before-reply:3",
        "after-reply:3",
        "before-acked:1",
        "after-acked:1",
        "after-acked:4",
    ),
    *("before-tail:1", "before-tail:3", "after-tail:3"),
    *("before-hand-over:1", "after-hand-over:1", "before-take:30,after-hand-over:1"),
    # And its successor, which asks the server what is there.
    *("assigned:30,before-learn:1", "assigned:30,after-learn:1", "before-acked:4,before-learn:3"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LogServer]:
    with LogServer(tmp_path / "log") as running:
        running.fence(1)
        yield running


@pytest.fixture(params=["in memory", "sent"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How bodies get from a dying sidecar to the server."""
    if request.param == "sent":
        monkeypatch.setenv("SENDS", "1")


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that shows that it did."""
    monkeypatch.setattr(Writer, "module", "tests.integration.dying_sidecar")
    monkeypatch.setenv("DIE_ONCE", str(tmp_path / "died"))
    return tmp_path / "died"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogServer]:
    """For tests that only need a job of their own."""
    with LogServer(tmp_path_factory.mktemp("shared") / "log") as running:
        yield running


def key(number: int) -> RecordKey:
    return RecordKey(number, 0, 0)


def body_of(number: int) -> bytes:
    chance = random.Random(number)
    size = chance.choice([0, 1, 100, 5000, 200_000])
    return chance.randbytes(size)


def put(writer: Writer, number: int, body: bytes | None = None) -> None:
    body = body_of(number) if body is None else body
    writer.append(STREAMS[number % 3], key(number // 3), "uint8", (len(body),), body)


def check(server: LogServer, count: int, job: str = JOB) -> None:
    """The log has exactly these records: every digest, and as many sequences as records."""
    inventory = {stream.stream: stream for stream in admin.inventory(server.address, job, TIMEOUT_S)}
    with closing(LogReader([server.address], job)) as reader:
        for index, stream in enumerate(STREAMS):
            numbers = range(index, count, 3)
            expected = {key(n // 3): digest_of("uint8", (len(body_of(n)),), body_of(n)) for n in numbers}
            assert reader.digests(stream, 0, cancelled=never) == expected
            summary = inventory[stream]
            assert not summary.corrupt
            assert (summary.records, summary.next_sequence) == (len(numbers), len(numbers))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_logs_pace_is_known_to_the_trainer(server: LogServer) -> None:
    writer = Writer([server.address], JOB, 1, queue_bytes=8 << 20, name="rank1")
    try:
        assert writer.stats.pace_bytes_per_s == 0.0
        body, began, number = bytes(1 << 20), time.monotonic(), 0
        while writer.stats.pace_bytes_per_s == 0.0:
            assert time.monotonic() - began < TIMEOUT_S
            put(writer, number, body)
            number += 1
        # Windows without anything to do are left out: it cannot be less than what has gone out by now.
        took = writer.stats.bytes / (time.monotonic() - began)
        assert took / 2 < writer.stats.pace_bytes_per_s < 1e12
    finally:
        writer.close()
    assert writer.stats.pace_bytes_per_s > 0.0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("point", POINTS)
def test_a_sidecar_killed_at_a_point_loses_and_doubles_nothing(
    shared: LogServer, point: str, dying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIE_AT", point)
    job = f"{point}-{os.environ.get('SENDS', '')}".replace(":", ".").replace(",", ".")
    admin.fence(shared.address, job, 1, TIMEOUT_S)
    with rank_writing(shared.address, job=job, queue_bytes=4 << 20, name="rank1") as writer:
        for number in range(60):
            put(writer, number)
            if number % 20 == 19:
                writer.flush(TIMEOUT_S)  # the tail is moved at least three times
        for number in (*range(5), *range(55, 60)):
            put(writer, number)  # done again: compared, not sent; what was before a death as well
        writer.flush(TIMEOUT_S)
        # Enough goes on behind it for every point to be reached.
        assert dying.stat().st_size == writer.restarts == len(point.split(","))
        check(shared, 60, job)
        assert writer.stats.records + writer.stats.verified == 70
        put(writer, 57, b"\1" + body_of(57))
        with pytest.raises(Divergence, match=r"s1\.F step 19 "):
            writer.flush(TIMEOUT_S)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("point", ["after-message:2", "after-message:5", "assigned:4", "before-tail:1"])
def test_records_of_several_messages(
    server: LogServer, point: str, dying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIE_AT", point)
    bodies = [bytes([number]) * (9 << 20) for number in range(12)]
    with rank_writing(server.address, queue_bytes=32 << 20) as writer:
        for number, body in enumerate(bodies):
            put(writer, number, body)
        writer.flush(60.0)
        assert dying.exists()
        with reading(server.address) as reader:
            for number, body in enumerate(bodies):
                found = reader.digests(STREAMS[number % 3], 0, cancelled=never)[key(number // 3)]
                assert found == digest_of("uint8", (len(body),), body)
        assert [s.records for s in admin.inventory(server.address, JOB, TIMEOUT_S)] == [4, 4, 4]
        assert writer.stats.records == 12


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 2))])
def test_sidecars_killed_at_random_lose_and_double_nothing(server: LogServer, seed: int) -> None:
    chance = random.Random(seed)
    writer = Writer([server.address], JOB, 1, queue_bytes=2 << 20, name="rank1")
    stop = threading.Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        while kills < 4 and not stop.wait(chance.uniform(0.0, 0.8)):
            killed = writer.pid
            os.kill(killed, signal.SIGKILL)
            kills += 1
            while writer.pid == killed and not stop.is_set():
                time.sleep(0.001)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        count = 0
        while killer.is_alive() or count < 300:
            put(writer, count)
            count += 1
            if chance.random() < 0.02:
                time.sleep(0.01)
        writer.flush(60.0)
        assert writer.restarts == kills == 4
        check(server, count)
    finally:
        stop.set()
        killer.join()
        writer.close(0.0)


def test_an_error_survives_the_sidecar_that_found_it(server: LogServer) -> None:
    with rank_writing(server.address) as writer:
        put(writer, 0)
        writer.expect(STREAMS[1], {key(0): bytes(16)})
        put(writer, 1)
        eventually(lambda: writer._error)
        os.kill(writer.pid, signal.SIGKILL)
        eventually(lambda: writer.restarts == 1)
        with pytest.raises(Divergence, match=r"s1\.B step 0"):
            writer.flush(TIMEOUT_S)


def test_what_the_log_has_and_generations_survive_the_sidecar(server: LogServer) -> None:
    """A predecessor of this rank has written one of its streams."""
    before = Writer([server.address], JOB, 1)
    put(before, 1, b"x")
    put(before, 16, b"other")
    before.close()
    with rank_writing(server.address, patience_s=2.0) as writer:
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        server.fence(2)
        put(writer, 3)
        eventually(lambda: isinstance(writer._trouble, StaleGeneration))
        assert writer._memory.load(Word.HEAD) > writer._memory.load(Word.TAIL)  # it stays in the ring
        writer.set_generation(2)
        os.kill(writer.pid, signal.SIGKILL)
        eventually(lambda: writer.restarts == 1)
        put(writer, 1, b"x")
        put(writer, 0)
        writer.flush(TIMEOUT_S)
        assert writer.stats.verified == 2
        put(writer, 16)
        with pytest.raises(Divergence, match=r"s1\.B step 5"):
            writer.flush(TIMEOUT_S)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("point", ["before-discard:1", "after-discard:1"])
def test_a_sidecar_killed_while_the_log_is_given_up(
    server: LogServer, point: str, dying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIE_AT", point)
    with rank_writing(server.address) as writer:
        for number in range(9):
            put(writer, number)
        writer.flush(TIMEOUT_S)
        server.fence(2)
        put(writer, 9)  # stays in the ring
        admin.reset(server.address, JOB, 2, TIMEOUT_S)
        writer.restart(2)
        assert dying.exists()
        for number in range(3, 9):
            put(writer, number, b"other")
        writer.flush(TIMEOUT_S)
        other = digest_of("uint8", (5,), b"other")
        with reading(server.address) as reader:
            for stream in STREAMS:
                assert reader.digests(stream, 0, cancelled=never) == {key(1): other, key(2): other}
        assert not any(stream.corrupt for stream in admin.inventory(server.address, JOB, TIMEOUT_S))


def test_the_server_and_the_sidecar_die_together(server: LogServer) -> None:
    with rank_writing(server.address) as writer:
        for number in range(30):
            put(writer, number)
        server.kill()
        os.kill(writer.pid, signal.SIGKILL)
        for number in range(30, 60):
            put(writer, number)
        server.start()
        writer.flush(TIMEOUT_S)
        check(server, 60)


TRAINER = """
import os, signal, sys
from tests.log_client import Writer
from tests.integration.test_sidecar import put
writer = Writer(sys.argv[1].split(","), "job", 1)
if sys.argv[3] == "fork" and os.fork() == 0:
    signal.pause()
for number in range(int(sys.argv[2])):
    put(writer, number)
writer.wait_copied()
print(writer.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_trainer(server: LogServer, count: int, how: str = "alone", *copies: LogServer) -> int:
    """Puts records into its ring and is killed. Gives the pid of its sidecar; its output has ended."""
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, ",".join(s.address for s in (server, *copies)), str(count), how],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.wait(TIMEOUT_S)
        if how == "alone":
            assert process.stdout.read() == ""
        else:
            assert not gone(pid)
            # The forked child has a copy of the socket: the sidecar goes by the process alone.
            eventually(lambda: gone(pid))
            os.killpg(process.pid, signal.SIGKILL)
    return pid


def test_nobody_waits_for_the_end_of_a_sidecar(server: LogServer) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    pid = killed_trainer(server, 60)  # its output has ended
    assert not gone(pid)
    server.process.send_signal(signal.SIGCONT)
    eventually(lambda: gone(pid))
    check(server, 60)


IMPATIENT = """
import os, signal, sys, time
from tests.log_client import Writer
from tests.integration.test_sidecar import put
writer = Writer([sys.argv[1]], "job", 1, patience_s=2.0)
put(writer, 0)
writer.flush(20.0)
os.kill(int(sys.argv[2]), signal.SIGSTOP)
put(writer, 3)
os.kill(writer.pid, signal.SIGKILL)
while not writer.restarts:
    time.sleep(0.01)
writer.await_ready()
print(writer.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_successor_that_cannot_ask_the_log_outlives_its_trainer_no_longer(server: LogServer) -> None:
    assert server.process is not None
    with subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, server.address, str(server.process.pid)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
    eventually(lambda: gone(pid), timeout_s=10.0)
    server.process.send_signal(signal.SIGCONT)


def test_a_killed_trainers_ring_is_drained_whoever_it_has_forked(server: LogServer) -> None:
    pid = killed_trainer(server, 60, "fork")
    eventually(lambda: gone(pid))
    check(server, 60)


def test_a_killed_trainers_sidecar_ends_when_it_is_fenced(server: LogServer) -> None:
    server.fence(2)
    pid = killed_trainer(server, 60)
    eventually(lambda: gone(pid), timeout_s=9.0)  # not the 10 s for which it would try otherwise
    assert admin.inventory(server.address, JOB, TIMEOUT_S) == [] or not any(
        stream.records for stream in admin.inventory(server.address, JOB, TIMEOUT_S)
    )
