"""`swift-ft bench compare`: one rank of two dies; what it costs under torchrun, torchft, and swift's strategies.

Each system trains the same model on the same batches with two replicas, in steps of the same length, by a trainer as
its user would write it (`compare_torchrun`, `compare_torchft`, `compare_swift`), with its defaults. In one step a
replica kills itself with SIGKILL, behind its forward. The marks that the trainers leave (`compare_trial`) say when the
next new step is done, which steps are done again, which processes were replaced, and whether the final weights are
bitwise those of the same trainer in a run that did not fail. Every round has each system once, in turn. Before
the rounds each system trains once without a failure and without waiting in its steps: what it costs while nothing fails
(`no wait`: the median step; `peak`: the most memory of a replica, the processes beside it left out).

torchrun does not share its store with the ranks here: those that it starts again find addresses of the dead ones in a
shared one (torch 2.13, gloo), and fail. https://github.com/pytorch/pytorch/issues/135712
"""

import dataclasses
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import swift
from swift import events
from swift.arguments import Parser
from swift.bench import output
from swift.bench.compare_trial import REPLICAS, VICTIM, Trial, read
from swift.drill.cluster import Cluster
from swift.errors import ServiceError, UsageError
from swift.runtime.backends import LOOPBACK

TORCHRUN, TORCHFT, TORCHFT_ALL = "torchrun", "torchft", "torchft-all"
STRATEGIES = {
    f"swift-{name}": name for name in ("checkpoint", "reinit", "snapshot", "rollback", "shrink", "replay")
} | {"swift": "auto"}
"""System -> its strategy."""
SYSTEMS = {
    TORCHRUN: "torchrun, DCP",
    TORCHFT: "torchft, 1 replica is enough",
    TORCHFT_ALL: "torchft, both are needed",
    "swift": "swift",
    **{system: f"swift, {name}" for system, name in STRATEGIES.items() if system != "swift"},
}
LIMIT_S = 240.0
"""For a run, beside its steps."""
LEAVE_S = 10.0
"""Once a replica has ended, the other one has so long."""
JOIN_TIMEOUT_MS = 10_000
"""Of torchft's lighthouse, as in its README; its own default is a minute."""


# --- what a run's marks say ---


def judge(marks: Sequence[dict[str, Any]], reference: str) -> dict[str, Any]:
    """The figures of a run in which a replica died. ``failed`` in their place: it never went on.

    `reference`: digest of the weights of the run that did not fail. Seconds are from the kill.
    """
    kill = next((mark for mark in marks if mark["what"] == "killed"), None)
    if kill is None:
        return {"failed": "no replica has come to the step of the kill"}
    at, step = kill["at"], kill["step"]
    after = [mark for mark in marks if mark["what"] == "stepped" and mark["at"] > at]
    new: dict[int, list[float]] = {}
    for mark in after:
        if mark["step"] >= step:
            new.setdefault(mark["step"], []).append(mark["at"] - at)
    if not new:
        return {"failed": "no step was done after the kill"}
    before = [
        mark["at"] for mark in marks if mark["what"] == "stepped" and mark["at"] < at and mark["replica"] == 0
    ]
    # A process that comes back when the others have ended begins from nothing: that is no part of the run.
    over = min((mark["at"] for mark in marks if mark["what"] == "ended"), default=float("inf"))
    together = [max(times) for times in new.values() if len(times) == REPLICAS]
    processes = [
        list(dict.fromkeys(mark["pid"] for mark in marks if mark["replica"] == replica))
        for replica in range(REPLICAS)
    ]
    digests = [mark["digest"] for mark in marks if mark["what"] == "ended"]
    return {
        "step_s": statistics.median(b - a for a, b in pairwise(before)),
        "next_step_s": min(min(times) for times in new.values()),
        "all_again_s": min(together) if together else None,
        "steps_again": len({mark["step"] for mark in after if mark["step"] < step and mark["at"] < over}),
        "steps_with_fewer": sum(len(times) < REPLICAS for times in new.values()),
        "pids": processes,
        "restarted": sum(len(pids) > 1 for pids in processes),
        "same_bits": len(digests) == REPLICAS and set(digests) == {reference},
        "replacement_s": _way(marks, kill),
    }


