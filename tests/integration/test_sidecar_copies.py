"""A sidecar that writes to two log servers, with SIGKILLs of it and of them: each that stays has every record, once."""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft.log import admin
from swift_ft.log.reader import never
from swift_ft.log.record import RecordKey, digest_of
from tests.integration.logserver_world import JOB, TIMEOUT_S, LogServer
from tests.integration.test_sidecar import (
    STREAMS,
    body_of,
    check,
    dying,
    gone,
    key,
    killed_trainer,
    put,
    way,
)
from tests.log_client import Writer
from tests.patience import eventually
from tests.unit.log.clients import rank_writing, reading

__all__ = ["dying", "way"]
POINTS = [
    *("after-take:7", "after-take:62", "before-message:2", "after-message:1"),
    *("assigned:1", "assigned:2", "assigned:61", "before-reply:1", "after-reply:4"),
    *("before-acked:1", "after-acked:1", "after-acked:5", "before-tail:1", "before-tail:3", "after-tail:3"),
]
MOVES = [
    *("before-move:1", "cleared:1", "after-move:1", "assigned:1"),
    *("after-message:1", "before-learn:2", "before-tail:1"),
]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[LogServer]]:
    found = [LogServer(tmp_path / f"log{number}") for number in range(3)]
    with found[0], found[1], found[2]:
        for server in found:
            server.fence(1)
        yield found


def held(server: LogServer) -> dict[tuple[str, RecordKey], bytes]:
    """What it has; each record once, and nothing damaged."""
    with reading(server.address) as reader:
        digests = {stream: reader.digests(stream, 0, cancelled=never) for stream in STREAMS}
    found = {(stream, k): digest for stream, of in digests.items() for k, digest in of.items()}
    there = admin.inventory(server.address, JOB, TIMEOUT_S)
    assert sum(stream.records for stream in there) == len(found)
    assert not any(stream.corrupt for stream in there)
    return found


