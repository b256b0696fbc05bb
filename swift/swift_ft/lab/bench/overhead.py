"""`swift-ft bench overhead`: cost of a session in a user's own pipeline.

    plain     torch alone: four ranks, 1F1B, AdamW, clipping, a scheduler (`overhead_ranks`)
    session   the same loop under a session, with its sidecars, a log server, a coordinator and a launcher
With `--paced` the stages wait as long as a device would compute, and no core is busy meanwhile; the host's time for a
record is measured, too. With `--device` the ranks of both jobs are on a device, under a session; one of the two records
(`recording_on`).

Both jobs run at the same time and take turns in short slices; a ratio is taken within a round. CPU time is that of all
processes, by kind, because a busy machine changes it far less than wall time. On cores that are shared and fully used
the difference equals the extra time of a step.
"""

import json
import socket
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import psutil

from swift_ft import events
from swift_ft.cli_parser import Parser
from swift_ft.comm import LOOPBACK
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.drill.cluster import COORDINATOR, LAUNCHER, LOG_SERVER, Cluster, Process, own_environment
from swift_ft.lab.drill.command import check_device
from swift_ft.lab.drill.topology import MODELS, ModelConfig
from swift_ft.text import show, table

MODES = ("plain", "session")
LATE = "late"
"""A slice whose copies of records are late (`overhead_ranks`)."""
STAGES, MICROBATCHES = 4, 8
ANSWER_S = 300.0
_RANKS = "swift_ft.lab.bench.overhead_ranks"


class Size(NamedTuple):
    """A model and its goal. On two cores of a quiet machine a `short` step takes about 85 ms, a `long` one 0.65 s."""

    model: ModelConfig
    goal: float
    """Upper limit of session / plain."""


_SHORT = replace(MODELS["default"], layers=4, microbatch=2)
_PACE = {name: getattr(MODELS["paced"], name) for name in ("forward_s", "backward_s")}
SIZES = {
    "short": Size(model=_SHORT, goal=1.12),
    "long": Size(model=replace(MODELS["default"], width=256), goal=1.03),
}
PACED = {"paced": Size(model=replace(_SHORT, **_PACE), goal=1.01)}


class Job:
    """One job's ranks, to which the benchmark is connected, and all its processes by kind."""

    def __init__(self, directory: Path, stages: int, stack: ExitStack) -> None:
        self.path = str(directory / "line")
        self.pids: dict[str, Sequence[int]] = {}
        self.about: list[dict[str, Any]] = []
        self._stack = stack
        self._listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listening.bind(self.path)
        self._listening.listen(stages)
        self._listening.settimeout(1.0)
        self._lines: list[TextIO] = []
        self._stages = stages

    def await_ranks(self, ended: Callable[[], str]) -> None:
        """Accepts all ranks. `ended()` says how a process has ended, else "". Raises ServiceError if one has."""
        waited_s = 0.0
        while len(self._lines) < self._stages:
            try:
                line, _ = self._listening.accept()
            except TimeoutError:
                waited_s += 1.0
                if (words := ended()) or waited_s > ANSWER_S:
                    raise ServiceError(f"a rank of the benchmark did not come\n{words}") from None
                continue
            line.settimeout(ANSWER_S)
            with line:
                self._lines.append(self._stack.enter_context(line.makefile("rw")))
        self.about = self._answers()
        self.pids = {"ranks": [about["pid"] for about in self.about]}

    def _answers(self) -> list[dict[str, Any]]:
        answers = [line.readline() for line in self._lines]
        if not all(answers):
            raise ServiceError("a rank of the benchmark is gone; its output stands above")
        return [json.loads(answer) for answer in answers]

    def slice(self, steps: int) -> dict[str, Any]:
        """Runs the next slice. Returns a step's wall seconds, its CPU seconds by kind of process, and the seconds that
        the trainer's thread has spent on each record."""
        before = self._cpu_s()
        answers = self.ask("go")
        cpu_s = {kind: (after - before[kind]) / steps for kind, after in self._cpu_s().items()}
        return {
            "step_s": max(answer["seconds"] for answer in answers) / steps,
            "cpu_s": cpu_s,
            "records_s": [second for answer in answers for second in answer["records_s"]],
        }

    def ask(self, word: str) -> list[dict[str, Any]]:
        """Runs the next slice. Returns what each rank answers."""
        for line in self._lines:
            line.write(f"{word}\n")
            line.flush()
        return self._answers()

    def _cpu_s(self) -> dict[str, float]:
        return {kind: sum(map(output.cpu_s, pids)) for kind, pids in self.pids.items()}


def plain_job(directory: Path, config: dict[str, Any], stack: ExitStack) -> Job:
    """Starts the ranks of the plain loop, one process per stage; `stack` ends them."""
    job = Job(directory, config["stages"], stack)
    given = json.dumps({**config, "socket": job.path, "store": str(directory / "store")})
    env = own_environment() | {"OMP_NUM_THREADS": "1", **LOOPBACK}
    processes = [
        Process("rank", [_RANKS, given], env | {"RANK": str(rank)}, directory / f"rank{rank}.txt")
        for rank in range(config["stages"])
    ]
    for process in processes:
        stack.callback(process.stop, 0.0)
    job.await_ranks(lambda: "".join(p.tail() for p in processes if p.poll() is not None))
    return job


