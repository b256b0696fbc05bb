"""`swift-ft bench overhead`: cost of a session in a user's own pipeline, attributed to its parts.

    plain     torch alone: four ranks, 1F1B, AdamW, clipping, a scheduler (`overhead_ranks`)
    session   the same loop under a session, with its sidecars, a log server, a coordinator and a launcher
    metered   as session, with the clock read where parts begin and end, for the attribution
Both jobs run at the same time and take turns in short slices; a ratio is taken within a round. The overhead is
attributed in CPU time of all processes together, because a busy machine changes that far less than wall time.
On cores that are shared and fully used it equals the extra time of a step.

    overhead = CPU of everything metered - CPU of everything plain = the parts + the rest

A part that has no counterpart in the plain loop counts in full. A part that has one (the optimizer) counts by the
difference. The rest is the extra time of torch itself, whose caches are shared with more processes. The cost of reading
the clock is calibrated, subtracted from every part, and reported.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, TextIO

from swift_ft import events
from swift_ft.cli_parser import Parser
from swift_ft.comm import LOOPBACK
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.cpu_attribution import BASE
from swift_ft.lab.bench.output import interval, verdict
from swift_ft.lab.drill.cluster import COORDINATOR, LAUNCHER, LOG_SERVER, Cluster
from swift_ft.lab.drill.topology import MODELS, ModelConfig
from swift_ft.text import show, table

MODES = ("plain", "session", "metered")
STAGES, MICROBATCHES = 4, 8
ANSWER_S = 300.0
_RANKS = "swift_ft.lab.bench.overhead_ranks"

SIDECARS, SERVER, METER = "sidecars", "log server", "reading the clock"
REST = "rest: what none of these parts is"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model and its goal. On two cores of a quiet machine a `short` step takes about 90 ms, a `long` one 0.7 s."""

    model: ModelConfig
    goal: float
    """Upper limit of session / plain."""


SIZES = {
    "short": Size(model=replace(MODELS["default"], layers=4, microbatch=2), goal=1.35),
    "long": Size(model=replace(MODELS["default"], width=256), goal=1.12),
}


# --- processes ---


class PipelineRanks:
    """The benchmark's connections to the ranks of one job."""

    def __init__(self, directory: Path, stages: int):
        self.path = str(directory / "line")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen(stages)
        self._listening.settimeout(1.0)
        self._stages = stages
        self._lines: list[tuple[socket.socket, TextIO]] = []
        self.about: list[dict[str, Any]] = []

    def await_ranks(self, tail: Any) -> None:
        """Accepts all ranks. `tail()` describes the failure if a process has ended, else it is "". Raises ServiceError
        if a rank does not connect."""
        waited = 0.0
        while len(self._lines) < self._stages:
            try:
                line, _ = self._listening.accept()
            except TimeoutError:
                waited += 1.0
                if (words := tail()) or waited > ANSWER_S:
                    raise ServiceError(f"a rank of the benchmark did not come\n{words}") from None
                continue
            line.settimeout(ANSWER_S)
            self._lines.append((line, line.makefile("r")))
        self.about = self._hear()

    def _hear(self) -> list[dict[str, Any]]:
        answers = []
        for _, heard in self._lines:
            line = heard.readline()
            if not line:
                raise ServiceError("a rank of the benchmark is gone; its output stands above")
            answers.append(json.loads(line))
        return answers

    def slice(self, *, metered: bool) -> list[dict[str, Any]]:
        """Runs the next slice and returns each rank's measurements."""
        for line, _ in self._lines:
            line.sendall(json.dumps({"do": "go", "metered": metered}).encode() + b"\n")
        return self._hear()

    def close(self) -> None:
        for line, heard in self._lines:
            heard.close()
            line.close()
        self._listening.close()


def plain_job(directory: Path, config: dict[str, Any], stack: ExitStack) -> PipelineRanks:
    """Starts the ranks of the plain loop, one process per stage; `stack` ends them."""
    job = PipelineRanks(directory, config["stages"])
    stack.callback(job.close)
    given = json.dumps({**config, "socket": job.path, "store": str(directory / "store")})
    processes = []
    for rank in range(config["stages"]):
        environment = {n: v for n, v in os.environ.items() if not n.startswith("SWIFT_")}
        environment |= {"RANK": str(rank), "OMP_NUM_THREADS": "1", **LOOPBACK}
        # In its own OS session, like swift's ranks: some kernels divide the cores among sessions.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _RANKS, given], env=environment, start_new_session=True
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        processes.append(process)
    job.await_ranks(lambda: "it ended" if any(p.poll() is not None for p in processes) else "")
    return job