def _step_s(marks: Sequence[dict[str, Any]]) -> float:
    """The median step of replica 0, behind the first tenth, which warms up."""
    at: list[float] = [mark["at"] for mark in marks if mark["what"] == "stepped" and mark["replica"] == 0]
    return statistics.median(b - a for a, b in pairwise(at[len(at) // 10 :]))


def _way(marks: Sequence[dict[str, Any]], kill: dict[str, Any]) -> dict[str, float]:
    """The way of the process that takes the victim's place, in seconds from the kill; a spare was started before it."""
    pids = {mark["pid"] for mark in marks if mark["replica"] == VICTIM} - {kill["pid"]}
    way: dict[str, float] = {}
    for mark in marks:
        if mark["pid"] in pids and mark["what"] in ("imported", "connected", "restored"):
            way |= {"started": mark["started"] - kill["at"]} if "started" in mark else {}
            way[mark["what"]] = mark["at"] - kill["at"]
    return way


# --- the systems ---


class Processes:
    """What one run has started, but for swift's. A context manager, which ends it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Processes":
        return self

    def start(self, name: str, command: Sequence[str], **environment: str) -> None:
        """Its output is a file of that name."""
        with (self._directory / name).open("ab") as output:
            self._running.append(
                subprocess.Popen(
                    command,
                    env=_environment() | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def ended(self) -> bool:
        """Whether one of them has, with or without success."""
        return any(process.poll() is not None for process in self._running)

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _environment() -> dict[str, str]:
    foreign = ("SWIFT_", "TORCHELASTIC_", "TORCHFT_")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # Where torchft is installed there need be no swift.
    return ours | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(swift.__file__).parents[1]), **LOOPBACK}


def run(system: str, trial: Trial, torchft: str) -> list[dict[str, Any]]:
    """The marks of one run of a system. ServiceError if it does not come to its end in time."""
    directory = Path(trial.directory)
    directory.mkdir()
    given = json.dumps(dataclasses.asdict(trial) | {"strategy": STRATEGIES.get(system, "")})
    with ExitStack() as stack:
        if system in STRATEGIES:
            cluster = stack.enter_context(
                Cluster(
                    directory / "cluster",
                    ranks=REPLICAS,
                    spares=1,
                    trainer=("-m", "swift.bench.compare_swift"),
                    trainer_arguments=[given],
                    settings={events.ENV_EVENTS_DIR: "", **LOOPBACK},  # who trains has no trace
                )
            )
            _await_end(trial, lambda: cluster.poll() is not None)
            return read(trial.directory)
        processes = stack.enter_context(Processes(directory))
        if system == TORCHRUN:
            words = [sys.executable, "-P", *_torchrun(REPLICAS), "-m", "swift.bench.compare_torchrun", given]
            processes.start("torchrun", words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        else:
            least = "1" if system == TORCHFT else str(REPLICAS)
            address = f"127.0.0.1:{_free_port()}"
            words = [str(Path(torchft).with_name("torchft_lighthouse")), "--bind", address]
            words += ["--min_replicas", least, "--join_timeout_ms", str(JOIN_TIMEOUT_MS)]
            processes.start("lighthouse", words)
            for replica in range(REPLICAS):
                processes.start(
                    f"replica{replica}",
                    [torchft, "-P", *_torchrun(1), "-m", "swift.bench.compare_torchft", given],
                    TORCHFT_LIGHTHOUSE=f"http://{address}",
                    REPLICA_GROUP_ID=str(replica),
                    MIN_REPLICAS=least,
                )
        _await_end(trial, processes.ended)
        return read(trial.directory)


def _torchrun(processes: int) -> list[str]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*words, "--max-restarts", "3"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_end(trial: Trial, ended: Callable[[], bool]) -> None:
    """Until all replicas have ended, or the launcher has, or one replica has and the other does not follow."""
    limit = time.monotonic() + LIMIT_S + 2 * trial.steps * (trial.wait_s + 0.01)
    while time.monotonic() < limit:
        gone = ended()
        marks = [mark for mark in read(trial.directory) if mark["what"] == "ended"]
        if gone or len(marks) == REPLICAS or (marks and time.monotonic() > marks[0]["at"] + LEAVE_S):
            return
        time.sleep(0.2)


# --- what comes out ---


def summary(
    system: str, rounds: Sequence[dict[str, Any]], undisturbed: Mapping[str, float]
) -> dict[str, Any]:
    """Medians over the rounds that went on; bits are the same if they were in every round. `undisturbed`: of the run
    that did not fail."""
    done = [measured for measured in rounds if "failed" not in measured]
    about: dict[str, Any] = {"system": system, "rounds": list(rounds), "undisturbed": undisturbed}
    if not done:
        return about | {"failed": rounds[0]["failed"]}
    for name in ("next_step_s", "all_again_s", "steps_again", "steps_with_fewer", "restarted"):
        values = [measured[name] for measured in done if measured[name] is not None]
        about[name] = statistics.median(values) if len(values) == len(done) else None
    about["same_bits"] = len(done) == len(rounds) and all(measured["same_bits"] for measured in done)
    about["step_s"] = statistics.median(measured["step_s"] for measured in done)
    ways = [measured["replacement_s"] for measured in done]
    about["replacement_s"] = {
        name: statistics.median(way[name] for way in ways)
        for name in ("started", "imported", "connected", "restored")
        if all(name in way for way in ways)
    }
    return about


HEAD = (
    f"{'':<30}{'no wait':>9}{'peak':>9}{'step':>9}{'next new step':>15}{'both again':>12}"
    f"{'steps again':>13}{'with fewer':>12}{'replaced':>10}  same bits"
)


def row(case: dict[str, Any]) -> str:
    """One system as a line of text."""
    front = f"{SYSTEMS[case['system']]:<30}"
    if "missing" in case or "failed" in case:
        return front + str(case.get("missing") or case.get("failed"))
    quiet = case["undisturbed"]
    both = "never" if case["all_again_s"] is None else f"{case['all_again_s']:.2f} s"
    return (
        f"{front}{quiet['step_s'] * 1e3:>6.2f} ms{quiet['peak_mib']:>5.0f} MiB"
        f"{case['step_s'] * 1e3:>6.1f} ms{case['next_step_s']:>13.2f} s{both:>12}"
        f"{case['steps_again']:>13g}{case['steps_with_fewer']:>12g}{case['restarted']:>5g} of {REPLICAS}"
        f"  {'yes' if case['same_bits'] else 'no'}"
    )


def way(case: dict[str, Any]) -> str:
    """How the process in the victim's place went, as a line of text."""
    words = [f"{name} {seconds:+.2f} s" for name, seconds in case["replacement_s"].items()]
    return f"{SYSTEMS[case['system']]:<30}{', '.join(words)}"


# --- the command ---


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft bench compare",
        description="Kills one of two replicas under torchrun, torchft and swift, and measures what each does then.",
    )
    output.add_json(parser)
    parser.add_argument("--system", choices=SYSTEMS, action="append", help="may be repeated (default: all)")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--kill-step", type=int, default=1017, metavar="N", help="from 0; default %(default)s"
    )
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--wait-ms",
        type=float,
        default=10.0,
        metavar="MS",
        help="in each step, in the place of computing; default %(default)s",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--torchft",
        default=sys.executable,
        metavar="PYTHON",
        help="of the virtual environment that has torchft and this torch (default: this one)",
    )
    parser.add_argument("--directory", type=Path, metavar="DIR", help="of the runs (default: temporary)")
    return parser


