"""Files of a log server that were swapped, cut or replaced by something else: one job's damage is that job's alone."""

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import crc32c
import grpc
import pytest
from grpc_health.v1 import health_pb2

from swift_ft.errors import JobSetApart, ServiceError, UsageError
from swift_ft.log import admin
from swift_ft.log.directory import NAME as ACKED
from swift_ft.log.directory import encode_place, read_acked
from swift_ft.log.manifest import (
    GRANTED,
    MANIFEST,
    Granted,
    JobMeta,
    ManifestDamaged,
    decode_manifest,
    encode_granted,
    encode_manifest,
)
from swift_ft.log.protocol import Reason, reason_of
from swift_ft.log.segment import SEGMENT_HEADER_BYTES, SEQUENCE_MAX
from swift_ft.tools.inspect import main as inspect
from tests.unit.log.append_call import TIMEOUT_S, Call, append
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.service import InProcess
from tests.unit.log.storages import (
    FIVE_A_SEGMENT,
    FRAME,
    OnDisk,
    crash,
    files,
    fill,
    on_disk,
    recovered,
    sequences,
    spans,
)

OTHER = "other"


class Server(InProcess):
    """On a directory, as the process would start it."""

    def __init__(self, directory: Path, segment_bytes: int = 1 << 20) -> None:
        storage = OnDisk(directory, segment_bytes)
        super().__init__(storage, jobs=storage.recover(), granted=False)

    def fence(self, job: str = JOB, generation: int = 1) -> None:
        admin.fence(self.address, job, generation, TIMEOUT_S)

    def append(self, begin: int, end: int, generation: int = 1, acked: int = 0) -> None:
        frames = [frame_of(n, generation=generation)[1] for n in range(begin, end)]
        append(self, *frames, generation=generation, acked=acked).end()

    def apart(self) -> dict[str, str]:
        return {found.job: found.apart for found in admin.status(self.address, TIMEOUT_S).jobs if found.apart}

    def is_serving(self) -> bool:
        return self.health_status() == health_pb2.HealthCheckResponse.SERVING


def two_jobs(directory: Path) -> None:
    with Server(directory) as server:
        for job in (JOB, OTHER):
            server.fence(job)
        server.append(0, 4)


def segment_of(directory: Path) -> Path:
    return files(directory)[0]


# -- manifests that are not this job's last one -------------------------------------------------------------


def test_an_older_manifest_does_not_undo_a_fence(tmp_path: Path) -> None:
    two_jobs(tmp_path)
    old = (tmp_path / JOB / MANIFEST).read_bytes()
    with Server(tmp_path) as server:
        server.fence(generation=5)
    (tmp_path / JOB / MANIFEST).write_bytes(old)
    with Server(tmp_path) as server:
        assert "it is older: of generation 1, and 5 was granted" in server.apart()[JOB]
        call = Call(server)
        call.ask()
        assert call.refused()[1] == Reason.APART


def test_a_whole_job_of_before_does_not_undo_a_fence(tmp_path: Path) -> None:
    two_jobs(tmp_path)
    shutil.copytree(tmp_path / JOB, tmp_path / "backup" / JOB)
    with Server(tmp_path) as server:
        server.fence(generation=5)
    shutil.rmtree(tmp_path / JOB)
    shutil.move(tmp_path / "backup" / JOB, tmp_path / JOB)
    shutil.rmtree(tmp_path / "backup")
    with Server(tmp_path) as server:
        assert "5 was granted" in server.apart()[JOB]


def test_the_manifest_of_another_job_is_refused(tmp_path: Path) -> None:
    two_jobs(tmp_path)
    shutil.copy(tmp_path / OTHER / MANIFEST, tmp_path / JOB / MANIFEST)
    with Server(tmp_path) as server:
        assert "it is of job other" in server.apart()[JOB]


def test_the_job_of_another_server_is_refused(tmp_path: Path) -> None:
    two_jobs(tmp_path / "a")
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a" / JOB, tmp_path / "b" / JOB)
    with Server(tmp_path / "b") as server:
        assert "this server never had the job" in server.apart()[JOB]


def test_a_dropped_job_of_the_same_name_is_refused(tmp_path: Path) -> None:
    two_jobs(tmp_path)
    kept = tmp_path / ".kept"
    shutil.copytree(tmp_path / JOB, kept)
    with Server(tmp_path) as server:
        admin.drop(server.address, JOB, TIMEOUT_S, force=True)
        server.fence()
    shutil.rmtree(tmp_path / JOB)
    shutil.move(kept, tmp_path / JOB)
    with Server(tmp_path) as server:
        assert "it is of another job that had this name" in server.apart()[JOB]