def records(numbers: range) -> dict[tuple[str, RecordKey], bytes]:
    bodies = {number: body_of(number) for number in numbers}
    return {(STREAMS[n % 3], key(n // 3)): digest_of("uint8", (len(b),), b) for n, b in bodies.items()}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("point", POINTS)
def test_a_sidecar_killed_at_a_point_loses_and_doubles_nothing_on_either(
    servers: list[LogServer], point: str, dying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIE_AT", point)
    with rank_writing(*(s.address for s in servers[:2]), queue_bytes=4 << 20) as writer:
        for number in range(60):
            put(writer, number)
            if number % 20 == 19:
                writer.flush(TIMEOUT_S)
        for number in range(50, 60):
            put(writer, number)  # a step that is done again
        writer.flush(TIMEOUT_S)
        assert dying.exists()
        assert writer.restarts == 1
        for server in servers[:2]:
            check(server, 60)
        assert writer.stats.records + writer.stats.verified == 70


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("point", ["none:1", *MOVES])
def test_a_lost_server_is_replaced_while_the_sidecar_dies(
    servers: list[LogServer], point: str, dying: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lost one had not acknowledged, the new one gets; the one that stays has everything, once."""
    lost, stays, new = servers
    monkeypatch.setenv("DIE_AT", "none:1")
    with rank_writing(lost.address, stays.address, queue_bytes=8 << 20) as writer:
        for number in range(30):
            put(writer, number)
        writer.flush(TIMEOUT_S)
        lost.kill()
        for number in range(30, 45):
            put(writer, number)
        eventually(lambda: sum(s.records for s in admin.inventory(stays.address, JOB, TIMEOUT_S)) == 45)
        writer.forget_below(9)
        for server in (stays, new):
            server.fence(2)
        monkeypatch.setenv("DIE_AT", point)  # its successor's
        writer.set_generation(2, [stays.address, new.address])
        for number in range(27, 60):  # the step that was dropped is done again, and more
            put(writer, number)
        writer.flush(TIMEOUT_S)
        assert dying.exists() == (point in MOVES)
        assert writer.restarts == (point in MOVES), "a move is no death"
        assert held(stays) == records(range(60))
        assert held(new) == records(range(27, 60))


def test_a_server_that_is_used_again_was_emptied_and_is_not_taken_for_the_old_one(
    servers: list[LogServer],
) -> None:
    """It was given up and named again before the sidecar ever worked without it."""
    one, two, _ = servers
    with rank_writing(one.address, two.address) as writer:
        for number in range(30):
            put(writer, number)
        writer.flush(TIMEOUT_S)
        one.kill()
        shutil.rmtree(one.directory)
        one.start()
        for server in (one, two):
            server.fence(3)
        with writer.changed:  # generation 2, whose sidecar was ended before it could do anything
            writer._renumber([two.address])
        writer.set_generation(3, [two.address, one.address])
        for number in range(30, 60):
            put(writer, number)
        writer.flush(TIMEOUT_S)
        check(two, 60)
        assert held(one) == records(range(30, 60))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 2))])
def test_servers_are_replaced_and_sidecars_killed_at_random(servers: list[LogServer], seed: int) -> None:
    """Three servers, two of which are in use. Each holds all that came since it came, and of what came before no more
    than was under way then."""
    chance = random.Random(seed)
    using = servers[:2]
    since = {server.address: 0 for server in using}
    writer = Writer([s.address for s in using], JOB, 1, queue_bytes=2 << 20)
    count = 0
    generation = 1
    moves = kills = 0
    try:
        while moves < 6 or kills < 5 or count < 200:
            for _ in range(chance.randrange(1, 30)):
                put(writer, count)
                count += 1
            action = chance.choice(("flush", "kill", "move", "nothing"))
            if action == "flush":
                writer.flush(60.0)
            elif action == "kill" and kills < 5:  # one more, and it would be given up
                before = writer.restarts
                kills += 1
                try:
                    os.kill(writer.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it is just being replaced
                if chance.random() < 0.5:
                    eventually(lambda before=before: writer.restarts > before)
            elif action == "move":
                moves += 1
                generation += 1
                (other,) = [server for server in servers if server not in using]
                using = [chance.choice(using), other]
                chance.shuffle(using)
                for server in using:
                    server.fence(generation)
                admin.reset(other.address, JOB, generation, TIMEOUT_S)
                since[other.address] = count
                writer.set_generation(generation, [s.address for s in using])
        writer.flush(60.0)
        for server in using:
            found, all_of = held(server), records(range(count))
            assert found.items() <= all_of.items()
            assert found.items() >= records(range(since[server.address], count)).items()
    finally:
        writer.close(0.0)


def test_a_killed_trainers_ring_is_drained_to_both(servers: list[LogServer]) -> None:
    pid = killed_trainer(servers[0], 60, "alone", servers[1])
    eventually(lambda: gone(pid))
    for server in servers[:2]:
        check(server, 60)


def put_step(writer: Writer, step: int) -> None:
    body = bytes([step]) * 64
    writer.append(STREAMS[0], RecordKey(step, 0, 0), "uint8", (64,), body)


def killed(writer: Writer) -> None:
    """Its sidecar; returns when there is another one."""
    os.kill(writer.pid, signal.SIGKILL)
    eventually(lambda: writer.restarts == 1)


def test_a_damaged_copy_costs_nothing_while_the_other_is_sound(servers: list[LogServer]) -> None:
    """One server comes back without what it had acknowledged, and the sidecar's successor asks both what they have."""
    sound, damaged, _ = servers
    with rank_writing(damaged.address, sound.address) as writer:
        for step in range(5):
            put_step(writer, step)
        writer.flush(TIMEOUT_S)
        damaged.kill()
        shutil.rmtree(damaged.directory)
        damaged.start()
        for server in (sound, damaged):
            server.fence(2)
        writer.set_generation(2)
        writer.forget_below(5)
        put_step(writer, 5)
        writer.flush(TIMEOUT_S)
        assert admin.inventory(damaged.address, JOB, TIMEOUT_S)[0].corrupt
        killed(writer)
        for step in (5, 6):  # the step that was dropped is done again, and the next one
            put_step(writer, step)
        writer.flush(TIMEOUT_S)
        assert writer.stats.verified == 1
        there = admin.inventory(sound.address, JOB, TIMEOUT_S)
        assert [(stream.records, stream.corrupt) for stream in there] == [(7, False)]


def test_a_successor_asks_for_nothing_that_is_trimmed(servers: list[LogServer]) -> None:
    """The first step of a replacement: it has forgotten nothing itself yet, and the log begins with a checkpoint."""
    one, two, _ = servers
    for server in (one, two):
        admin.trim(server.address, JOB, 5, TIMEOUT_S)
    with rank_writing(one.address, two.address) as writer:
        writer.forget_below(5)  # as `Restorer.follow` does
        put_step(writer, 5)
        writer.flush(TIMEOUT_S)
        killed(writer)
        for step in (5, 6):
            put_step(writer, step)
        writer.flush(TIMEOUT_S)
