"""`swift-ft inspect`, on files that a real server has made."""

import contextlib
import io
import json
import os
import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import crc32c
import pytest

from swift_ft import cli
from swift_ft.launch.standalone import free_port
from swift_ft.log import admin
from swift_ft.log.record import DTYPE_BY_NAME, RecordKey
from swift_ft.log.segment import (
    scan,
    walk,
)
from tests.integration.logserver_world import JOB, TIMEOUT_S, LogServer, python
from tests.log_client import LogWriter

DTYPES = {name: dtype.safetensors for name, dtype in DTYPE_BY_NAME.items() if dtype.safetensors}
STEPS, STREAMS, SIZE = 20, ("s0.F", "s1.B"), 20_000


def inspect(*flags: object, code: int = 0) -> str:
    """What it prints; on an error the one line that it says."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        found = cli.main(["inspect", *map(str, flags)])
    stdout, stderr = out.getvalue(), err.getvalue()
    assert found == code, stdout + stderr
    if code in (2, 3):
        assert stdout == ""
        assert stderr.count("\n") == 1, stderr
        assert stderr.startswith(("inspect: ", "swift"))
        return stderr
    return stdout + stderr


def body_of(stream: str, step: int) -> bytes:
    return random.Random(f"{stream} {step}").randbytes(SIZE)


def fill(server: LogServer) -> None:
    server.fence(1)
    writer = LogWriter([server.address], JOB, 1)
    for step in range(STEPS):
        for stream in STREAMS:
            writer.append(stream, RecordKey(step, 0, 0), "uint8", (SIZE,), body_of(stream, step))
        writer.flush(TIMEOUT_S)
    writer.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[LogServer]:
    with LogServer(tmp_path / "log", "--segment-bytes", "100000") as server:
        server.may_say = re.compile("WARNING (torn_tail|stream_corrupt|quarantined) ")
        fill(server)
        yield server


def shown(tmp_path: Path, *flags: object, code: int = 0) -> dict[str, object]:
    path = tmp_path / "shown.json"
    inspect(*flags, "--json", path, code=code)
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def streams_of(facts: dict[str, object]) -> dict[str, dict[str, object]]:
    (job,) = facts["jobs"]  # type: ignore[misc]
    return {stream["stream"]: stream for stream in job["streams"]}


def flip(server: LogServer, stream: str, index: int, offset: int = 5000) -> int:
    """A bit in the body of a record of the first file."""
    path = server.segments(stream)[0]
    record = walk(path).records[index]
    data = bytearray(path.read_bytes())
    data[record.offset + offset] ^= 1
    path.write_bytes(bytes(data))
    return record.header.sequence


# -- what is there ----------------------------------------------------------------------------------------


def test_server_and_files_tell_the_same(served: LogServer, tmp_path: Path) -> None:
    assert admin.trim(served.address, JOB, 7, TIMEOUT_S) == 7
    online = shown(tmp_path, "--server", served.address)
    beside = shown(tmp_path, "--directory", served.directory)
    assert beside["server_runs"] is True
    assert served.stop() == 0
    offline = shown(tmp_path, "--directory", served.directory, "--verify")
    assert offline["server_runs"] is False
    for facts in (online, beside, offline):
        (job,) = facts["jobs"]  # type: ignore[misc]
        assert (job["job"], job["generation"], job["trimmed_below_step"]) == (JOB, 1, 7)
        assert job["records"] == 2 * (STEPS - 7)
        for stream in streams_of(facts).values():
            assert (stream["first_sequence"], stream["durable_sequence"]) == (7, STEPS)
            assert (stream["appended_sequence"], stream["records"]) == (STEPS, STEPS - 7)
            assert (stream["first_step"], stream["last_step"]) == (7, STEPS - 1)
            assert stream["bytes"] == (STEPS - 7) * (SIZE + 136)
            assert stream["problems"] == []
    assert offline["verified"] == {"records": 26, "bytes": 26 * (SIZE + 136), "damage": []}
    segments = streams_of(offline)["s0.F"]["segments"]
    assert isinstance(segments, list)
    assert [segment["name"] for segment in segments] == [path.name for path in served.segments("s0.F")]
    assert {segment["ending"] for segment in segments} == {"sealed"}
    served.start()


def test_tables(served: LogServer) -> None:
    text = python("-m", "swift_ft.cli", "inspect", "--server", served.address).stdout
    assert [line.split() for line in text.splitlines()][-2:] == [
        [JOB, *["s0.F", "0", "20", "20", "20", "402.7", "kB", "0", "to", "19", "-", "ok"]],
        [JOB, *["s1.B", "0", "20", "20", "20", "402.7", "kB", "0", "to", "19", "-", "ok"]],
    ]


def test_a_torn_tail_is_shown_and_is_no_damage(served: LogServer, tmp_path: Path) -> None:
    served.kill()
    path = served.segments("s0.F")[-1]
    end = scan(path).end
    with path.open("r+b") as file:
        file.seek(end)
        file.write(b"SWFR\x01")
        file.truncate()
    offline = shown(tmp_path, "--directory", served.directory, "--verify")
    segments = streams_of(offline)["s0.F"]["segments"]
    assert isinstance(segments, list)
    assert segments[-1]["torn_bytes"] == 5
    served.start()


def test_holes_and_quarantine_have_their_reasons(served: LogServer, tmp_path: Path) -> None:
    served.kill()
    served.segments("s0.F")[1].unlink()
    facts = shown(tmp_path, "--directory", served.directory)
    assert streams_of(facts)["s0.F"]["problems"] == ["records 5 to 9 are gone"]
    assert "damaged: job/s0.F: records 5 to 9 are gone" in inspect(
        "--directory", served.directory, "--verify", code=1
    )
    served.start()
    writer = LogWriter([served.address], JOB, 1, patience_s=1.0)
    writer.close()
    online = streams_of(shown(tmp_path, "--server", served.address))["s0.F"]["problems"]
    assert online == ["records 5 to 9 are gone"]


# -- verify -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_verify_names_every_damaged_record(served: LogServer, clean: bool) -> None:
    if clean:
        assert served.stop() == 0
    else:
        served.kill()
    assert "verified 40 records, 805.4 kB: all is well" in inspect(
        "--directory", served.directory, "--verify"
    )
    flip(served, "s0.F", 2)
    flip(served, "s1.B", 0)
    flip(served, "s1.B", 4, offset=40)  # in a header
    text = inspect("--directory", served.directory, "--verify", code=1)
    damage = [line for line in text.splitlines() if line.startswith("damaged: ")]
    assert len(damage) == 3, text
    assert "s0.F: 00000000000000000000.seg: record 2 at offset" in damage[0]
    assert "step 2 microbatch 0 slot 0: its body's checksum does not match" in damage[0]
    assert "s1.B: 00000000000000000000.seg: record 0 " in damage[1]
    assert "record 4 at offset" in damage[2]
    assert "verified 37 records" in text
    served.start()


def test_verify_goes_down_to_the_digest(served: LogServer) -> None:
    """A body and its checksums that fit together, and are another tensor's."""
    assert served.stop() == 0
    path = served.segments("s0.F")[0]
    scanned = scan(path).records[1]
    data = bytearray(path.read_bytes())
    at = scanned.offset
    body = at + scanned.header.header_bytes
    data[body] ^= 1
    struct.pack_into("<I", data, at + 12, crc32c.crc32c(bytes(data[body : body + SIZE])))
    struct.pack_into("<I", data, at + 8, crc32c.crc32c(bytes(data[at + 12 : body])))
    path.write_bytes(bytes(data))
    text = inspect("--directory", served.directory, "--verify", code=1)
    assert text.count("damaged: ") == 1
    assert "the digest of its tensor does not match" in text
    served.start()