def session_job(
    directory: Path, config: dict[str, Any], stack: ExitStack
) -> tuple[PipelineRanks, dict[str, list[int]]]:
    """Starts the job. Returns its ranks, and the pids of its other processes by role."""
    job = PipelineRanks(directory, config["stages"])
    stack.callback(job.close)
    given = json.dumps({**config, "socket": job.path})
    cluster = stack.enter_context(
        Cluster(
            directory / "cluster",
            ranks=config["stages"],
            spares=0,
            trainer=("-m", _RANKS),
            trainer_arguments=[given],
            settings={events.ENV_EVENTS_DIR: ""},  # trainers write no events
        )
    )
    job.await_ranks(lambda: cluster.output_tail() if cluster.poll() is not None else "")
    pids = cluster.pids
    sidecars = [about["sidecar"] for about in job.about if about["sidecar"] is not None]
    elsewhere = {*sidecars, *(about["pid"] for about in job.about)}
    beside = {
        SIDECARS: sidecars,
        SERVER: [pids[LOG_SERVER]],
        "coordinator": [pids[COORDINATOR]],
        "launcher": [pids[LAUNCHER], *(descendants(pids[LAUNCHER]) - elsewhere)],
    }
    return job, beside


def descendants(root: int) -> set[int]:
    """Returns the pids of all descendants of `root`, as /proc lists them now."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # the process has just ended
    pids = {root}
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids - {root}


# --- one size ---


def measure(
    size: Size, rounds: int, slice_steps: int, stages: int = STAGES, burned: str = ""
) -> list[dict[str, Any]]:
    """Returns per round the measurements of each mode's slice. `burned`: a part to slow down, as a control."""
    orders = list(permutations(MODES))
    slices = 2 * (rounds + 1) + 2
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swift-bench-")))
        config = {
            "model": asdict(size.model),
            "stages": stages,
            "microbatches": MICROBATCHES,
            "burned": burned,
            "slice_steps": slice_steps,
            "steps": slices * slice_steps + 1,
        }
        for name in ("plain", "session"):
            (place / name).mkdir()
        plain = plain_job(place / "plain", config, stack)
        session, beside = session_job(place / "session", config, stack)
        rounds_measured = []
        for number in range(rounds + 1):
            a_round = {}
            for mode in orders[number % len(orders)]:
                before = _cpu_s(beside)
                job = plain if mode == "plain" else session
                ranks = job.slice(metered=mode != "session")
                after = _cpu_s(beside)
                spent = {name: after[name] - before[name] for name in beside}
                readings = [about["reading_s"] for about in job.about]
                a_round[mode] = of_slice(ranks, readings, {} if mode == "plain" else spent, slice_steps)
            rounds_measured.append(a_round)
        return rounds_measured[1:]  # the first one was a warm-up


