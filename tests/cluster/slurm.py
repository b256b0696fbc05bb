"""Slurm: a controller and machines in network namespaces, each with a slurmd; examples/slurm as it is."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.rows import Row, row
from tests.cluster.watched import Watched
from tests.frameworks.environment import ROOT, Unavailable
from tests.integration.namespaces import Network, impossible

SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
MACHINES = "abcd"
STEPS = 300
TIMEOUT_S = 300.0
TRAINER = ("-m", "swift_ft.lab.drill.trainer", "--stages", "2", "--model", "tiny", "--microbatches", "4")
_CONF = """\
ClusterName=swift
SlurmctldHost=meta({meta})
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def cases(only: str) -> Iterator[Row]:
    _have()
    with tempfile.TemporaryDirectory(prefix="swift-slurm-") as name:
        place = Path(name)
        with Cluster(place / "twin") as cluster:
            wanted = cluster.digests(cluster.submit())
        for number, case in enumerate((a_machine, the_first_machine, time_limit)):
            words = (case.__doc__ or "").rstrip(".")
            if only in words:
                with Cluster(place / str(number)) as cluster:
                    try:
                        figures = case(cluster)
                        equal = cluster.digests(figures.pop("job")) == wanted
                        yield row(words, "" if equal else "other bits", **figures)
                    except AssertionError as error:
                        yield row(words, " ".join(f"{error}".split()))


def a_machine(cluster: "Cluster") -> dict[str, Any]:
    """A machine that trains is killed: the spare one takes its place."""
    job = cluster.submit()
    cluster.until_step(20)
    first = cluster.field(job, "BatchHost")
    cluster.kill(next(machine for machine in cluster.training() if machine != first))
    cluster.until(lambda: len(cluster.trace("script_start")) > 2, "the spare machine")
    return {"job": job, "restarts": cluster.restarts(job)}


def the_first_machine(cluster: "Cluster") -> dict[str, Any]:
    """The machine with the coordinator is killed: Slurm begins the job again, at the newest checkpoint."""
    job = cluster.submit()
    cluster.until_step(20)
    cluster.kill(cluster.field(job, "BatchHost"))
    cluster.until(lambda: cluster.restarts(job) >= 1, "the job to be queued again")
    return {"job": job, "restarts": cluster.restarts(job)}


def time_limit(cluster: "Cluster") -> dict[str, Any]:
    """The signal before a time limit: a checkpoint, and the job goes on there once it is queued again."""
    found = re.search(r"^#SBATCH --signal=(\w+)@", SCRIPT.read_text(), re.MULTILINE)
    assert found is not None
    job = cluster.submit("--checkpoint-every", str(2 * STEPS))
    cluster.until_step(20)
    cluster.call("scancel", f"--signal={found[1]}", job)
    cluster.until(lambda: cluster.restarts(job) >= 1, "the job to be queued again")
    saved = max(each["version"] for each in cluster.trace("checkpoint_complete"))
    assert saved > 20, f"the newest checkpoint is that of version {saved}: {cluster.output()}"
    cluster.until(lambda: len(cluster.trace("ready")) > 2, "the job to go on")
    version = cluster.trace("ready")[-1]["version"]
    assert version == saved, f"it goes on at version {version}, not {saved}"
    return {"job": job, "restarts": cluster.restarts(job), "saved_version": saved}


def _have() -> None:
    """Raises Unavailable if Debian's packages cannot be had."""
    if why := impossible():
        raise Unavailable(why)
    if shutil.which("slurmctld") and shutil.which("slurmd"):
        return
    command = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "slurm-wlm"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise Unavailable(f"slurm-wlm cannot be installed: {done.stderr.strip()[-300:]}")


def _space(pid: int) -> str:
    """Returns the network namespace of a process. Raises OSError if it is gone."""
    return os.readlink(f"/proc/{pid}/ns/net")