def test_what_a_trim_covers_is_no_damage(served: LogServer) -> None:
    served.kill()
    flip(served, "s0.F", 2)
    served.start()
    assert admin.trim(served.address, JOB, 4, TIMEOUT_S) == 4
    assert served.stop() == 0
    assert "all is well" in inspect("--directory", served.directory, "--verify")
    served.start()


def test_a_damaged_manifest_is_said_in_one_line(served: LogServer) -> None:
    assert served.stop() == 0
    manifest = served.directory / JOB / ".manifest"
    good = manifest.read_bytes()
    manifest.write_bytes(good.replace(b'"generation": 1', b'"generation": 2'))
    text = inspect("--directory", served.directory, code=1)
    assert "its checksum does not match" in text.splitlines()[-1]
    assert "damaged: job: " in inspect("--directory", served.directory, "--verify", code=1)
    manifest.write_bytes(good)
    served.start()


def test_another_jobs_file_is_damage(served: LogServer) -> None:
    assert served.stop() == 0
    mine, others = served.segments("s0.F")[0], served.segments("s1.B")[0]
    mine.write_bytes(others.read_bytes())
    text = inspect("--directory", served.directory, "--verify", code=1)
    assert "the segment is one of stream s1.B" in text
    served.may_say = re.compile("WARNING stream_corrupt ")
    served.start()


