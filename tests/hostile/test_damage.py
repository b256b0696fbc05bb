"""Files of a stopped server, damaged by seed: nothing wrong is served, nothing lacks in silence, others are served.

A seed that fails says what was done to the files. More seeds: ``scripts/test -m matrix tests/hostile/test_damage.py``.
"""

import contextlib
import io
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from swift_ft._pb import log_pb2
from swift_ft.errors import SwiftError
from swift_ft.log import admin
from swift_ft.log.protocol import Fsync, code_of, reason_of
from swift_ft.tools import inspect
from swift_ft_services.logserver.state import EngineConfig
from tests.hostile.damage import Scene, spoil
from tests.hostile.world import BOUND_S, Server, frame, message, opening
from tests.unit.log.frames import records_of

JOBS, STREAMS = ("alpha", "beta"), ("s0.F", "s1.B")
COUNT, HALF, TRIMMED = 40, 24, 3
SEGMENT_BYTES = 16384
ROUNDS = 12
MORE = 2
"""Records: what lies behind the last one counts as the next one until that is sent."""
IN_ITS_PLACE = "another record is in its place"
CONFIG = EngineConfig(fsync=Fsync.NEVER)
NAMED = {
    *(grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION),
    *(grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNAVAILABLE),
}


def body_of(job: str, stream: str, sequence: int) -> bytes:
    draw = random.Random(f"{job} {stream} {sequence}")
    return draw.randbytes(draw.choice([1, 200, 1000, 5000]))


def frame_of(job: str, stream: str, sequence: int, generation: int) -> bytes:
    body = body_of(job, stream, sequence)
    return frame(job, sequence, sequence, generation=generation, body=body, stream=stream)


def put(server: Server, job: str, begin: int, end: int, generation: int, acked: int) -> None:
    for stream in STREAMS:
        frames = [frame_of(job, stream, sequence, generation) for sequence in range(begin, end)]
        opened = opening(job, generation=generation, acked=acked, stream=stream)
        server.put([opened, *(message(one) for one in frames)], end)