def session_job(directory: Path, config: dict[str, Any], stack: ExitStack) -> Job:
    """Starts the job under a session; `stack` ends it."""
    job = Job(directory, config["stages"], stack)
    cluster = stack.enter_context(
        Cluster(
            directory / "cluster",
            ranks=config["stages"],
            spares=0,
            trainer=("-m", _RANKS),
            trainer_arguments=[json.dumps({**config, "socket": job.path})],
            settings={events.ENV_EVENTS_DIR: ""},  # trainers write no events
        )
    )
    job.await_ranks(lambda: cluster.output_tail() if cluster.poll() is not None else "")
    pids = cluster.pids
    sidecars = [about["sidecar"] for about in job.about]
    children = {child.pid for child in psutil.Process(pids[LAUNCHER]).children(recursive=True)}
    others = children - {*sidecars, *job.pids["ranks"]}
    job.pids |= {"sidecars": sidecars, "log server": [pids[LOG_SERVER]], "coordinator": [pids[COORDINATOR]]}
    job.pids["launcher"] = [pids[LAUNCHER], *others]
    return job


def in_turns(
    starts: Mapping[str, Callable[[Path, dict[str, Any], ExitStack], Job]],
    config: Mapping[str, Any],
    rounds: int,
    turn: Callable[[Mapping[str, Job], int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Starts the jobs, and returns what `turn` returns for each round. `config`: of their ranks, but for the number of
    steps, which is enough for two slices of a job in each round."""
    steps = (2 * rounds + 4) * config["slice_steps"]
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swift-bench-")))
        jobs = {}
        for name, start in starts.items():
            (place / name).mkdir()
            jobs[name] = start(place / name, {**config, "microbatches": MICROBATCHES, "steps": steps}, stack)
        # The first one is a warm-up, in which a session learns what a step changes.
        return [turn(jobs, number) for number in range(rounds + 1)][1:]


def measure(size: Size, rounds: int, slice_steps: int, stages: int = STAGES) -> list[dict[str, Any]]:
    """Returns for each round the measurements of each mode's slice."""

    def turn(jobs: Mapping[str, Job], number: int) -> dict[str, Any]:
        return {mode: jobs[mode].slice(slice_steps) for mode in (MODES if number % 2 else MODES[::-1])}

    config = {"model": asdict(size.model), "stages": stages, "slice_steps": slice_steps}
    return in_turns({"plain": plain_job, "session": session_job}, config, rounds, turn)


DEVICE_STAGES = 2
ONE_COPY = 1.5
"""A wait for one copy also has the time until the stream wakes up; a wait for two copies has more."""


def recording_on(device: str, rounds: int, slice_steps: int) -> list[dict[str, Any]]:
    """Returns for each round the answers of all ranks on the device: without recording, with it, and with it while each
    copy is late."""

    def without(directory: Path, config: dict[str, Any], stack: ExitStack) -> Job:
        return session_job(directory, config | {"groups": f"0-{DEVICE_STAGES - 1}"}, stack)

    def turn(jobs: Mapping[str, Job], _: int) -> dict[str, Any]:
        recording = jobs["recording"]
        return {
            "without": jobs["without"].ask("go"),
            "recording": recording.ask("go"),
            LATE: recording.ask(LATE),
        }

    config = {"model": asdict(MODELS["paced"]), "stages": DEVICE_STAGES}
    config |= {"slice_steps": slice_steps, "device": device}
    return in_turns({"without": without, "recording": session_job}, config, rounds, turn)


def evaluate_device(rounds: Sequence[Mapping[str, Any]], slice_steps: int) -> dict[str, Any]:
    """Computes waits in a step, the host time of a record, and how many late copies the training stream waits for in a
    step: of the rank that waits most, over the median copy of its slice."""

    def most(mode: str, name: str) -> list[float]:
        """Returns for each round the value of the rank that has most."""
        return [max(rank[name] for rank in r[mode]) for r in rounds]

    def every(mode: str, name: str) -> float:
        """Returns the median over all rounds, ranks and records."""
        return float(statistics.median(second for r in rounds for rank in r[mode] for second in rank[name]))

    waits = {mode: [n / slice_steps for n in most(mode, "waits")] for mode in ("without", "recording", LATE)}
    late = [[rank for rank in r[LATE] if rank["copies_s"]] for r in rounds]
    held = [max(rank["held_s"] / statistics.median(rank["copies_s"]) for rank in ranks) for ranks in late]
    steps_s = zip(most("recording", "seconds"), most("without", "seconds"), strict=True)
    found = {
        "waits": {mode: max(seen) for mode, seen in waits.items()},
        "record_us": 1e6 * every("recording", "records_s"),
        "late_copy_ms": 1e3 * every(LATE, "copies_s"),
        "copies_waited_for": statistics.median(held) / slice_steps,
        "step_ratio": statistics.median(one / other for one, other in steps_s),
    }
    more = max(max(waits[mode]) for mode in ("recording", LATE)) > min(waits["without"])
    return found | {"verdict": "FAIL" if more or found["copies_waited_for"] > ONE_COPY else "PASS"}


def device_text(device: str, found: Mapping[str, Any]) -> list[str]:
    waits = found["waits"]
    return [
        f"on {device}, {DEVICE_STAGES} ranks: a step with recording takes {found['step_ratio']:.3f} of one without",
        f"a record takes {found['record_us']:.0f} us of the host",
        f"the host waits {waits['without']:g} times a step without recording, {waits['recording']:g} with it",
        f"copies that take {found['late_copy_ms']:.1f} ms hold the training stream up by "
        f"{found['copies_waited_for']:.2f} copies a step; the host waits {waits[LATE]:g} times",
        f"goal: no wait more, and at most one copy: {found['verdict']}",
    ]


def evaluate(name: str, size: Size, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Computes the ratio, the verdict, and CPU milliseconds per step by mode and kind of process."""
    ratios = [r["session"]["step_s"] / r["plain"]["step_s"] for r in rounds]
    low, high = output.interval(ratios)
    # Means, because they add up and medians do not.
    cpu_ms = {
        mode: {
            kind: 1e3 * statistics.fmean(r[mode]["cpu_s"][kind] for r in rounds)
            for kind in rounds[0][mode]["cpu_s"]
        }
        for mode in MODES
    }
    return {
        "size": name,
        "rounds": len(rounds),
        "step_ms": {mode: 1e3 * statistics.median(r[mode]["step_s"] for r in rounds) for mode in MODES},
        "ratio": {"median": statistics.median(ratios), "low": low, "high": high},
        "goal": size.goal,
        "verdict": output.verdict(low, high, size.goal),
        "cpu_ms": cpu_ms,
        "cpu_ratio": sum(cpu_ms["session"].values()) / sum(cpu_ms["plain"].values()),
        "record_us": 1e6 * statistics.median(second for r in rounds for second in r["session"]["records_s"]),
        "measured": list(rounds),
    }


def text(result: Mapping[str, Any]) -> list[str]:
    """Formats the result: steps, and a line for each kind of process."""
    step, ratio = result["step_ms"], result["ratio"]
    plain, session = result["cpu_ms"]["plain"], result["cpu_ms"]["session"]
    rows = [["CPU of a step", "plain ms", "session ms"]]
    rows += [
        [kind, f"{plain[kind]:.2f}" if kind in plain else "", f"{ms:.2f}"] for kind, ms in session.items()
    ]
    rows.append(["together", f"{sum(plain.values()):.2f}", f"{sum(session.values()):.2f}"])
    return [
        f"{result['size']}: a step of {step['plain']:.1f} ms plain, {step['session']:.1f} ms under a session; "
        f"ratio {ratio['median']:.3f} (95 %: {ratio['low']:.3f} - {ratio['high']:.3f}), "
        f"of CPU {result['cpu_ratio']:.3f}",
        "",
        *table(rows),
        f"a record takes {result['record_us']:.0f} us of the trainer's thread",
        f"goal at most {result['goal']}: {ratio['median']:.3f}, {result['verdict']}",
    ]


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--pipeline", action="store_true", help="what is measured in any case")
    parser.add_argument(
        "--paced", action="store_true", help="stages wait instead of computing, as for a device of their own"
    )
    parser.add_argument("--size", choices=SIZES, action="append", help="of its steps (default: both)")
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="TYPE",
        help="instead: what recording costs on a device, as cuda: waits of the host, and of the training stream for "
        "late copies",
    )
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="default %(default)s")
    parser.add_argument("--slice-steps", type=int, default=10, metavar="N", help="default %(default)s")


def _run_on(device: str, rounds: int, slice_steps: int) -> dict[str, Any]:
    check_device(device)
    found = evaluate_device(recording_on(device, rounds, slice_steps), slice_steps)
    show(device_text(device, found))
    return {"machine": output.machine(), "device": device, **found}


def run(arguments: Any) -> dict[str, Any]:
    if arguments.rounds < 1 or arguments.slice_steps < 1:
        raise UsageError("--rounds and --slice-steps take 1 or more")
    if arguments.paced and (arguments.size or arguments.device != "cpu"):
        raise UsageError("--paced takes neither --size nor --device: it has a size of its own")
    if arguments.device != "cpu":
        return _run_on(arguments.device, arguments.rounds, arguments.slice_steps)
    on = output.machine()
    print(
        f"{on}; {STAGES} ranks, medians of {arguments.rounds} rounds, slices of {arguments.slice_steps} steps"
    )
    results = []
    sizes = PACED if arguments.paced else {name: SIZES[name] for name in arguments.size or SIZES}
    for name, size in sizes.items():
        result = evaluate(name, size, measure(size, arguments.rounds, arguments.slice_steps))
        results.append(result)
        show(["", *text(result)])
    unsure = any(result["verdict"] == "INCONCLUSIVE" for result in results)
    return {"machine": on, "sizes": results, "verdict": "INCONCLUSIVE" if unsure else ""}