def test_a_segment_that_is_newer_than_its_manifest_is_refused(tmp_path: Path) -> None:
    two_jobs(tmp_path)
    with Server(tmp_path) as server:
        server.fence(generation=5)
        server.append(4, 6, generation=5, acked=4)
    meta = JobMeta(generation=1, job=JOB)
    with Server(tmp_path) as server:
        meta.uid = server.storage._book.lines[JOB].uid
    (tmp_path / f"{GRANTED}{JOB}").unlink()
    (tmp_path / JOB / MANIFEST).write_bytes(encode_manifest(meta))
    (tmp_path / f"{GRANTED}{JOB}").write_bytes(encode_granted(Granted(JOB, meta.uid, 1)))
    with Server(tmp_path) as server:
        assert "it is of generation 1, and s0.F/" in server.apart()[JOB]


# -- records of another job --------------------------------------------------------------------------------


def test_segments_of_a_dropped_job_copied_in_while_the_server_runs_are_not_served(tmp_path: Path) -> None:
    """Same names, same shapes, sound checksums: only key and digest tell."""
    data = tmp_path / "data"
    with Server(data) as server:
        server.fence()
        server.append(0, 4)
        old = tmp_path / "old.seg"
        shutil.copy(segment_of(data), old)
        admin.drop(server.address, JOB, TIMEOUT_S, force=True)
        server.fence()
        append(server, *(frame_of(n, body=bytes([n + 1] * 24))[1] for n in range(4)))
        path = segment_of(data)
        with path.open("r+b") as file:  # in its place: the server has it open
            file.write(old.read_bytes())
        with pytest.raises(grpc.RpcError) as refused:
            server.read()
        assert reason_of(refused.value) == Reason.CORRUPT
        assert "another record is in its place" in str(refused.value)


