"""swift-ft on a Ray cluster: nodes that train, and spare ones that take the place of a lost one.

    ray job submit -- python examples/ray/train.py --nodes 2 --shared /shared -- train.py --its arguments

docs/clusters.md explains it. Started again, it goes on where it was: --shared keeps the coordinator's state and the
checkpoints. SWIFT_CREDENTIALS is set on all nodes before `ray start` (swift-ft credentials init).
"""

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# What is started here is told to end when the process of Ray's that has started it ends.
SWIFT = ("setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "swift_ft.cli")
UNFIT = 3
"""A launcher's exit code on a node that cannot take part. The others go on."""
TERMINATED = 128 + signal.SIGTERM
PAUSE_S = 10.0
"""Seconds until the next launcher of a node whose last one has ended alone."""


def serve(service: str, directory: Path, *flags: str) -> str:
    """Starts a service on a free port of this node, and returns its address once it serves."""
    found = Path(tempfile.mkdtemp(prefix="swift-")) / "address"
    where = ["--listen", f"{ray.util.get_node_ip_address()}:0", "--address-file", found]
    process = subprocess.Popen([*SWIFT, service, "--directory", directory, *where, *flags])
    while not found.exists():
        if process.poll() is not None:
            raise RuntimeError(f"swift-ft {service} has ended with exit code {process.returncode}")
        time.sleep(0.05)
    return found.read_text().strip()


@ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=2)
class Node:
    """A log server, and a launcher that trains or waits for a place. If the node is lost, Ray starts the actor on the
    next one that comes, and calls `run` there again."""

    def __init__(self) -> None:
        address = serve("logserver", Path(tempfile.mkdtemp(prefix="swift-log-")))
        self.named = f"{socket.gethostname()}={address}"
        self.launcher: subprocess.Popen[bytes] | None = None
        self.stopped = threading.Event()

    def log_server(self) -> str:
        return self.named

    def run(self, coordinator: str, job: str, command: list[str]) -> int:
        job_there = ["--coordinator", coordinator, "--job", job]
        if ray.get_runtime_context().was_current_actor_reconstructed:
            subprocess.run([*SWIFT, "logs", *job_there, "--add", self.named], check=False)
        here = ["--local-addr", ray.util.get_node_ip_address()]
        while True:
            self.launcher = subprocess.Popen([*SWIFT, "run", *job_there, *here, *command])
            if self.stopped.is_set():
                self.launcher.terminate()
            code = self.launcher.wait()
            ended_alone = code in (UNFIT, TERMINATED) or code < 0  # by the OOM killer, for instance
            if not ended_alone or self.stopped.wait(PAUSE_S):
                return code

    def stop(self) -> None:
        """Lets the launcher make a checkpoint and end."""
        self.stopped.set()
        if self.launcher is not None:
            self.launcher.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, required=True, help="nodes that train")
    parser.add_argument("--spares", type=int, default=1, help="nodes that wait for a place (default 1)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="default 1")
    parser.add_argument("--gpus-per-node", type=int, default=0, help="default 0")
    parser.add_argument("--job", default="train", help="default train")
    parser.add_argument("--shared", type=Path, required=True, help="a directory that all nodes see")
    parser.add_argument("command", nargs="+", metavar="SCRIPT", help="after --: of swift-ft run")
    given = parser.parse_args()

    ray.init()
    count, gpus = given.nodes + given.spares, given.gpus_per_node
    group = placement_group(
        [{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}] * count, strategy="STRICT_SPREAD"
    )
    ray.get(group.ready())
    actors = [
        Node.options(
            num_cpus=1,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(count)
    ]
    servers = ray.get([actor.log_server.remote() for actor in actors])
    coordinator = serve("coordinator", given.shared / "coordinator", "--log-servers", ",".join(servers))
    command = ["--nnodes", str(given.nodes), "--nproc-per-node", str(given.ranks_per_node)]
    command += ["--checkpoint-dir", str(given.shared / "checkpoints"), *given.command]
    runs = [actor.run.remote(coordinator, given.job, command) for actor in actors]
    signal.signal(signal.SIGTERM, lambda *_: [actor.stop.remote() for actor in actors])

    code = UNFIT
    while runs and code == UNFIT:
        (done,), runs = ray.wait(runs)
        code = ray.get(done)
    if runs:
        ray.wait(runs, num_returns=len(runs), timeout=30)  # not for a node that is lost
    return code


if __name__ == "__main__":
    sys.exit(main())
