"""The systems that are compared: how each is installed, and how a run of it is started."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from swift_ft import events
from swift_ft.comm import LOOPBACK
from swift_ft.errors import ServiceError
from swift_ft.lab.bench.marks import read
from swift_ft.lab.bench.peers.trial import REPLICAS, Trial
from swift_ft.lab.drill.cluster import Cluster, Process, own_environment
from swift_ft.launch.standalone import free_port

PEERS = {
    "torchft": ("torchft", "torchft==0.2.0"),
    "nvrx": ("nvidia_resiliency_ext.inprocess", "nvidia-resiliency-ext==0.4.1 packaging"),
}
"""Peer -> the module that it needs, and the packages that provide it, in an environment of its own."""


def peer_in(peer: str, directory: Path) -> tuple[str, str]:
    """Returns the interpreter of the peer's environment in `directory`, and the version there. Raises ServiceError if
    there is none."""
    module, packages = PEERS[peer]
    python = directory / peer / "bin" / "python"
    name = packages.partition("==")[0]
    words = f"import {module}, importlib.metadata as m, torch; print(m.version({name!r}), 'torch', torch.__version__)"
    try:
        return str(python), subprocess.check_output(
            [python, "-c", words], stderr=subprocess.PIPE, text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ServiceError(
            f"{python} has no {module} (pip install torch numpy {packages}): {error}"
        ) from None


TRAINERS = "swift_ft.lab.bench.peers"
STRATEGIES = ("auto", "snapshot", "checkpoint", "reinit", "rollback", "shrink", "replay", "lossy-forward")
"""swift's strategies that two replicas of a whole model can use. (`adaptive` is for pipelines.)"""
LIMIT_S = 240.0
"""Time limit of a run, in addition to its steps."""
LEAVE_S = 10.0
"""Time that the other replica has to end once one has ended."""


class System(NamedTuple):
    words: str
    """Name in tables and drawings."""
    peer: str = ""
    """Peer whose environment it needs (a key of `PACKAGES`), or ""."""
    strategy: str = ""
    """swift's strategy, or "" for other systems."""
    settings: Mapping[str, Any] = {}
    """Settings of its trainer."""


_ONE, _BOTH, _SPARE = {"least": 1}, {"least": REPLICAS}, {"least": REPLICAS, "spares": 1}
_TUNED = {"heartbeat_ms": 300, "join_ms": 1000, "timeout_s": 2.0}
SYSTEMS: Mapping[str, System] = {
    "torchrun": System("torchrun, DCP"),
    "torchrun-async": System("torchrun, DCP async", settings={"asynchronous": True}),
    "torchft": System("torchft, 1 replica is enough", "torchft", settings=_ONE),
    "torchft-tuned": System("torchft, 1 is enough, tuned", "torchft", settings=_ONE | _TUNED),
    "torchft-all": System("torchft, both are needed", "torchft", settings=_BOTH),
    "torchft-all-tuned": System("torchft, both, tuned", "torchft", settings=_BOTH | _TUNED),
    "torchft-spare": System("torchft, 2 and a spare", "torchft", settings=_SPARE),
    "torchft-spare-tuned": System("torchft, 2 and a spare, tuned", "torchft", settings=_SPARE | _TUNED),
    "nvrx": System("NVRx, in-process restart", "nvrx"),
    "swift": System("swift, auto", strategy="auto"),
    **{f"swift-{name}": System(f"swift, {name}", strategy=name) for name in STRATEGIES if name != "auto"},
}
INEXACT = ("torchft", "torchft-tuned", "swift-lossy-forward")
"""Systems that by design continue with half of the data."""


Command = tuple[str, list[str], dict[str, str]]
"""Name of a process, to which its output goes; words; environment, beside that of all."""


def _packages() -> str:
    """Returns the PYTHONPATH of swift_ft and its services, for interpreters without them."""
    specs = [importlib.util.find_spec(name) for name in ("swift_ft", "swift_ft_services")]
    return os.pathsep.join(
        str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin
    )


def _environment() -> dict[str, str]:
    # A peer's environment does not contain swift.
    return own_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _packages(), **LOOPBACK}


def run(name: str, trial: Trial, python: str) -> list[dict[str, Any]]:
    """Runs a system once and returns the run's marks. `python` is the interpreter of its environment. A run that
    exceeds its time limit is ended, and lacks marks."""
    system, directory = SYSTEMS[name], Path(trial.directory)
    directory.mkdir()
    given = json.dumps(
        dataclasses.asdict(trial) | {"strategy": system.strategy, "settings": dict(system.settings)}
    )
    with ExitStack() as stack:
        if system.strategy:
            cluster = stack.enter_context(
                Cluster(
                    directory / "cluster",
                    ranks=REPLICAS,
                    spares=1,
                    trainer=("-m", f"{TRAINERS}.swift_trainer"),
                    trainer_arguments=[given],
                    settings={events.ENV_EVENTS_DIR: "", **LOOPBACK},  # trainers write no events
                )
            )
            _await_end(trial, lambda: cluster.poll() is not None)
            return read(trial.directory)
        commands = {"torchft": _torchft, "nvrx": _nvrx, "": _torchrun}[system.peer]
        processes: list[Process] = []
        for process_name, words, environment in commands(system, given, python):
            env, said = _environment() | environment, directory / process_name
            process = Process(process_name, words, env, said, last=signal.SIGTERM, program=())
            stack.callback(process.stop, LEAVE_S)
            processes.append(process)
        # NVRx's ranks have no parent agent, so the victim's end does not end the run.
        over = all if system.peer == "nvrx" else any
        _await_end(trial, lambda: over(process.poll() is not None for process in processes))
        return read(trial.directory)


def _torchrun(_system: System, given: str, python: str) -> Iterator[Command]:
    words = [python, "-P", *_launcher(REPLICAS), "-m", f"{TRAINERS}.torchrun_trainer", given]
    # Without this, restarted ranks find dead ranks' addresses in the agent's store and fail (torch 2.13, gloo;
    # https://github.com/pytorch/pytorch/issues/135712).
    yield "torchrun", words, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _torchft(system: System, given: str, python: str) -> Iterator[Command]:
    least, address = str(system.settings["least"]), f"127.0.0.1:{free_port()}"
    words = [str(Path(python).with_name("torchft_lighthouse")), "--bind", address, "--min_replicas", least]
    # 10 s as in its README; its own default is a minute.
    words += ["--join_timeout_ms", str(system.settings.get("join_ms", 10_000))]
    if "heartbeat_ms" in system.settings:
        words += ["--heartbeat_timeout_ms", str(system.settings["heartbeat_ms"])]
    yield "lighthouse", words, {}
    words = [python, "-P", *_launcher(1), "-m", f"{TRAINERS}.torchft_trainer", given]
    for replica in range(REPLICAS + int(system.settings.get("spares", 0))):
        environment = {"TORCHFT_LIGHTHOUSE": f"http://{address}", "REPLICA_GROUP_ID": str(replica)}
        yield f"replica{replica}", words, environment


def _nvrx(_system: System, given: str, python: str) -> Iterator[Command]:
    words = [python, "-P", "-m", f"{TRAINERS}.nvrx_trainer", given]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(REPLICAS + 1)}
    for rank in range(REPLICAS + 1):  # the last one is the reserve
        yield f"rank{rank}", words, {"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting}


def _launcher(processes: int) -> list[str]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    # Without --log-dir each run leaves an empty directory.
    return [*words, "--max-restarts", "3", "--log-dir", os.devnull]


def _await_end(trial: Trial, ended: Callable[[], bool]) -> None:
    """Waits until all replicas or the launcher have ended, or one replica has and the other does not follow in time."""
    limit = time.monotonic() + LIMIT_S + 2 * trial.steps * (trial.wait_s + 0.01)
    while time.monotonic() < limit:
        gone = ended()
        marks = [mark for mark in read(trial.directory) if mark["what"] == "ended"]
        if gone or len(marks) == REPLICAS or (marks and time.monotonic() > marks[0]["at"] + LEAVE_S):
            return
        time.sleep(0.2)


def tail(trial: Trial) -> str:
    """Returns the last lines of the output of the run's processes."""
    texts = (path.read_text(errors="replace") for path in Path(trial.directory).glob("*") if path.is_file())
    return "\n".join("\n".join(text.splitlines()[-3:]) for text in texts)