def test_segments_of_a_dropped_job_copied_in_while_the_server_was_down_are_damage(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Server(data) as server:
        server.fence()
        server.append(0, 4)
        old = tmp_path / "old.seg"
        shutil.copy(segment_of(data), old)
        admin.drop(server.address, JOB, TIMEOUT_S, force=True)
        server.fence()
        server.append(0, 4)
    shutil.copy(old, segment_of(data))
    found = recovered(data)
    assert sequences(found) == []
    assert "one of another job that had this name" in found.holes[0].reason


# -- records that were acknowledged and are gone -------------------------------------------------------------


LOSSES: dict[str, tuple[Callable[[Path], None], int]] = {
    "cut": (lambda path: os.truncate(path, SEGMENT_HEADER_BYTES + 2 * FRAME), 7),
    "empty": (lambda path: os.truncate(path, 0), 5),
    "removed": (Path.unlink, 5),
    "with the stream": (lambda path: shutil.rmtree(path.parent), 0),
}
"""What happens to the last of two files -> how many records are left."""


@pytest.mark.parametrize(("how", "left"), LOSSES.values(), ids=LOSSES)
def test_what_was_acknowledged_in_the_last_file_is_missed(
    tmp_path: Path, how: Callable[[Path], None], left: int
) -> None:
    """The server was killed: the file has no footer, and the manifest no count."""
    storage = on_disk(tmp_path / "data", FIVE_A_SEGMENT, records=9)
    crash(storage)
    how(files(tmp_path / "data")[-1])
    found = recovered(tmp_path / "data")
    assert sequences(found) == list(range(left))
    assert found.holes[-1].end_sequence == found.appended == 9
    assert all("are gone" in hole.reason for hole in found.holes)


def test_without_the_note_the_manifest_still_knows_the_files_before_the_last(tmp_path: Path) -> None:
    """As after a power cut that kept nothing of the note."""
    storage = on_disk(tmp_path / "data", FIVE_A_SEGMENT, records=9)
    crash(storage)
    (tmp_path / "data" / ACKED).unlink()
    shutil.rmtree(tmp_path / "data" / JOB / STREAM)
    found = recovered(tmp_path / "data")
    assert spans(found) == [(0, 5)]


@pytest.mark.parametrize("lives", [True, False])
def test_a_last_file_and_its_note_put_back_together_are_missed_by_a_writer_that_lives(
    tmp_path: Path, lives: bool
) -> None:
    """All that is left agrees: the limit that docs/format.md names."""
    storage = on_disk(tmp_path / "data", records=5)
    note = tmp_path / "data" / ACKED
    (segment,) = files(tmp_path / "data")
    before = {path: path.read_bytes() for path in (segment, note)}
    fill(storage, 5, 9)
    crash(storage)
    for path, data in before.items():
        path.write_bytes(data)
    found = recovered(tmp_path / "data")
    assert (sequences(found), found.holes) == (list(range(5)), [])
    with Server(tmp_path / "data") as server:
        if lives:
            server.append(9, 10, acked=9)
            with pytest.raises(grpc.RpcError, match="records 5 to 8 were acknowledged and are gone"):
                server.read()
        else:  # and so the same as a replay makes again
            server.append(5, 9)
            assert server.read() == b"".join(frame_of(n)[1] for n in range(9))


def test_a_damaged_note_harms_nobody(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", records=3)
    crash(storage)
    note = tmp_path / "data" / ACKED
    whole = note.read_bytes()
    for at in range(40):
        note.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert recovered(tmp_path / "data").holes == []


# -- what is no file -----------------------------------------------------------------------------------------


def device(path: Path) -> None:
    """/dev/zero: it has no end."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:  # only root makes devices
        path.symlink_to("/dev/zero")


def socket_(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # its name would be too long
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


SOMETHING: dict[str, Callable[[Path], None]] = {
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "device": device,
    "socket": socket_,
    "loop": lambda path: path.symlink_to(path),
}
IN_PLACE_OF_A_JOBS = {
    **SOMETHING,
    "huge": huge,
    "garbage": lambda path: path.write_bytes(b"swift-log-manifest 2 00000000\n{}"),
}
PLACES: dict[str, Callable[[Path], Path]] = {
    "segment": segment_of,
    "manifest": lambda data: data / JOB / MANIFEST,
    "stream": lambda data: data / JOB / STREAM,
    "job": lambda data: data / JOB,
    "book": lambda data: data / f"{GRANTED}{JOB}",
}


def is_usual(place: str, something: str) -> bool:
    return place == "segment" or something in ("link", "garbage")


@pytest.mark.parametrize(
    ("place", "something"),
    [
        pytest.param(place, something, marks=() if is_usual(place, something) else pytest.mark.matrix)
        for place in PLACES
        for something in IN_PLACE_OF_A_JOBS
        if (place, something) not in [("stream", "directory"), ("job", "directory"), ("segment", "garbage")]
    ],
)
def test_something_else_in_the_place_of_a_file(
    tmp_path: Path, place: str, something: str, capsys: pytest.CaptureFixture[str]
) -> None:
    two_jobs(tmp_path)
    path = PLACES[place](tmp_path)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    IN_PLACE_OF_A_JOBS[something](path)
    assert inspect(["--directory", str(tmp_path)]) == 1  # and does not wait for a pipe
    shown = capsys.readouterr()
    assert f"inspect: {tmp_path}" in shown.err
    assert f"\n{OTHER} " in shown.out
    with Server(tmp_path) as server:
        assert list(server.apart()) == [JOB]
        assert "swift-ft inspect --drop-job job" in server.apart()[JOB]
        assert server.is_serving()
        for call in (
            lambda: server.fence(generation=2),
            lambda: admin.inventory(server.address, JOB, TIMEOUT_S),
            lambda: admin.trim(server.address, JOB, 1, TIMEOUT_S),
            lambda: admin.reset(server.address, JOB, 1, TIMEOUT_S),
        ):
            with pytest.raises(JobSetApart):
                call()
        server.fence(OTHER, 2)
        admin.drop(server.address, JOB, TIMEOUT_S)
        server.fence()
        server.append(0, 2)
        assert server.apart() == {}
    with Server(tmp_path) as server:
        assert server.apart() == {}
        assert server.read() == b"".join(frame_of(n)[1] for n in range(2))


@pytest.mark.parametrize(
    ("begins", "fields", "says"),
    [
        ("swift-log-manifest 2", '{"job": "job", "job": "job"}', "comes twice"),
        ("swift-log-manifest 2", '{"streams": {"s": {"first": 0, "first": 0}}}', "comes twice"),
        ("swift-log-manifest \x1b[2J", "{}", "does not begin as it should"),
        ("swift-log-manifest 7", "{}", "of version 7"),
        ("swift-log-manifest 2", "[" * 100_000, "no JSON"),
        ("swift-log-manifest 2", '{"generation": 1' + "0" * 5000 + "}", "no JSON"),
    ],
)
def test_a_manifest_that_no_server_writes(begins: str, fields: str, says: str) -> None:
    body = fields.encode()
    with pytest.raises(ManifestDamaged, match=says):
        decode_manifest(f"{begins} {crc32c.crc32c(body):08x}\n".encode() + body)


def test_a_file_that_is_nobodys_is_no_job(tmp_path: Path) -> None:
    two_jobs(tmp_path)
    (tmp_path / "audit.jsonl").write_text("{}")
    with Server(tmp_path) as server:
        assert server.apart() == {}


def test_a_name_that_no_segment_has(tmp_path: Path) -> None:
    two_jobs(tmp_path)
    for name in ("99999999999999999999.seg", "18446744073709551615.seg"):
        (tmp_path / JOB / STREAM / name).write_bytes(b"")
        with Server(tmp_path) as server:
            assert "named after a record that there cannot be" in server.apart()[JOB]
            server.fence(OTHER, 2)
        (tmp_path / JOB / STREAM / name).unlink()
    with Server(tmp_path) as server:
        assert server.apart() == {}


@pytest.mark.parametrize("place", [ACKED, ".lock", ".reserve"])
def test_something_else_in_the_place_of_the_servers_own_files(tmp_path: Path, place: str) -> None:
    """Nobody's records are in them: the server starts, or says in one line why not."""
    two_jobs(tmp_path)
    said = []
    for make in SOMETHING.values():
        path = tmp_path / place
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        make(path)
        try:
            with Server(tmp_path) as server:
                assert server.apart() == {}
                server.fence(OTHER, 1)
        except (ServiceError, UsageError) as error:
            said.append(str(error))
    assert not any("\n" in line for line in said)


def test_something_in_the_way_while_the_server_runs_is_one_jobs_trouble(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        for job in (JOB, OTHER):
            server.fence(job)
        (tmp_path / JOB / STREAM).symlink_to("/etc")
        call = Call(server)
        call.open()
        call.send(frame_of(0)[1])
        assert call.refused()[1] == Reason.APART
        assert list(server.apart()) == [JOB]
        assert server.is_serving()
        server.fence(OTHER, 2)
        admin.drop(server.address, JOB, TIMEOUT_S, force=True)
        server.fence()
        server.append(0, 2)


def test_a_jobs_directory_that_is_removed_while_the_server_runs(tmp_path: Path) -> None:
    """There is nowhere to make its next file."""
    with Server(tmp_path, FIVE_A_SEGMENT) as server:
        for job in (JOB, OTHER):
            server.fence(job)
        server.append(0, 2)
        shutil.rmtree(tmp_path / JOB)
        server.append(2, 5, acked=2)
        call = Call(server)
        call.open(acked=5)
        call.send(frame_of(5)[1])
        assert call.refused()[1] == Reason.APART
        assert list(server.apart()) == [JOB]
        server.fence(OTHER, 2)
        assert server.is_serving()


def test_a_fence_makes_the_directory_of_a_job_anew(tmp_path: Path) -> None:
    """What was written into the file without a name is missed; the next file is found."""
    with Server(tmp_path, FIVE_A_SEGMENT) as server:
        server.fence()
        server.append(0, 2)
        shutil.rmtree(tmp_path / JOB)
        server.fence(generation=2)
        server.append(2, 5, generation=2, acked=2)
        server.append(5, 7, generation=2, acked=5)
        with pytest.raises(grpc.RpcError) as refused:
            server.read()
        assert reason_of(refused.value) == Reason.CORRUPT
        assert server.read(from_step=5) == b"".join(frame_of(n, generation=2)[1] for n in (5, 6))
        assert server.apart() == {}
    found = recovered(tmp_path)
    assert sequences(found) == [5, 6]
    assert spans(found) == [(0, 5)]


# -- what `swift-ft inspect --directory` tells ---------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a server that was killed with 5 records of a file that was not sealed."""
    storage = on_disk(tmp_path / "data", records=5)
    crash(storage)
    return tmp_path / "data"


def shown(directory: Path, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> str:
    assert inspect(["--directory", str(directory), *flags]) == code
    return capsys.readouterr().out


def test_a_last_file_that_is_cut_on_a_boundary(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gone" not in shown(directory, capsys, "--verify")
    os.truncate(files(directory)[0], SEGMENT_HEADER_BYTES + 3 * FRAME)
    why = "records 3 to 4 were acknowledged and are gone"
    assert [hole.reason for hole in recovered(directory).holes] == [why]
    assert f"problem: {JOB}/{STREAM}: {why}" in shown(directory, capsys)
    assert f"damaged: {JOB}/{STREAM}: {why}" in shown(directory, capsys, "--verify", code=1)


@pytest.mark.parametrize(
    "put", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")], ids=["directory", "pipe", "link"]
)
def test_something_else_in_its_place_is_told(
    directory: Path, put: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / ACKED).unlink()
    put(directory / ACKED)
    text = shown(directory, capsys)
    assert f"alarm: {directory / ACKED} cannot be read" in text
    assert STREAM in text


def test_without_it_nothing_is_known(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / ACKED).unlink()
    assert read_acked(directory) == {}
    assert "gone" not in shown(directory, capsys)


def test_what_nobody_has_written_counts_for_nothing(directory: Path) -> None:
    before = read_acked(directory)
    with (directory / ACKED).open("ab") as file:
        for sequence in (SEQUENCE_MAX + 1, (1 << 64) - 1):
            file.write(encode_place((bytes(16), 7), sequence))
        file.write(b"x" * 64 + bytes(1000))
    assert read_acked(directory) == before
    assert list(before.values()) == [5]
