"""`swift-ft bench overhead`: cost of logging in a training step.

    off    the trainer alone; its log is open and idle
    on     the trainer gives every boundary tensor to the log, as a session does
    load   the trainer as in `off`, while an unrelated process copies and logs as many bytes per second

The goal is on / load: any process that moves that many bytes shares memory, disk and cores, so the ratio is the cost
of logging itself. One trainer runs all three in short slices, in all six orders in turn. A ratio is taken within a
round; the result is the median over rounds with its 95 % interval (bootstrap). A case is `met` or `missed` only if the
whole interval is on one side of the goal, and `met` only if the interval is narrow enough to be meaningful. Otherwise
it is INCONCLUSIVE: give more --rounds, or use a quieter machine.

Spare core: the trainer's thread is pinned to one core, everything else to another. None: all of it on one core.
A round is discarded and repeated if other processes used more than DISTURBED_SHARE of one of its slices on the
trainer's core, in user mode. That is detected without looking at the step times.

With --pipeline a whole session is measured instead, against the same pipeline in plain torch: see `pipeline`.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output, pipeline
from swift_ft.lab.bench.log import Server, served
from swift_ft.lab.bench.output import interval, verdict
from swift_ft.lab.bench.overhead_ranks import GENERATION, LOAD_JOB, LOGGERS, RECORDS, TIMEOUT_S, TRAINER_JOB
from swift_ft.log import admin

STEP_S = {"small": 0.013, "large": 0.120}
DTYPES = ("float32", "bfloat16")
GOALS = {"small": 1.03, "large": 1.01}
"""Upper limits of on / load, with a spare core, at GOAL_RATE."""
GOAL_RATE = 250
MODES = ("off", "on", "load")
RATIOS = {"on/off": ("on", "off"), "load/off": ("load", "off"), "on/load": ("on", "load")}
KEPT_UP = 0.25
"""Share of a slice: a log that takes longer to drain has not kept up, so part of its cost came after the slice."""
DISTURBED_SHARE = 0.05
"""Share of a slice: if other processes use more than this on the trainer's core, the round is discarded."""
TRIES = 3
"""Multiple of the requested rounds after which the search for undisturbed rounds ends."""
BURNED_SHARE = 0.25
"""Share of a step that the control "burn" computes in the trainer's thread."""
_SETTLE_S, _STILL_S = 10.0, 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the result: the kind of step, its dtype, with a spare core or without, and the rate."""

    kind: str
    dtype: str
    spare: bool
    rate: int
    """MB/s of boundary tensors."""

    @property
    def goal(self) -> float | None:
        return GOALS[self.kind] if self.spare and self.rate == GOAL_RATE else None

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype} {'spare core' if self.spare else 'no spare core'} {self.rate} MB/s"


# --- processes ---


class Rank:
    """A process that runs `overhead_ranks`."""

    def __init__(self, role: str, config: dict[str, Any]):
        command = [sys.executable, "-P", "-m", "swift_ft.lab.bench.overhead_ranks", role, json.dumps(config)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about: dict[str, Any] = {}

    def __enter__(self) -> "Rank":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServiceError("a process of the benchmark is gone; its output stands above") from None

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServiceError(f"a process of the benchmark ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.receive()


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """Pins all processes and threads that are started in the block to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores_for(spare: bool) -> tuple[int, int]:
    """Returns (the trainer's core, the core of everything else). Raises ServiceError if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if not spare:
        return cores[0], cores[0]
    if len(cores) < 2:
        raise ServiceError("a spare core takes 2 cores; give --cores none")
    return cores[0], cores[1]


def descendants() -> set[int]:
    """Returns the ids of all descendant processes."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # the process has just ended
    pids = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids - {os.getpid()}


def user_seconds(core: int) -> tuple[float, float]:
    """Returns a core's user time so far as (all processes, this benchmark's threads pinned to that core). Time stolen
    by the hypervisor is included in the first."""
    line = next(
        line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} ")
    )
    fields = [int(word) for word in line.split()[1:]]
    everybody = fields[0] + fields[1] + fields[7]  # user, nice, steal
    own = 0
    for process in descendants():
        for path in Path(f"/proc/{process}/task").glob("*/stat"):
            try:
                if os.sched_getaffinity(int(path.parent.name)) == {core}:
                    own += int(path.read_text().rpartition(")")[2].split()[11])
            except (OSError, ProcessLookupError):
                continue
    tick = os.sysconf("SC_CLK_TCK")
    return everybody / tick, own / tick


# --- one case ---