class Cluster(Watched):
    """A context manager."""

    limit_s = TIMEOUT_S

    def __init__(self, place: Path) -> None:
        self.place = place
        self._stack = contextlib.ExitStack()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        for name in ("state", "shared", "digests", *(f"spool-{machine}" for machine in MACHINES)):
            (self.place / name).mkdir(parents=True)
        self.network = Network("meta", *MACHINES, named=True)
        self._stack.callback(self.network.close)
        nodes = "\n".join(
            f"NodeName={each} NodeHostname={each} NodeAddr={self.network.host(each)} CPUs=2 RealMemory=1000"
            for each in MACHINES
        )
        conf = self.place / "slurm.conf"
        conf.write_text(_CONF.format(meta=self.network.host("meta"), place=self.place, nodes=nodes))
        self._env = {
            **os.environ,
            "SLURM_CONF": str(conf),
            "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
            "SHARED": str(self.place / "shared"),
            "SCRATCH": str(self.place),
            "SWIFT_DIGESTS": str(self.place / "digests"),
            "SWIFT_EVENTS": str(self.place / "shared"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "e0",
        }
        hosts = ",".join(self.network.host(machine) for machine in MACHINES)
        self.call(
            "swift-ft", "credentials", "init", str(self.place / "shared" / "credentials"), "--hosts", hosts
        )
        self._daemon("meta", "slurmctld", "-D")
        for machine in MACHINES:
            self._daemon(machine, "slurmd", "-D", "-N", machine)
        self.until(lambda: "idle" in self.call("sinfo", "--noheader"), "the machines")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.call("scancel", "--full", "--state=RUNNING")
        for machine in ("meta", *MACHINES):
            self._end(machine)
        self._stack.close()

    def _daemon(self, machine: str, *command: str) -> None:
        output = (self.place / f"{machine}.out").open("wb")
        self._stack.callback(output.close)
        words = [*self.network.inside(machine), *command]
        self._daemons[machine] = subprocess.Popen(words, env=self._env, stdout=output, stderr=output)

    def _end(self, machine: str) -> None:
        """With all that Slurm has started there: its processes are not the daemon's children."""
        daemon = self._daemons.pop(machine, None)
        if daemon is None:
            return
        space = _space(daemon.pid)
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if process.name() != "cat" and _space(process.pid) == space:  # that one keeps the namespace
                    process.kill()
        daemon.wait(20)

    def kill(self, machine: str) -> None:
        self.network.isolate(machine)
        self._end(machine)

    def call(self, *command: str) -> str:
        words = [*self.network.inside("meta"), *command]
        done = subprocess.run(words, env=self._env, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise subprocess.SubprocessError(f"{command[0]}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, *more: str) -> str:
        arguments = [*TRAINER, "--steps", str(STEPS), *more]
        flags = ["--parsable", "--job-name=job", "--time=1:00:00", f"--output={self.place}/output"]
        return self.call("sbatch", *flags, str(SCRIPT), *arguments).strip()

    def field(self, job: str, name: str) -> str:
        shown = self.call("scontrol", "--oneliner", "show", "job", job)
        return shown.partition(f" {name}=")[2].partition(" ")[0]

    def restarts(self, job: str) -> int:
        return int(self.field(job, "Restarts") or 0)

    def training(self) -> list[str]:
        """Machines on which ranks are."""
        spaces = {_space(daemon.pid): machine for machine, daemon in self._daemons.items()}
        return [spaces[_space(each["pid"])] for each in self.trace("script_start")]

    def trace(self, event: str) -> list[dict[str, Any]]:
        found = []
        for path in (self.place / "shared").glob("*.jsonl"):
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    if (each := json.loads(line)).get("event") == event:
                        found.append(each)
        return sorted(found, key=lambda each: each["t"])

    def output(self) -> str:
        path = self.place / "output"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def digests(self, job: str) -> dict[str, Any]:
        self.until(
            lambda: self.field(job, "JobState") in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"),
            "the end",
        )
        found = sorted((self.place / "digests").glob(f"*-v{STEPS}.json"))
        assert len(found) == 2, f"{self.field(job, 'JobState')}: {self.output()}"
        return {path.name: json.loads(path.read_text()) for path in found}
