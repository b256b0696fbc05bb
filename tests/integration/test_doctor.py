"""`swift-ft doctor` on this machine, against real services."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import LogUnavailable
from swift_ft.launch.standalone import free_port
from swift_ft.log.record import RecordKey
from tests.fake_etcd import FakeEtcd
from tests.health_probe import check_service
from tests.integration.coordinator_world import Coordinator
from tests.integration.logserver_world import REPOSITORY, LogServer, serve
from tests.log_client import LogWriter
from tests.patience import eventually


def doctor(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "swift_ft.cli", "doctor", *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**{name: value for name, value in os.environ.items() if "_TLS_" not in name}, **environment},
    )


def statuses(path: Path) -> dict[str, Any]:
    return {finding["check"]: finding["status"] for finding in json.loads(path.read_text())["findings"]}


def test_services_that_answer(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path / "meta").start()
    try:
        with LogServer(tmp_path / "log") as server:
            done = doctor(
                *("--server", server.address, "--coordinator", coordinator.address),
                *("--directory", server.directory, "--json", tmp_path / "report"),
            )
    finally:
        assert coordinator.stop() == 0
    assert done.stderr == ""
    report = json.loads((tmp_path / "report").read_text())
    failed = [finding for finding in report["findings"] if finding["status"] == "fail"]
    # Where the tests run may be any machine: only what is said of the services and of the directory is known.
    of_machine = {"open files", "filesystem"}
    assert [finding for finding in failed if finding["check"] not in of_machine] == []
    assert done.returncode == (3 if failed else 0)
    assert report["ok"] is not bool(failed)
    found = statuses(tmp_path / "report")
    for kind, address in (("log server", server.address), ("coordinator", coordinator.address)):
        assert found[f"{kind} {address}"] in ("ok", "warn")  # a slow machine warns of the round trip
        assert found[f"{kind} {address} version"] == "ok"
        assert found[f"{kind} {address} clock"] == "ok"
    told = {finding["check"]: finding["found"] for finding in report["findings"]}
    assert told["directory"] == f"{server.directory}, a log server holds it"
    assert told[f"log server {server.address}"].startswith("SERVING, ")
    assert told[f"log server {server.address} records"] == "are read in their writers' memory"
    lines = done.stdout.splitlines()
    assert len(lines) == len(report["findings"]) + 1
    assert all(line[:6] in ("ok    ", "warn  ", "fail  ") for line in lines[:-1])


def test_services_that_do_not_answer_or_cannot(tmp_path: Path) -> None:
    with LogServer(tmp_path / "log", file_bytes_max=1 << 20) as server:
        server.fence(1)
        writer = LogWriter([server.address], "job", 1, patience_s=1.0)
        for step in range(80):
            writer.append("s0.F", RecordKey(step, 0, 0), "uint8", (20_000,), bytes(20_000))
        with pytest.raises(LogUnavailable):
            writer.flush(20)
        nobody = f"127.0.0.1:{free_port()}"
        done = doctor(
            *("--server", server.address, "--server", nobody),
            *("--timeout", "1", "--json", tmp_path / "report"),
        )
        writer.close(0.0)
    assert done.returncode == 3
    found = statuses(tmp_path / "report")
    assert found[f"log server {server.address}"] == "fail"
    assert found[f"log server {nobody}"] == "fail"
    (line,) = [line for line in done.stdout.splitlines() if f"log server {nobody}" in line]
    assert "cannot be reached within 1 s: " in line
    assert "Connection refused" in line
    assert "NOT_SERVING" in done.stdout


def test_of_several_coordinators_one_serves(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(FakeEtcd())
        addresses = []
        for name in "ab":
            (tmp_path / name).mkdir()
            process, address = serve("coordinator", tmp_path / name, "--store", f"etcd://{etcd.address}")
            stack.enter_context(process)
            stack.callback(process.kill)
            addresses.append(address)
            eventually(lambda: check_service(addresses[0]).status == "SERVING")
        several = ",".join(addresses)
        nobody = f"127.0.0.1:{free_port()}"
        done = doctor("--coordinator", several, "--coordinator", addresses[1], "--json", tmp_path / "report")
        lost = doctor("--coordinator", f"{nobody},{addresses[1]}", "--timeout", "1")
    found = json.loads((tmp_path / "report").read_text())["findings"]
    told = [
        (one["found"][:7], one["status"]) for one in found if one["check"] == f"coordinator {addresses[1]}"
    ]
    assert told == [("NOT_SER", "ok"), ("NOT_SER", "fail")]
    assert "it stands by, and another one serves" in done.stdout
    assert "stands by" not in lost.stdout
    assert f"fail  coordinator {nobody}" in lost.stdout


def test_certificates_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    (tmp_path / "key").chmod(0o600)
    done = doctor(SWIFT_TLS_KEY=str(tmp_path / "key"), SWIFT_TLS_CERT=str(tmp_path / "absent"))
    assert done.returncode == 3
    assert "fail  SWIFT_TLS_KEY" in done.stdout
    assert "No such file" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--coordinator", "127.0.0.1:1,nowhere"], "--coordinator 'nowhere' is not HOST:PORT"),
        (["--server", "nowhere"], "--server 'nowhere' is not HOST:PORT"),
        (["--json", "/nowhere/at/all"], "--json /nowhere/at/all: give a file in a directory that exists"),
        (["--timeout", "0"], "at least 0.01 s"),
        (["--fly"], "unrecognized"),
    ],
)
def test_usage(arguments: list[str], words: str) -> None:
    done = doctor(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr
