"""The systems that are compared: how each is installed, and how a run of it is started."""

import dataclasses
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from shutil import rmtree
from types import MappingProxyType
from typing import Any, NamedTuple

from swift_ft import events
from swift_ft.comm import LOOPBACK
from swift_ft.lab.bench.peers.trial import REPLICAS, Trial, read
from swift_ft.lab.drill.cluster import Cluster, dying_with_this

# The peers' environments: peers are installed separately, never into swift's own environment.

PACKAGES: Mapping[str, tuple[str, str, Sequence[str]]] = MappingProxyType(
    {
        "torchft": ("torchft", "torchft==0.2.0", ()),
        "nvrx": ("nvidia_resiliency_ext.inprocess", "nvidia-resiliency-ext==0.4.1", ("packaging",)),
    }
)
"""Peer -> the module that it needs, the package that provides it, and that package's undeclared requirements."""
INSTALL_S = 1200.0


class Missing(Exception):
    """Says in one line why a peer is not available."""


def python_of(peer: str, directory: Path) -> str:
    """Returns the interpreter of the peer's environment in `directory`, created if missing. Raises Missing."""
    module, package, more = PACKAGES[peer]
    place = directory / peer
    python = place / "bin" / "python"
    if not python.exists():
        torch = f"torch=={metadata.version('torch').partition('+')[0]}"
        words = [str(python), "-m", "pip", "install", "--quiet", torch, "numpy", package, *more]
        print(f"installing {package} for {peer} in {place}", file=sys.stderr, flush=True)
        try:
            _run([sys.executable, "-m", "venv", str(place)], "venv")
            _run(words, f"pip install {package}")
        except BaseException:
            rmtree(place, ignore_errors=True)  # so that an incomplete environment is not used later
            raise
    _run([str(python), "-c", f"import {module}"], f"import {module}")
    return str(python)


def version_of(peer: str, python: str) -> str:
    """Returns the version of the peer's package, with that of its torch."""
    name = PACKAGES[peer][1].partition("==")[0]
    words = f"import importlib.metadata as m, torch; print(m.version({name!r}), 'torch', torch.__version__)"
    return _run([python, "-c", words], f"the version of {name}").strip()


def _run(words: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{what}: {error}") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise Missing(f"{what}: {lines[-1].strip() if lines else f'exit code {done.returncode}'}")
    return done.stdout


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


class Processes:
    """Processes that one run has started, other than swift's. As a context manager it ends them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Processes":
        return self

    def start(self, name: str, command: Sequence[str], **environment: str) -> None:
        """Starts a process. Its output goes to a file of that name."""
        with (self._directory / name).open("ab") as output:
            self._running.append(
                subprocess.Popen(
                    command,
                    env=_environment() | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=dying_with_this(signal.SIGTERM),  # noqa: PLW1509  (no threads here)
                )
            )

    def ended(self) -> bool:
        """Returns whether any process has ended, with or without success."""
        return any(process.poll() is not None for process in self._running)

    def all_ended(self) -> bool:
        return all(process.poll() is not None for process in self._running)

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _packages() -> str:
    """Returns the PYTHONPATH of swift_ft and its services, for interpreters without them."""
    specs = [importlib.util.find_spec(name) for name in ("swift_ft", "swift_ft_services")]
    return os.pathsep.join(
        str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin
    )


def _environment() -> dict[str, str]:
    foreign = ("SWIFT_", "TORCHELASTIC_", "TORCHFT_")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # A peer's environment does not contain swift.
    return ours | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _packages(), **LOOPBACK}


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
                    trainer=("-m", "swift_ft.lab.bench.peers.swift_trainer"),
                    trainer_arguments=[given],
                    settings={events.ENV_EVENTS_DIR: "", **LOOPBACK},  # trainers write no events
                )
            )
            _await_end(trial, lambda: cluster.poll() is not None)
            return read(trial.directory)
        processes = stack.enter_context(Processes(directory))
        if system.peer == "torchft":
            _start_torchft(processes, system, given, python)
        elif system.peer == "nvrx":
            _start_nvrx(processes, given, python)
        else:
            words = [
                python,
                "-P",
                *_torchrun(REPLICAS),
                "-m",
                "swift_ft.lab.bench.peers.torchrun_trainer",
                given,
            ]
            # Without this, restarted ranks find dead ranks' addresses in the agent's store and fail (torch 2.13, gloo;
            # https://github.com/pytorch/pytorch/issues/135712).
            processes.start("torchrun", words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        # NVRx's ranks have no parent agent, so the victim's end does not end the run.
        _await_end(trial, processes.all_ended if system.peer == "nvrx" else processes.ended)
        return read(trial.directory)


def _start_torchft(processes: Processes, system: System, given: str, python: str) -> None:
    least, address = str(system.settings["least"]), f"127.0.0.1:{_free_port()}"
    words = [str(Path(python).with_name("torchft_lighthouse")), "--bind", address, "--min_replicas", least]
    # 10 s as in its README; its own default is a minute.
    words += ["--join_timeout_ms", str(system.settings.get("join_ms", 10_000))]
    if "heartbeat_ms" in system.settings:
        words += ["--heartbeat_timeout_ms", str(system.settings["heartbeat_ms"])]
    processes.start("lighthouse", words)
    for replica in range(REPLICAS + int(system.settings.get("spares", 0))):
        processes.start(
            f"replica{replica}",
            [python, "-P", *_torchrun(1), "-m", "swift_ft.lab.bench.peers.torchft_trainer", given],
            TORCHFT_LIGHTHOUSE=f"http://{address}",
            REPLICA_GROUP_ID=str(replica),
        )


def _start_nvrx(processes: Processes, given: str, python: str) -> None:
    port = _free_port()
    for rank in range(REPLICAS + 1):  # the last one is the reserve
        processes.start(
            f"rank{rank}",
            [python, "-P", "-m", "swift_ft.lab.bench.peers.nvrx_trainer", given],
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(REPLICAS + 1),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )


def _torchrun(processes: int) -> list[str]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    # Without --log-dir each run leaves an empty directory.
    return [*words, "--max-restarts", "3", "--log-dir", os.devnull]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
