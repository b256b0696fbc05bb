"""Short soaks: of the log server, and of servers that are broken on purpose, which must be found."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.launch_world import assert_all_gone
from tests.patience import eventually
from tests.soak import soak
from tests.soak.memory import Rule

pytestmark = [pytest.mark.timeout(240), pytest.mark.matrix]

TIMEOUT_S = 60.0
SECONDS, KILL_EVERY_S = 24.0, 4.0
LEAK_MIB_S = 120
WITHOUT_KILLS = 1000.0

HASTY = """
import sys, time
from swift_ft_services.logserver import __main__ as program
from swift_ft_services.logserver.engine import Committer
from swift_ft._pb import log_pb2

honest = Committer._commit

def acknowledge_first(self, batch, sync):
    told = {queued.stream.tag: (queued.stream.name, queued.write.sequence + 1) for queued in batch}
    with self._changed:
        for tag, (name, sequence) in told.items():
            holder = self._state.holders.get(tag)
            if holder is not None:
                acked = log_pb2.Acked(stream=name, durable_sequence=sequence)
                holder.outbox.put(log_pb2.AppendReply(acked=[acked]))
    time.sleep(0.1)
    honest(self, batch, sync)

Committer._commit = acknowledge_first
sys.exit(program.main())
"""

LEAKY = f"""
import sys, time
from swift_ft_services.logserver import __main__ as program
from swift_ft_services.logserver.storage import DirectoryStorage

honest, kept, began = DirectoryStorage.commit, [], time.monotonic()

def keep(self, writes, sync):
    honest(self, writes, sync)
    while len(kept) < (time.monotonic() - began) * {LEAK_MIB_S}:
        kept.append(b"x" * (1 << 20))

DirectoryStorage.commit = keep
sys.exit(program.main())
"""

FORGETFUL = """
import sys
from swift_ft_services.logserver import __main__ as program
from swift_ft_services.logserver.core import LogCore

honest = LogCore.begin_trim

def too_far(self, job, below_step):
    return honest(self, job, below_step + 1 if below_step else 0)

LogCore.begin_trim = too_far
sys.exit(program.main())
"""


def run(
    tmp_path: Path,
    program: str = "",
    *,
    seconds: float = SECONDS,
    kill_every_s: float = KILL_EVERY_S,
    **more: Any,
) -> dict[str, Any]:
    if program:
        path = tmp_path / "server.py"
        path.write_text(program)
        more["server"] = (sys.executable, str(path))
    config = soak.SoakConfig(seconds=seconds, kill_every_s=kill_every_s, seed=5, disk_bytes=1 << 30, **more)
    directory = tmp_path / "soak"
    directory.mkdir()
    before = set(psutil.Process().children(recursive=True))
    result = soak.soak(config, directory)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    return result


def test_everything_acknowledged_is_there_after_every_kill(tmp_path: Path) -> None:
    result = run(tmp_path)
    # Of memory nothing is said after so short a time: processes are still filling up.
    assert result["verdict"] == "INCONCLUSIVE", result
    assert result["reason"].startswith("too little was seen of the memory"), result
    assert {"server", "writer"} <= {word for kill in result["kills"] for word in kill["what"].split(" and ")}
    assert result["generations"] == 1 + sum("writer" in kill["what"] for kill in result["kills"])
    assert result["compared_bytes"] >= result["acked_bytes"] > 0
    assert result["trims"] > 0
    assert result["kept_bytes_max"] <= 1 << 30
    assert result["resent_records"] > 0
    assert {one["role"] for one in result["memory"]} == {
        "log server",
        *(f"{role} s{n}.F" for role in ("reader", "writer") for n in range(2)),
    }


def test_a_server_that_acknowledges_before_it_writes_is_found(tmp_path: Path) -> None:
    result = run(tmp_path, HASTY, seconds=60)
    assert result["verdict"] == "FAIL"
    assert "corrupt" in result["reason"].lower() or "gone" in result["reason"], result["reason"]
    assert result["kills"]


def test_a_server_that_leaks_is_found(tmp_path: Path) -> None:
    """Unit tests show that nothing else is; `docs/benchmarks.md` shows the server as it is."""
    rule = Rule(warm_up_s=SECONDS / 2, percent_per_minute_max=100.0, observed_s_min=SECONDS / 3)
    result = run(tmp_path, LEAKY, kill_every_s=WITHOUT_KILLS, memory=rule)
    assert result["verdict"] == "FAIL"
    assert "memory is not flat: log server" in result["reason"]
    (server,) = [one for one in result["memory"] if one["role"] == "log server"]
    mib_a_minute = server["percent_per_minute"] / 100 * server["median_bytes"] / (1 << 20)
    assert mib_a_minute == pytest.approx(60 * LEAK_MIB_S, rel=0.3)


def test_a_server_that_trims_too_far_is_found(tmp_path: Path) -> None:
    result = run(tmp_path, FORGETFUL)
    assert result["verdict"] == "FAIL"
    assert "it dropped those below" in result["reason"]


def test_a_soak_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak.soak", "--directory", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def all_of_it() -> list[psutil.Process] | None:
        found = psutil.Process(process.pid).children(recursive=True)
        return found if len(found) >= len(("server", "writer", "writer", "reader", "reader")) else None

    below = eventually(all_of_it, "its processes", TIMEOUT_S)
    process.terminate()
    assert "nothing is judged" in process.communicate(timeout=TIMEOUT_S)[1]
    assert process.returncode == 3
    assert_all_gone(below)
    assert not list(tmp_path.iterdir())
