"""The log server as a process: killed, stopped, started wrongly, out of space."""

import socket
import subprocess
from pathlib import Path

import pytest

from swift_ft import events
from swift_ft.log import admin
from swift_ft.log.record import RecordKey
from swift_ft.log.segment import Ending, scan
from tests.faults.world import STREAM, Server, put
from tests.health_probe import check_service
from tests.integration.logserver_world import JOB, TIMEOUT_S, LogServer, run
from tests.log_client import LogWriter
from tests.patience import eventually

# -- lives ------------------------------------------------------------------------------------------


def test_append_stop_start_read(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "--segment-bytes", "300000") as server:
        assert server.serving()
        server.fence(1)
        writer = server.writer()
        for step in range(40):
            put(writer, step)
            if step % 10 == 9:  # a segment is sealed between commits, never within one
                writer.flush(TIMEOUT_S)
        writer.close()
        server.check(0, 40)
        assert server.stop() == 0
        assert len(server.segments(STREAM)) > 1
        for path in server.segments(STREAM):
            assert scan(path).ending is Ending.SEALED
        server.start()
        server.check(0, 40)
        writer = server.writer()
        for step in range(40, 45):
            put(writer, step)
        writer.close()
        server.check(0, 45)
        # A trim gives the space back.
        assert admin.trim(server.address, JOB, 45, TIMEOUT_S) == 45
        eventually(lambda: not server.segments(STREAM))
        server.kill()
        server.start()
        writer = server.writer()
        put(writer, 45)
        writer.close()
        found = server.inventory()
        assert (found.records, found.next_sequence, found.trimmed_below_step) == (1, 46, 45)


# -- starts that fail ---------------------------------------------------------------------------------


def one_line(result: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_port_in_use(tmp_path: Path) -> None:
    with LogServer(tmp_path / "log") as server:
        one_line(run(tmp_path / "other", "--listen", server.address), 2, "the port is in use")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        one_line(run(tmp_path / "other", "--listen", address), 2, "the port is in use")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--listen", "0.0.0.0:0"],
            "is not loopback: give --tls-cert and --tls-key and --token-keys, or --insecure",
        ),
        (["--address-file", "/nowhere/at/all"], "there is no directory"),
    ],
)
def test_bad_flags(tmp_path: Path, flags: list[str], words: str) -> None:
    one_line(run(tmp_path / "log", *flags), 2, words)


def test_bad_directories(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    one_line(run(tmp_path / "file"), 2, "cannot use directory")
    one_line(run(Path("/proc/swift")), 2, "cannot use directory")


def test_off_loopback_only_if_told_so(tmp_path: Path) -> None:
    server = LogServer(tmp_path / "log", "--insecure")
    loopback, server.address = server.address, server.address.replace("127.0.0.1", "0.0.0.0")
    with server:
        health = check_service(loopback)
        assert (health.status, health.insecure, health.tls, health.tokens) == ("SERVING", True, False, False)
    (serving,) = [event for event in events.read(server.events) if event["event"] == "serving"]
    assert serving["insecure"] is True


def test_a_server_takes_the_descriptors_that_it_may_have(tmp_path: Path) -> None:
    """Its shell gave it 128; a hundred streams that are written need more."""
    server = LogServer(tmp_path / "log")
    server.prefix = ("sh", "-c", 'ulimit -Sn 128; exec "$@"', "sh")
    with server:
        server.fence(1)
        writer = LogWriter([server.address], JOB, 1, patience_s=TIMEOUT_S)
        for stream in range(100):
            writer.append(f"s{stream}.F", RecordKey(0, 0, 0), "uint8", (1,), b"x")
        writer.flush(TIMEOUT_S)
        writer.close()
        found = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert [one.records for one in found] == [1] * 100