def test_the_names_of_small_floats_are_those_of_safetensors() -> None:
    """What is one or two bytes wide has the same bits under a wrong name, and another value."""
    small = {log: name for log, name in DTYPES.items() if "float" in log and DTYPE_BY_NAME[log].bytes <= 2}
    assert small == {
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
    }


# -- dropping ---------------------------------------------------------------------------------------------


def test_dropping_a_job(served: LogServer, tmp_path: Path) -> None:
    assert "last spoken for" in inspect("--server", served.address, "--drop-job", JOB, code=3)
    words = inspect("--directory", served.directory, "--drop-job", JOB, "--force", code=3)
    assert "a log server runs on" in words
    assert "there is no job other here" in inspect("--server", served.address, "--drop-job", "other", code=2)
    text = inspect("--server", served.address, "--drop-job", JOB, "--force")
    assert text == f"job {JOB} is dropped: 40 records, 805.4 kB\n"
    assert shown(tmp_path, "--server", served.address)["jobs"] == []
    fill(served)  # from generation 1, as if it had never been
    assert served.stop() == 0
    words = inspect("--directory", served.directory, "--drop-job", JOB, code=3)
    assert "and its coordinator may come back to it" in words
    assert (served.directory / JOB).exists()
    old = 1_000_000_000.0
    for path in (served.directory / JOB, *(served.directory / JOB).rglob("*")):
        os.utime(path, (old, old))
    inspect("--directory", served.directory, "--drop-job", JOB)
    assert sorted(path.name for path in served.directory.iterdir()) == [".acked", ".lock", ".reserve"]
    served.start()
    assert shown(tmp_path, "--server", served.address)["jobs"] == []


# -- what is said of mistakes -------------------------------------------------------------------------------


def test_mistakes(tmp_path: Path) -> None:
    with LogServer(tmp_path / "log") as server:
        fill(server)
    log, missing = tmp_path / "log", tmp_path / "missing"
    for flags, words in (
        ((), "give --directory DIR or --server HOST:PORT"),
        (("--directory", log, "--server", "x:1"), "one of them"),
        (("--directory", missing), f"there is no directory {missing}"),
        (("--directory", tmp_path), "is not the directory of a log server"),
        (("--directory", log, "--job", "nobody"), f"there is no job nobody in {log}; there are: {JOB}"),
        (("--directory", log, "--job", "../x"), "is not allowed"),
        (("--server", "127.0.0.1:1", "--verify"), "--verify reads files"),
        (
            ("--directory", log, "--json", missing / "x"),
            f"--json {missing / 'x'}: give a file in a directory",
        ),
        (("--directory", log, "--force"), "--force is for --drop-job"),
    ):
        assert words in inspect(*flags, code=2)
    address = f"127.0.0.1:{free_port()}"
    assert f"log server {address}" in inspect("--server", address, "--timeout-s", "0.5", code=3)