def torchft_version(python: str) -> str | None:
    """Of torchft in that environment, with its torch; None: it cannot be imported there."""
    words = "import importlib.metadata as m, torch, torchft; print(m.version('torchft'), 'torch', torch.__version__)"
    try:
        done = subprocess.run([python, "-c", words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 3 if a system did not go on."""
    arguments = make_parser().parse_args(argv)
    if not 0 < arguments.checkpoint_every <= arguments.kill_step < arguments.steps or arguments.rounds < 1:
        raise UsageError("give 0 < --checkpoint-every <= --kill-step < --steps, and 1 round or more")
    output.check_json(arguments.json)
    on, version = output.machine(), torchft_version(arguments.torchft)
    systems = list(arguments.system or SYSTEMS)
    missing = [name for name in systems if name in (TORCHFT, TORCHFT_ALL) and version is None]
    systems = [name for name in systems if name not in missing]
    print(
        f"{on}; torch {metadata.version('torch')}, torchft {version or 'missing'}\n"
        f"2 replicas, one dies in step {arguments.kill_step} of {arguments.steps}, a checkpoint every "
        f"{arguments.checkpoint_every}; medians of {arguments.rounds} rounds\n\n{HEAD}",
        flush=True,
    )
    with output.place(arguments.directory) as place:
        cases = measure(Path(place), systems, arguments)
    absent = f"torchft is not installed for {arguments.torchft}: give --torchft"
    cases += [{"system": name, "missing": absent} for name in missing]
    print("\n".join(row(case) for case in cases))
    print("\nthe process in the victim's place, from the kill")
    print("\n".join(way(case) for case in cases if "replacement_s" in case))
    output.write_json(arguments.json, {"bench": "compare", "machine": on, "torchft": version, "cases": cases})
    return 3 if any("failed" in case for case in cases) else 0


def measure(place: Path, systems: Sequence[str], arguments: Any) -> list[dict[str, Any]]:
    """The `summary` of each system. First each runs without a failure, and does not wait in its steps."""
    settings = {"steps": arguments.steps, "every": arguments.checkpoint_every}
    digests, undisturbed = {}, {}
    for name in systems:
        trial = Trial(directory=str(place / f"{name}.sound"), kill_step=None, wait_s=0.0, **settings)
        marks = run(name, trial, arguments.torchft)
        ended = [mark for mark in marks if mark["what"] == "ended"]
        if len(ended) != REPLICAS:
            raise ServiceError(f"{SYSTEMS[name]} did not come to its end without a failure\n{tail(trial)}")
        digests[name] = ended[0]["digest"]
        undisturbed[name] = {"step_s": _step_s(marks), "peak_mib": max(mark["peak_mib"] for mark in ended)}
        shutil.rmtree(trial.directory)
    rounds_of: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for number in range(arguments.rounds):
        for name in systems:
            trial = Trial(
                directory=str(place / f"{name}.{number}"),
                kill_step=arguments.kill_step,
                wait_s=arguments.wait_ms / 1e3,
                **settings,
            )
            marks = run(name, trial, arguments.torchft)
            rounds_of[name].append(judge(marks, digests[name]))
            print(row(summary(name, rounds_of[name][-1:], undisturbed[name])), flush=True)
            shutil.rmtree(trial.directory)
    print()
    return [summary(name, rounds, undisturbed[name]) for name, rounds in rounds_of.items()]


def tail(trial: Trial) -> str:
    """The last lines of what its processes have written."""
    texts = (path.read_text(errors="replace") for path in Path(trial.directory).glob("*") if path.is_file())
    return "\n".join("\n".join(text.splitlines()[-3:]) for text in texts)