class Bench:
    """The processes of one case: log server, load and trainer."""

    def __init__(self, case: Case, logger: str, slice_s: float, directory: Path, stack: ExitStack):
        self._slice_s = slice_s
        self._resets = 0
        self._core, others = cores_for(case.spare)
        config = {
            "kind": case.kind,
            "dtype": case.dtype,
            "step_s": STEP_S[case.kind],
            "rate": case.rate * 1e6,
            "logger": logger,
            "burned_share": BURNED_SHARE,
            "core": self._core,
        }
        with pinned({others}):
            self._server: Server = stack.enter_context(served(directory))
            for job in (TRAINER_JOB, LOAD_JOB):
                admin.fence(self._server.address, job, GENERATION, TIMEOUT_S)
            self._load = stack.enter_context(Rank("load", {"address": self._server.address}))
            self._trainer = stack.enter_context(Rank("trainer", {**config, "address": self._server.address}))
        self._load.receive()
        self.about = self._trainer.receive()
        self._steps = max(2, round(slice_s / self.about["step_s"]))
        self.bytes_per_step = RECORDS * int(self.about["record_bytes"])

    def round(self, order: Sequence[str]) -> dict[str, dict[str, float]]:
        """Measures every mode once, in this order, and then empties the log."""
        slices = {}
        for mode in order:
            all_before, own_before = user_seconds(self._core)
            began = time.monotonic()
            slices[mode] = self._slice(mode)
            took = time.monotonic() - began
            all_after, own_after = user_seconds(self._core)
            slices[mode]["foreign_share"] = (all_after - all_before - own_after + own_before) / took
        for rank, job in ((self._trainer, TRAINER_JOB), (self._load, LOAD_JOB)):
            admin.reset(self._server.address, job, GENERATION, TIMEOUT_S, number=self._resets)
            kept = sum(stream.records for stream in admin.inventory(self._server.address, job, TIMEOUT_S))
            assert kept == 0, f"the log of {job} was to be empty and has {kept} records"
            rank.ask(do="clear")
        self._resets += 1
        self._settle()
        return slices

    def _slice(self, mode: str) -> dict[str, float]:
        if mode != "load":
            return self._trainer.ask(do="run", steps=self._steps, logged=mode == "on")
        rate = self.bytes_per_step / self.about["step_s"]
        self._load.ask(do="go", record_bytes=self.about["record_bytes"], rate=rate)
        measured = self._trainer.ask(do="run", steps=self._steps, logged=False)
        measured["load_rate"] = self._load.ask(do="stop")["rate"]
        return measured

    def _settle(self) -> None:
        """Waits, at most `_SETTLE_S`, until no segment file is being removed, which would disturb the next slice."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            before = sorted(self._server.log.rglob("*.seg"))
            if not before or time.monotonic() > deadline:
                return
            time.sleep(_STILL_S)
            if sorted(self._server.log.rglob("*.seg")) == before:
                return


def measure(case: Case, arguments: Any) -> dict[str, Any]:
    """Measures one case until it has `arguments.rounds` undisturbed rounds or has reached TRIES times as many."""
    orders = list(permutations(MODES))
    with ExitStack() as stack:
        place = stack.enter_context(output.place(arguments.directory))
        bench = Bench(case, arguments.logger, arguments.slice_s, Path(place), stack)
        bench.round(MODES)  # warm-up
        rounds: list[dict[str, dict[str, float]]] = []
        disturbed: list[float] = []
        while len(rounds) < arguments.rounds and len(rounds) + len(disturbed) < TRIES * arguments.rounds:
            slices = bench.round(orders[len(rounds) % len(orders)])
            share = max(round_slice["foreign_share"] for round_slice in slices.values())
            if share > DISTURBED_SHARE:
                disturbed.append(share)
            else:
                rounds.append(slices)
        return {
            "disturbed": disturbed,
            "wanted": arguments.rounds,
            "bytes_per_step": bench.bytes_per_step,
            "record_bytes": bench.about["record_bytes"],
            "layers": bench.about["layers"],
            "calibrated_step_s": bench.about["step_s"],
            "slice_s": arguments.slice_s,
            "rounds": rounds,
        }


# --- what comes out ---


def evaluate(case: Case, measured: dict[str, Any]) -> dict[str, Any]:
    """Computes medians, 95 % intervals and the verdict of one case from the result of `measure`."""
    rounds = measured["rounds"]
    about = {
        "case": str(case),
        "step": case.kind,
        "dtype": case.dtype,
        "spare_core": case.spare,
        "goal": case.goal,
    }
    about |= {"rate_mb_s": case.rate, "rounds": len(rounds), "disturbed": len(measured["disturbed"])}
    if not rounds:
        unjudged = "" if case.goal is None else "INCONCLUSIVE"
        return {**about, "verdict": unjudged, "measured": measured}
    step_ms = {mode: 1e3 * statistics.median(r[mode]["step_s"] for r in rounds) for mode in MODES}
    ratios = {}
    for name, (above, below) in RATIOS.items():
        values = [r[above]["step_s"] / r[below]["step_s"] for r in rounds]
        low, high = interval(values)
        quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        ratios[name] = {
            "median": statistics.median(values),
            "low": low,
            "high": high,
            "quartiles": [quarters[0], quarters[2]],
        }
    gigabytes = measured["bytes_per_step"] / 1e9
    on_load = ratios["on/load"]
    rate = measured["bytes_per_step"] / (step_ms["on"] / 1e3) / 1e6
    drain = statistics.median(r["on"]["drain_s"] for r in rounds)
    return {
        **about,
        "step_ms": step_ms,
        "ratios": ratios,
        "logged_mb_s": rate,
        "load_mb_s": statistics.median(r["load"]["load_rate"] for r in rounds) / 1e6,
        "trainer_cpu_s_per_gb": statistics.median((r["on"]["cpu_s"] - r["off"]["cpu_s"]) for r in rounds)
        / gigabytes,
        "drain_s": drain,
        "kept_up": drain <= KEPT_UP * measured["slice_s"],
        "verdict": verdict(on_load["low"], on_load["high"], case.goal, 2 * len(rounds) >= measured["wanted"]),
        "measured": measured,
    }


HEAD = (
    f"{'step':<5} {'dtype':<8} {'spare':<5} {'MB/s':>4}  {'rounds':>6}  {'off':>6} ms  {'on/off':>6} {'load/off':>8}  "
    f"{'on/load':>7}  {'95 %':^13} {'quartiles':^13}  {'CPU s/GB':>8}  goal"
)


def row(case: dict[str, Any]) -> str:
    """Formats one case as a line of text."""
    spare, counted = "yes" if case["spare_core"] else "no", f"{case['rounds']}+{case['disturbed']}"
    front = f"{case['step']:<5} {case['dtype']:<8} {spare:<5} {case['rate_mb_s']:>4}  {counted:>6}  "
    goal = f"at most {case['goal']}: {case['verdict']}" if case["goal"] is not None else ""
    if "ratios" not in case:
        return f"{front}somebody else computed on the trainer's core in every round; {goal}".rstrip("; ")
    beside_off, beside_load = case["ratios"]["on/off"]["median"], case["ratios"]["load/off"]["median"]
    own = case["ratios"]["on/load"]
    late = "" if case["kept_up"] else f" (the log was {case['drain_s']:.2f} s behind)"
    return (
        f"{front}{case['step_ms']['off']:>6.1f} ms  {beside_off:>6.3f} {beside_load:>8.3f}  "
        f"{own['median']:>7.3f}  {own['low']:.3f} - {own['high']:.3f} "
        f"{own['quartiles'][0]:.3f} - {own['quartiles'][1]:.3f}  {case['trainer_cpu_s_per_gb']:>8.2f}  {goal}{late}"
    ).rstrip()


# --- the command ---


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft bench overhead",
        description="Measures training steps with logging on and off, and beside an unrelated process with that load.",
    )
    output.add_json(parser)
    parser.add_argument(
        "--rate",
        type=int,
        action="append",
        metavar="MB/S",
        help=f"of boundary tensors; may be repeated (default {GOAL_RATE})",
    )
    parser.add_argument("--step", choices=STEP_S, action="append", help="13 ms or 120 ms (default: both)")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--cores", choices=("spare", "none"), action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="default %(default)s")
    parser.add_argument("--slice-s", type=float, default=0.6, metavar="S", help="default %(default)s")
    parser.add_argument(
        "--logger", choices=LOGGERS, default="log", help="'nothing' and 'burn' are controls of this benchmark"
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="of the log, on a disk (default: temporary)"
    )
    pipeline.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns exit code 3 if a goal is INCONCLUSIVE."""
    arguments = make_parser().parse_args(argv)
    rates = arguments.rate or [GOAL_RATE]
    if arguments.rounds < 1 or arguments.slice_s <= 0 or min(rates) < 1:
        raise UsageError("--rounds and --rate take 1 or more, --slice-s more than 0")
    output.check_json(arguments.json)
    if arguments.pipeline:
        return pipeline.run(arguments)
    cases = [
        Case(kind=kind, dtype=dtype, spare=cores == "spare", rate=rate)
        for cores in arguments.cores or ("spare", "none")
        for kind in arguments.step or STEP_S
        for dtype in arguments.dtype or DTYPES
        for rate in rates
    ]
    for case in cases:
        cores_for(case.spare)
    on = output.machine()
    print(
        f"{on}; medians of {arguments.rounds} rounds, slices of {arguments.slice_s:g} s, "
        f"logger {arguments.logger}\n\n{HEAD}"
    )
    results = []
    for case in cases:
        results.append(evaluate(case, measure(case, arguments)))
        print(row(results[-1]), flush=True)
    result = {"bench": "overhead", "machine": on, "logger": arguments.logger, "cases": results}
    output.write_json(arguments.json, result)
    return 3 if any(case["verdict"] == "INCONCLUSIVE" for case in results) else 0
