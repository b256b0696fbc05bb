"""`swift-ft bench replica`: speed of copying a replica's state to a joiner, against a raw socket in the same run.

    parent ── store ── three ranks in a group (source 0, source 1, joiner) and a raw TCP socket (0 → joiner)

Every round measures all cases once, in turn, so that other load on the machine affects all of them. A case's ratio is
the median of its ratios to the raw socket within each round. The copy is that of a recovery, with its digests and
comparisons. Memory matters: the first write to a page costs the joiner more time than receiving into it. So the raw
socket is measured into existing and into new memory, and each copy is compared with its counterpart: a joiner whose
state exists, and one whose optimizer state (two thirds) has to be allocated.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.comm import LOOPBACK
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output

GOAL_RATIO = 0.7
RAW, RAW_NEW = "raw socket", "raw socket, new memory"
# case -> (source ranks, whether optimizer state exists at the joiner, the case that it is compared with)
COPIES: dict[str, tuple[tuple[int, ...], bool, str]] = {
    "1 source": ((0,), True, RAW),
    "2 sources": ((0, 1), True, RAW),
    "1 source, new optimizer state": ((0,), False, RAW_NEW),
}
DRILL = "drill --stages 1 --replicas 2 --model default --steps 12"
_JOINER = 2
_WORKER_TIMEOUT_S = 900.0


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft bench replica",
        description="Measures the copy of a replica's state against a raw socket, and the time from kill to next step.",
    )
    output.add_json(parser)
    parser.add_argument(
        "--mebibytes", type=int, default=384, metavar="N", help="size of the state (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="default %(default)s")
    parser.add_argument("--no-drill", action="store_true", help="leave out the time from kill to next step")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    if arguments.mebibytes < 1 or arguments.rounds < 1:
        raise UsageError("--mebibytes and --rounds take 1 or more")
    output.check_json(arguments.json)
    on = output.machine()  # before this run adds to the load
    measured = run_ranks(arguments.mebibytes, arguments.rounds)
    drill = {"missing": "left out (--no-drill)"} if arguments.no_drill else run_drill()
    result = evaluate(measured, drill, on)
    print(table(result))
    output.write_json(arguments.json, result)
    return 0


# --- what comes out ---


def evaluate(measured: dict[str, Any], drill: dict[str, Any], on: str) -> dict[str, Any]:
    """Computes per case the median rate and the median of its ratios, and which goals are met."""
    seconds: dict[str, list[float]] = measured["seconds"]
    size = int(measured["bytes"])
    cases: list[dict[str, Any]] = []
    for name, values in seconds.items():
        like = COPIES[name][2] if name in COPIES else None
        ratios = [a / b for a, b in zip(seconds[like], values, strict=True)] if like else []
        cases.append(
            {
                "case": name,
                "bytes_per_second": round(size / statistics.median(values)),
                "compared_with": like,
                "ratio": round(statistics.median(ratios), 3) if ratios else None,
                "seconds": [round(value, 6) for value in values],
            }
        )
    goals = [
        {
            "goal": f"{case['case']}: state bytes per second over a raw socket's",
            "at_least": GOAL_RATIO,
            "measured": case["ratio"],
            "met": case["ratio"] >= GOAL_RATIO,
        }
        for case in cases
        if case["ratio"] is not None
    ]
    return {"bench": "replica", "machine": on, "bytes": size, "cases": cases, "goals": goals, "drill": drill}


def table(result: dict[str, Any]) -> str:
    """Formats the result as text: a line for each case, the goals, and the drill's time from kill to next step."""
    lines = [f"state of {result['bytes'] / 2**20:.0f} MiB; {result['machine']}", ""]
    lines.append(f"{'':<32}{'GB/s':>7}{'ratio':>8}  compared with")
    for case in result["cases"]:
        ratio = "" if case["ratio"] is None else f"{case['ratio']:.2f}"
        rate = case["bytes_per_second"] / 1e9
        lines.append(f"{case['case']:<32}{rate:>7.2f}{ratio:>8}  {case['compared_with'] or ''}".rstrip())
    lines.append("")
    for goal in result["goals"]:
        met = "met" if goal["met"] else "NOT MET"
        lines.append(f"goal at least {goal['at_least']}: {goal['measured']:.2f}, {met} ({goal['goal']})")
    drill = result["drill"]
    if "missing" in drill:
        lines.append(f"time from kill to next step: {drill['missing']}")
    else:
        lines.append(
            f"time from kill to next step: {drill['kill_to_next_step_seconds'] * 1000:.0f} ms "
            f"({drill['strategy']}, {drill['verdict']}; swift-ft {DRILL})"
        )
    return "\n".join(lines)


# --- time from kill to next step ---


def run_drill() -> dict[str, Any]:
    """Kills a rank in a drill and returns the seconds until every rank steps again, or ``missing`` with the reason."""
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as place:
        path = Path(place) / "drill.json"
        command = [sys.executable, "-P", "-m", "swift_ft.cli", *DRILL.split(), "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not path.exists():
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            return {"missing": f"the drill did not run: {last[0]}"}
        return from_report(json.loads(path.read_text()))


def from_report(report: dict[str, Any]) -> dict[str, Any]:
    """Extracts the recovery by copying from a drill's report; `missing` is the reason if there was none."""
    seconds = report.get("recovery_seconds")
    strategies = sorted({str(value) for value in dict(report.get("strategy") or {}).values()})
    if report.get("verdict") != "PASS" or not seconds or "replica" not in strategies:
        return {"missing": f"the drill ended {report.get('verdict')} by {', '.join(strategies) or 'nothing'}"}
    return {
        "verdict": report["verdict"],
        "strategy": ", ".join(strategies),
        "kill_to_next_step_seconds": seconds["total"],
        "recovery_seconds": seconds,
        "rerun": report.get("rerun"),
    }


# --- the ranks ---


def run_ranks(mebibytes: int, rounds: int) -> dict[str, Any]:
    """Returns the joiner's measurements: ``bytes`` of the state and ``seconds`` per case and round. Raises ServiceError
    if a rank fails or the ranks take too long."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **LOOPBACK}
    command = [
        sys.executable,
        "-P",
        "-m",
        "swift_ft.lab.bench.replica_ranks",
        str(store.port),
        str(mebibytes),
        str(rounds),
    ]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(_JOINER + 1):
            ranks.append(
                subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
            )
        output, _ = ranks[_JOINER].communicate(timeout=_WORKER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ServiceError(
            f"the ranks took more than {_WORKER_TIMEOUT_S:.0f} s; give fewer --rounds"
        ) from None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    try:
        return dict(json.loads(output.splitlines()[-1]))
    except (IndexError, ValueError):
        raise ServiceError("a rank ended before it had measured; its output stands above") from None
