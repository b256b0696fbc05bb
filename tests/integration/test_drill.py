"""The main job, end to end: real processes, real kills, every bit compared.

The failure-free run of each schedule is made by the first test that needs it and shared by all others, of other files
too. `test_drill_matrix.py` has each kill in a run of its own.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from swift_ft import events
from swift_ft.events import read
from swift_ft.lab.drill.cluster import with_environment
from swift_ft.lab.drill.run import TWIN_FILE
from tests.integration.drill_world import (
    CHECKPOINT_EVERY,
    COMMAND,
    STEPS,
    Outcome,
    Twins,
    drill,
    freed_by_the_notice,
    kills,
    newest_checkpoint,
    passed,
)
from tests.patience import eventually

pytestmark = pytest.mark.timeout(300)


# Nothing in the runtime knows GPipe from 1F1B, and `test_exactness.py` has a rank die in it.
@pytest.mark.parametrize(
    "schedule",
    ["1f1b", *(pytest.param(s, marks=pytest.mark.matrix) for s in ("gpipe", "interleavedzerobubble", "zbv"))],
)
def test_each_rank_dies_once_each_in_another_phase(schedule: str, twins: Twins, tmp_path: Path) -> None:
    specs = [
        "rank=0,step=3,microbatch=2,phase=forward",
        "rank=2,step=7,microbatch=1,phase=backward",
        "rank=3,step=9,phase=optimizer",
        "rank=1,step=12,phase=idle",
    ]
    outcome = drill("--schedule", schedule, "--spares", "2", *kills(*specs), twins=twins, at=tmp_path)
    report = passed(outcome)
    assert report["exact"] is True
    assert [recovery["faults"] for recovery in report["recoveries"]] == [[f"fault{n}"] for n in range(4)]
    for recovery in report["recoveries"]:
        assert recovery["verified_sends"] > 0
        assert recovery["recovery_seconds"]["total"] > 0
        freed_by_the_notice(recovery)
        assert sorted(recovery["strategy"].values()).count("checkpoint") == 0
    replayed = report["recoveries"][0]["strategy"]
    first_ranks_stages = report["topology"]["stages_of_rank"]["0"]
    assert {stage for stage, name in replayed.items() if name == "replay"} == set(
        map(str, first_ranks_stages)
    )


def test_over_tls_with_tokens(twins: Twins, tmp_path: Path) -> None:
    """Both services ask for certificates and tokens; ranks and services die and come back with theirs. The tokens
    that the run began with expire while it runs: newer ones are written into their files meanwhile."""
    specs = ["rank=1,step=7,microbatch=1", "service=logserver,step=9", "service=coordinator,state=recovering"]
    report = passed(drill("--secure", *kills(*specs), twins=twins, at=tmp_path))
    assert report["topology"]["secure"] is True
    assert "--secure" in report["rerun"]
    renewed = {event["service"] for event in report["timeline"] if event["event"] == "token_renewed"}
    assert "launcher" in renewed
    said = {event["event"]: event for event in report["timeline"]}
    # What was opened with a token ends with it: so some did expire, and whoever had them came back with others.
    assert said["denied"]["reason"] == "unauthenticated"


def test_the_first_and_the_last_step_and_a_log_server_that_serves_a_replay_when_it_is_back(
    twins: Twins, tmp_path: Path
) -> None:
    specs = [
        "rank=1,step=0,phase=forward",
        # Some steps after the checkpoint: what the server has of them by then, the replay is compared with.
        *("service=logserver,step=8", "rank=2,step=9,microbatch=1"),
        f"rank=3,step={STEPS - 1},phase=optimizer",
    ]
    report = passed(drill("--spares", "2", *kills(*specs), twins=twins, at=tmp_path))
    first, second, third = report["recoveries"]
    assert first["target_version"] == 0
    assert second["strategy"]["2"] == "replay"
    assert second["verified_sends"] > 0
    assert third["faults"] == ["fault3"]


@pytest.mark.matrix
def test_a_survivor_dies_while_the_first_victim_is_replayed(twins: Twins, tmp_path: Path) -> None:
    specs = ["rank=2,step=8,microbatch=1", "rank=1,phase=replay"]
    report = passed(drill("--spares", "2", *kills(*specs), twins=twins, at=tmp_path))
    # The replay may just be over when its death is noticed.
    assert sum(len(recovery["generations"]) for recovery in report["recoveries"]) == 2
    assert report["strategy"]["1"] == "replay"
    assert report["strategy"]["2"] in ("replay", "catch_up")


@pytest.mark.matrix
def test_the_replacement_dies_in_its_replay(twins: Twins, tmp_path: Path) -> None:
    specs = ["rank=2,step=8,microbatch=1", "rank=2,microbatch=2,phase=replay"]
    report = passed(drill("--spares", "2", *kills(*specs), twins=twins, at=tmp_path))
    assert report["strategy"]["2"] == "replay"
    assert report["recovery_seconds"]["superseded"] > 0


def test_a_corrupt_log_is_never_replayed(twins: Twins, tmp_path: Path) -> None:
    specs = ["rank=2,step=8,microbatch=1", "corrupt=log,step=8,stream=s1.F"]
    place = tmp_path / "drill"
    outcome = drill(*kills(*specs), "--directory", str(place), twins=twins, at=tmp_path)
    report = passed(outcome)
    assert report["exact"] is False, "this is the checkpoint's doing"
    assert set(report["strategy"].values()) == {"checkpoint"}
    assert "s1.F" in report["reason"]
    base = newest_checkpoint(place)
    assert base in (0, CHECKPOINT_EVERY)
    assert report["steps_lost"] == 8 - base
    assert "by the checkpoint, not by exact replay" in outcome.stdout


@pytest.mark.matrix
def test_a_run_that_differs_from_its_twin_fails(twins: Twins, tmp_path: Path) -> None:
    """The comparison itself: one digit of one digest of the twin is changed."""
    specs = kills("rank=2,step=8")
    twin = tmp_path / "twin"
    shutil.copytree(twins.of(*specs), twin)
    path = twin / TWIN_FILE
    stored = json.loads(path.read_text())
    digests = stored["digests"][f"rank0-v{STEPS}"]
    digests["optimizer"] = digests["optimizer"][:-1] + ("0" if digests["optimizer"][-1] != "0" else "1")
    path.write_text(json.dumps(stored))
    outcome = drill(*specs, "--twin", str(twin), at=tmp_path)
    assert outcome.exit_code == 1, outcome.explain()
    assert outcome.report is not None
    assert outcome.report["verdict"] == "FAIL"
    assert outcome.report["bitwise_equal"] is False
    assert "rank 0: optimizer differ" in outcome.report["reason"]
    for line in outcome.stderr.splitlines():
        if line.startswith("everything of this drill is in "):
            shutil.rmtree(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--kill", "rank=7,step=3"], "rank must be 0 to 3"),
        (["--json", "/nowhere/report.json"], "--json"),
        (["--directory", "/proc/drill"], "--directory"),
        (["--twin", "/proc/twin"], "--twin"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: list[str], word: str) -> None:
    done = drill(*arguments)
    assert done.exit_code == 2, done.stderr
    assert done.stdout == ""
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_directory_that_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = drill(*kills("rank=2,step=8"), "--directory", str(tmp_path))
    assert done.exit_code == 2
    assert "not empty" in done.stderr


def strays(directory: Path) -> list[int]:
    """Processes of the run in `directory`."""
    return with_environment(events.ENV_EVENTS_DIR, str(directory / "run" / "events"))


def follow_until(directory: Path, process: "subprocess.Popen[str]", name: str) -> list[dict[str, Any]]:
    """Events of the run until one of that name is there."""
    tail = events.Tail(directory / "run" / "events")
    seen: list[dict[str, Any]] = []

    def is_there() -> bool:
        assert process.poll() is None, process.communicate()
        seen.extend(tail.read())
        return any(event["event"] == name for event in seen)

    eventually(is_there, name, 120.0)
    return seen


@pytest.mark.parametrize(
    ("when", "signum", "exit_code"),
    [
        ("worker_spawned", signal.SIGINT, 130),
        pytest.param("step_begin", signal.SIGINT, 130, marks=pytest.mark.matrix),
        pytest.param("fault", signal.SIGTERM, 143, marks=pytest.mark.matrix),
        ("step_end", signal.SIGKILL, -9),
    ],
)
def test_a_drill_that_is_ended_leaves_nothing_running(
    when: str, signum: int, exit_code: int, tmp_path: Path
) -> None:
    directory = tmp_path / "drill"
    words = [*COMMAND, *kills("rank=2,step=8"), "--directory", str(directory)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        seen = follow_until(directory, process, when)
        os.kill(process.pid, signum)
        stdout, stderr = process.communicate(timeout=40)
    assert process.returncode == exit_code, stderr
    if signum != signal.SIGKILL:
        assert len(stderr.splitlines()) == 1, stderr
        assert stdout == ""
        assert strays(directory) == []
    # Killed, it cannot clean up: the kernel does, and the launcher, in its own time.
    served = [event["address"] for event in seen if event["event"] == "serving"]
    eventually(lambda: not strays(directory) and not any(map(is_served, served)), "the end of all of it")


def is_served(address: str) -> bool:
    """A process that is killed loses its command line, by which `strays` knows it, before its sockets."""
    host, port = address.split(":")
    with socket.socket() as asks:
        return asks.connect_ex((host, int(port))) == 0


def test_a_sidecar_that_is_killed_is_replaced_without_a_word(tmp_path: Path) -> None:
    """Those of two neighbours of a rank that is lost later: what they had and sent feeds its replay. The drill makes a
    failure-free run of its own."""
    directory = tmp_path / "drill"
    arguments = [*kills("rank=2,step=12,microbatch=1,phase=backward"), "--strategy", "replay"]
    words = [*COMMAND, *arguments, "--directory", str(directory), "--json", str(tmp_path / "report.json")]
    tail = events.Tail(directory / "run" / "events")
    killed: list[int] = []
    sidecars: dict[str, int] = {}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            for event in tail.read():
                if event["event"] == "sidecar_started":
                    sidecars[event["who"]] = event["sidecar_pid"]
                due = {"rank1": 3, "rank3": 6}.get(event["who"], -1)
                if event["event"] == "step_begin" and event["step"] == due and not event["replay"]:
                    os.kill(sidecars[event["who"]], signal.SIGKILL)
                    killed.append(event["t"])
            time.sleep(0.005)
        stdout, stderr = process.communicate()
    report = json.loads((tmp_path / "report.json").read_text())
    passed(Outcome(process.returncode, stdout, stderr, report))
    assert len(killed) == 2
    started = [event for event in read(directory / "run" / "events") if event["event"] == "sidecar_started"]
    again = sorted(event["who"] for event in started if event["restarts"] == 1)
    assert again == ["rank1", "rank3"]
    assert report["strategy"]["2"] == "replay"
    assert report["log"]["verified_sends"] > 0