@dataclass(frozen=True)
class Bases:
    killed: Path
    stopped: Path
    older: Path
    elsewhere: Path


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Two jobs of two generations, trimmed a little."""
    at = tmp_path_factory.mktemp("bases")
    made = Bases(at / "killed", at / "stopped", at / "older", at / "elsewhere")
    for directory in (made.elsewhere, made.stopped):
        with Server(directory, CONFIG, segment_bytes=SEGMENT_BYTES) as server:
            for job in JOBS:
                admin.fence(server.address, job, 1, BOUND_S)
                put(server, job, 0, HALF, 1, 0)
            if directory == made.stopped:
                shutil.copytree(directory, made.older)
                for job in JOBS:
                    admin.trim(server.address, job, TRIMMED, BOUND_S)
                    admin.fence(server.address, job, 2, BOUND_S)
                    put(server, job, HALF, COUNT, 2, HALF)
                shutil.copytree(directory, made.killed)  # as it lies there when the process is gone
    return made


def named(error: grpc.RpcError) -> str:
    """What a server has said, which is not that it does not know what to say."""
    assert code_of(error) in NAMED, error
    assert reason_of(error), error
    return str(error)


def found_of(server: Server, job: str, stream: str, from_step: int) -> tuple[Mapping[int, bytes], str]:
    """(step -> body, why there is no more)"""
    found: dict[int, bytes] = {}
    request = log_pb2.ReadRequest(job=job, stream=stream, from_step=from_step, follow=False)
    try:
        for reply in server.stub.Read(request, timeout=BOUND_S):
            for record in records_of(reply.frames):
                assert record.key.step not in found
                found[record.key.step] = bytes(record.body)
    except grpc.RpcError as error:
        return found, named(error)
    return found, ""


def apart_of(server: Server) -> Mapping[str, str]:
    return {found.job: found.apart for found in admin.status(server.address, BOUND_S).jobs if found.apart}


def check(server: Server, scene: Scene) -> None:
    apart = apart_of(server)
    known = {found.job for found in admin.status(server.address, BOUND_S).jobs}
    for job in JOBS:
        if job in apart or job not in known:
            assert scene.touches(job), (job, apart)
            continue
        told = {found.stream: found for found in admin.inventory(server.address, job, BOUND_S)}
        for stream in STREAMS:
            trimmed = told[stream].trimmed_below_step if stream in told else TRIMMED
            found, why = found_of(server, job, stream, trimmed)
            wrong = [step for step, body in found.items() if body != body_of(job, stream, step)]
            assert not wrong, f"{job}/{stream}: wrong bytes at {wrong}"
            missing = sorted(set(range(max(trimmed, TRIMMED), COUNT)) - found.keys())
            if not missing:
                continue
            assert scene.touches(job), f"{job}/{stream}: lacks {missing}: {why}"
            said = why or (stream in told and (told[stream].corrupt or told[stream].holes))
            if not said and stream in told and scene.acked_is_spoiled:
                said = told[stream].next_sequence  # docs/format.md: both are of before, and agree
            assert said, f"{job}/{stream}: lacks {missing}, and nobody says so"


def make_again(server: Server, scene: Scene) -> None:
    """A replacement makes every record again, and sends it under a newer generation. A refusal has a reason."""
    for job in JOBS:
        try:
            admin.fence(server.address, job, 7, BOUND_S)
        except SwiftError:
            assert scene.touches(job)
            continue
        for stream in STREAMS:
            _make_again(server, scene, job, stream)


def _make_again(server: Server, scene: Scene, job: str, stream: str) -> None:
    """What is damaged in a body nobody knows before it is read (docs/format.md): with each round one more is mended."""
    told = {found.stream: found for found in admin.inventory(server.address, job, BOUND_S)}
    trimmed = told[stream].trimmed_below_step if stream in told else 0
    first = told[stream].first_sequence if stream in told else 0
    frames = [message(frame_of(job, stream, sequence, 7)) for sequence in range(first, COUNT + MORE)]
    for _ in range(ROUNDS):
        why = ""
        try:
            server.put([opening(job, generation=7, stream=stream), *frames], COUNT + MORE)
        except grpc.RpcError as error:
            why = named(error)
        if why:
            assert scene.touches(job), why
            return
        found, why = found_of(server, job, stream, trimmed)
        wrong = [step for step, body in found.items() if body != body_of(job, stream, step)]
        assert not wrong, f"{job}/{stream}: wrong bytes at {wrong}"
        if not why:
            break
    if IN_ITS_PLACE in why and scene.overlaps:
        return
    assert not why, f"{job}/{stream}: everything was acknowledged again and again, and then: {why}"
    assert sorted(found) == list(range(max(first, trimmed), COUNT + MORE)), f"{job}/{stream}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def campaign(bases: Bases, place: Path, seed: int) -> None:
    draw = random.Random(seed)
    directory = place / "log"
    shutil.copytree(draw.choice([bases.killed, bases.stopped]), directory)
    scene = Scene(directory, bases.older, bases.elsewhere, draw)
    spoil(scene)
    try:
        with quiet():
            assert inspect.main(["--directory", str(directory), "--verify"]) in (0, 1, 2, 3)
        for again in (False, True):
            try:
                server = Server(directory, CONFIG, segment_bytes=SEGMENT_BYTES)
            except SwiftError:  # one line
                assert any(name in scene.touched for name in (".lock", ".reserve")), "it does not start"
                return
            with server:
                check(server, scene)
                if again:
                    make_again(server, scene)
    except BaseException as error:
        error.add_note(f"seed {seed}: {'; '.join(scene.did)}")
        raise


@pytest.mark.parametrize("seed", range(24))
def test_damage_is_named_and_is_one_jobs_own(bases: Bases, tmp_path: Path, seed: int) -> None:
    campaign(bases, tmp_path, seed)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(24, 600))
def test_more_damage(bases: Bases, tmp_path: Path, seed: int) -> None:
    campaign(bases, tmp_path, seed)