def _cpu_s(processes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {name: sum(map(output.cpu_s, pids)) for name, pids in processes.items()}


def of_slice(
    ranks: Sequence[Mapping[str, Any]], readings: Sequence[float], beside: Mapping[str, float], steps: int
) -> dict[str, Any]:
    """Computes a step's wall seconds, and its CPU seconds: of the trainers' main threads by part, of other threads,
    and of other processes."""
    parts: Counter[str] = Counter()
    clock_s = 0.0
    threads: Counter[str] = Counter()
    main_s = 0.0
    for rank, reading_s in zip(ranks, readings, strict=True):
        main_s += rank["main_s"]
        for name, (seconds, calls) in rank["parts"].items():
            cost_s = calls * reading_s
            parts[name] += seconds - cost_s
            clock_s += cost_s
        threads.update(rank["threads"])
    cpu = {"trainer": main_s, "threads": sum(threads.values()), "beside": sum(beside.values())}
    return {
        "step_s": max(rank["seconds"] for rank in ranks) / steps,
        "behind_s": max(rank["drained_s"] for rank in ranks),
        "cpu_s": sum(cpu.values()) / steps,
        "parts": {name: seconds / steps for name, seconds in parts.items()},
        "reading_s": clock_s / steps,
        "threads": {name: seconds / steps for name, seconds in threads.items()},
        "beside": {name: seconds / steps for name, seconds in beside.items()},
    }


# --- what comes out ---


def accounts(plain: Mapping[str, Any], metered: Mapping[str, Any]) -> dict[str, float]:
    """Attributes the difference of two slices: CPU seconds per step, by part. They add up to the difference."""
    parts = {
        name: metered["parts"].get(name, 0.0) - plain["parts"].get(name, 0.0)
        for name in {*plain["parts"], *metered["parts"]} - {BASE}
    }
    parts |= {
        name: metered["threads"].get(name, 0.0) - plain["threads"].get(name, 0.0)
        for name in {*plain["threads"], *metered["threads"]}
    }
    parts |= metered["beside"]
    parts[METER] = metered["reading_s"] - plain["reading_s"]
    parts[REST] = metered["cpu_s"] - plain["cpu_s"] - sum(parts.values())
    return parts


def evaluate(name: str, size: Size, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Computes the ratio, the verdict, and the parts of the overhead in CPU milliseconds per step."""
    ratios = [r["session"]["step_s"] / r["plain"]["step_s"] for r in rounds]
    low, high = interval(ratios)
    accounted = [accounts(r["plain"], r["metered"]) for r in rounds]
    # Means, because they add up and medians do not.
    names = {part for seconds_of in accounted for part in seconds_of}
    parts = {part: statistics.fmean(seconds_of.get(part, 0.0) for seconds_of in accounted) for part in names}
    cpu = {mode: statistics.fmean(r[mode]["cpu_s"] for r in rounds) for mode in MODES}
    return {
        "size": name,
        "rounds": len(rounds),
        "step_ms": {mode: 1e3 * statistics.median(r[mode]["step_s"] for r in rounds) for mode in MODES},
        "ratio": {"median": statistics.median(ratios), "low": low, "high": high},
        "goal": size.goal,
        "verdict": verdict(low, high, size.goal),
        "cpu_ms": {mode: 1e3 * seconds for mode, seconds in cpu.items()},
        "cpu_ratio": cpu["session"] / cpu["plain"],
        "overhead_cpu_ms": 1e3 * (cpu["metered"] - cpu["plain"]),
        "parts_cpu_ms": {part: 1e3 * seconds for part, seconds in sorted(parts.items(), key=_largest)},
        "behind_s": statistics.median(r["session"]["behind_s"] for r in rounds),
        "measured": list(rounds),
    }


def _largest(part: tuple[str, float]) -> tuple[bool, float]:
    return part[0] == REST, -part[1]


def text(result: Mapping[str, Any]) -> list[str]:
    """Formats the result: steps, CPU, and a line for each part of the overhead."""
    cores = len(os.sched_getaffinity(0))
    step, cpu, ratio = result["step_ms"], result["cpu_ms"], result["ratio"]
    plain, whole = cpu["plain"], result["overhead_cpu_ms"]
    rows = [["what the overhead is made of", "CPU ms", "of it", "of plain"]]
    for part, ms in (*result["parts_cpu_ms"].items(), ("together", whole)):
        rows.append([part, f"{ms:.2f}", f"{100 * ms / whole:.0f}%", f"{100 * ms / plain:.1f}%"])
    return [
        f"{result['size']}: a step of {step['plain']:.1f} ms plain, {step['session']:.1f} ms under a session; "
        f"ratio {ratio['median']:.3f} (95 %: {ratio['low']:.3f} - {ratio['high']:.3f})",
        f"CPU of all processes: {plain:.1f} ms a step plain, {cpu['session']:.1f} ms under a session "
        f"({result['cpu_ratio']:.3f}), {cpu['metered']:.1f} ms metered; {cores} cores have {cores} ms a millisecond",
        "",
        *table(rows),
        f"goal at most {result['goal']}: {ratio['median']:.3f}, {result['verdict']}",
    ]


# --- the command ---


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--pipeline", action="store_true", help="what is measured in any case")
    parser.add_argument("--size", choices=SIZES, action="append", help="of its steps (default: both)")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="default %(default)s")
    parser.add_argument("--slice-steps", type=int, default=10, metavar="N", help="default %(default)s")


def run(arguments: Any) -> dict[str, Any]:
    if arguments.rounds < 1 or arguments.slice_steps < 1:
        raise UsageError("--rounds and --slice-steps take 1 or more")
    on = output.machine()
    print(
        f"{on}; {STAGES} ranks, medians of {arguments.rounds} rounds, slices of {arguments.slice_steps} steps"
    )
    results = []
    for name in arguments.size or SIZES:
        result = evaluate(name, SIZES[name], measure(SIZES[name], arguments.rounds, arguments.slice_steps))
        results.append(result)
        show(["", *text(result)])
    unsure = any(result["verdict"] == "INCONCLUSIVE" for result in results)
    return {"machine": on, "sizes": results, "verdict": "INCONCLUSIVE" if unsure else ""}
