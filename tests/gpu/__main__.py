"""`scripts/gpu`: one run that shows what only a GPU can show, in parts that each have their own time.

    scripts/gpu [--dry-run] [--part NAME]... [--json PATH] [--page PATH]

A part that fails or hangs is ended, and the next one begins. `--dry-run` does all of it on the simulated device of
`tests/device`, so that a GPU's minutes are not spent on typing errors.
Exit codes: 0 every part that could be run has passed; 1 one fails; 2 usage; 3 nothing could be run.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
WHOLE_S = 420.0
"""For all parts together: of a machine that is at hand for 15 minutes, so that a second run is possible."""
SHARED = 8.0
"""A dry run may take so many times as long: its device is two cores that others use, too."""
END_S = 10.0
"""A drill that is told to end ends what it has started."""
SAID_MAX = 400

Figures = dict[str, Any]


class Failed(Exception):
    """The message says why, in one line."""


class NotRun(Exception):
    """What cannot be run here. The message says why."""


class Place:
    """Where the commands of one part run: on which device, until when."""

    def __init__(self, directory: Path, limit_s: float, *, dry: bool, facts: Figures) -> None:
        self.directory = directory
        self.dry = dry
        self.facts = facts
        """What the first part has found."""
        self.device = "simulated" if dry else "cuda"
        self._until = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._runs = 0

    def run(self, *words: object, plugin: str = "plugin", **variables: str) -> str:
        """Runs a module of Python's and returns what it prints. Raises Failed."""
        self._runs += 1
        output = self.directory / f"output{self._runs}.txt"
        paths = [ROOT, os.environ.get("PYTHONPATH", "")]
        if self.dry:
            paths.insert(0, ROOT / "tests" / "device" / plugin)  # torch loads the device from there
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **variables}
        env["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, paths)))
        command = [sys.executable, "-m", *map(str, words)]
        with output.open("w") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(max(0.1, self._until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Failed(f"not at its end after {self._limit_s:.0f} s: {_last(output)}") from None
            finally:
                _end(process)
        if code:
            raise Failed(f"exit code {code}: {_last(output)}")
        return output.read_text(errors="replace")

    def json(self, *words: object, **options: str) -> Figures:
        """Runs a module of Python's that prints JSON in its last line. Raises Failed."""
        said = self.run(*words, **options).strip().splitlines() or [""]
        try:
            found: Figures = json.loads(said[-1])
        except ValueError:
            raise Failed(f"{words[0]} did not print JSON: {said[-1][:SAID_MAX]}") from None
        return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends what is left of a command: it, and then all of its session."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _last(output: Path) -> str:
    """The last lines that say something, in one."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-SAID_MAX:] or "it has printed nothing"


# --- the parts ---


def facts(place: Place) -> Figures:
    return place.json("tests.gpu.facts")


def conformance(place: Place) -> Figures:
    fewer = ["-m", "not matrix"] if place.dry else []
    words = ["-q", "-p", "no:cacheprovider", "--no-header", *fewer, "tests/gpu/test_device.py"]
    said = place.run("pytest", *words).strip()
    last = said.splitlines()[-1]
    if "skipped" in last and "passed" not in last:
        raise Failed(f"nothing was tested: {last}")
    return {"tests": last.strip("= ")}


def twice(place: Place) -> Figures:
    first, second = (place.json("tests.gpu.twice") for _ in range(2))
    different = [name for name in first if first[name] != second.get(name)]
    if different or first.keys() != second.keys():
        raise Failed(f"{len(different)} of {len(first)} tensors differ, the first one is {different[:1]}")
    return {"tensors": len(first)}


SHAPE = ("--model", "tiny", "--steps", "8", "--microbatches", "4")
DRILLS = {
    "replay, 4 stages": ("--stages", "4", "--kill", "rank=2,step=4,microbatch=1,phase=backward"),
    "replica, undo, 4 ranks": (
        *("--stages", "1", "--replicas", "4", "--updates", "wait_free"),
        *("--kill", "rank=1,step=4,phase=update"),
    ),
    "checkpoint, 4 stages": (
        *("--stages", "4", "--strategy", "checkpoint", "--checkpoint-every", "3"),
        *("--kill", "rank=1,step=6,phase=backward"),
    ),
}
OVER_NCCL = {
    "lost while the peer receives": ("--stages", "2", "--kill", "rank=1,step=4,phase=backward"),
    "lost in a reduction": ("--stages", "1", "--replicas", "2", "--kill", "rank=1,step=4,phase=reduce"),
}


def drills(place: Place) -> Figures:
    return _drilled(place, DRILLS)


def nccl(place: Place) -> Figures:
    if place.dry:
        found = _drilled(place, OVER_NCCL, plugin="plugin_nccl", FAKE_NCCL=str(place.directory))
        if not any(place.directory.glob("messages-*")):
            raise Failed("no message passed over the fake NCCL")
        return found
    version = place.facts.get("nccl")
    if not version:
        raise NotRun("the version of NCCL is not known")
    if version < [2, 30]:
        words = ".".join(map(str, version))
        raise NotRun(f"NCCL {words} is here: two ranks on one GPU need 2.30 (LD_PRELOAD=…/libnccl.so.2)")
    return _drilled(place, OVER_NCCL, NCCL_MULTI_RANK_GPU_ENABLE="1")


def _drilled(place: Place, drills: dict[str, tuple[str, ...]], **options: str) -> Figures:
    """The seconds of each recovery. All drills are run, also behind one that fails."""
    found, failed = Figures(), []
    for name, words in drills.items():
        report = place.directory / f"{len(found)}.json"
        try:
            command = ["swift_ft.cli", "drill", "--device", place.device, *SHAPE, *words]
            place.run(*command, "--json", report, **options)
            said = json.loads(report.read_text())
        except Failed as error:
            failed.append(f"{name}: {error}")
            continue
        if (said["verdict"], said["exact"], said["bitwise_equal"]) != (PASS, True, True):
            failed.append(f"{name}: {said['verdict']}, exact {said['exact']}")
        found[name] = f"recovered in {said['recovery_seconds']['total']:.2f} s"
    if failed:
        raise Failed("; ".join(failed))
    return found


def numbers(place: Place) -> Figures:
    return place.json("tests.gpu.figures")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    name: str
    limit_s: float
    shows: str
    run: Callable[[Place], Figures]


PARTS = (
    Part(name="facts", limit_s=20, shows="what is here; nothing that is needed lacks", run=facts),
    Part(
        name="conformance",
        limit_s=90,
        shows="the tests of the simulated device on this one; no wait in a training step; undo",
        run=conformance,
    ),
    Part(name="twice", limit_s=40, shows="steps of a GPT in two fresh processes: every tensor", run=twice),
    Part(
        name="drills", limit_s=120, shows="ranks that share the device, over staged gloo: exact", run=drills
    ),
    Part(name="nccl", limit_s=90, shows="two ranks over NCCL: killed, aborted, rebuilt, exact", run=nccl),
    Part(name="numbers", limit_s=60, shows="what recording, undo and copies cost", run=numbers),
)


# --- the run ---


@dataclass(kw_only=True, slots=True)
class Outcome:
    name: str
    seconds: float
    verdict: str
    why: str = ""
    figures: Figures = field(default_factory=dict)


def attempt(part: Part, directory: Path, *, dry: bool, facts: Figures) -> Outcome:
    directory.mkdir()
    began, found = time.monotonic(), Figures()
    verdict, why = PASS, ""
    try:
        place = Place(directory, part.limit_s * (SHARED if dry else 1.0), dry=dry, facts=facts)
        found = part.run(place)
    except Failed as error:
        verdict, why = FAIL, str(error)
    except NotRun as error:
        verdict, why = NOT_RUN, str(error)
    except Exception as error:  # noqa: BLE001 - the next part is run all the same
        verdict, why = FAIL, f"{type(error).__name__}: {error}"
    return Outcome(
        name=part.name, seconds=round(time.monotonic() - began, 1), verdict=verdict, why=why, figures=found
    )


def code_of(outcomes: Sequence[Outcome]) -> int:
    verdicts = {outcome.verdict for outcome in outcomes}
    if FAIL in verdicts:
        return 1
    return 0 if PASS in verdicts else 3


def page(machine: str, outcomes: Sequence[Outcome], date: str) -> str:
    """Markdown for docs/devices.md."""
    lines = [f"`scripts/gpu` on {date}: {machine}.", "", "| part | verdict | s | |", "|---|---|---|---|"]
    for outcome in outcomes:
        said = outcome.why or _words(outcome.figures)
        said = said.replace("|", "/")
        lines.append(f"| {outcome.name} | {outcome.verdict} | {outcome.seconds:.0f} | {said} |")
    return "\n".join(lines) + "\n"


def _words(figures: Figures) -> str:
    return "; ".join(f"{name}: {value}" for name, value in figures.items())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="on the simulated device (needs g++)")
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--part", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}; facts always"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the outcome of each part there")
    parser.add_argument("--page", type=Path, metavar="PATH", help="write the same there as Markdown")
    arguments = parser.parse_args(argv)
    date, outcomes, known = datetime.datetime.now(datetime.UTC).date().isoformat(), list[Outcome](), Figures()
    machine = "no device was found"
    with tempfile.TemporaryDirectory(prefix="swift-gpu-", ignore_cleanup_errors=True) as directory:
        for part in PARTS:
            if arguments.part and part.name not in ("facts", *arguments.part):
                continue
            print(f"{part.name} (at most {part.limit_s:.0f} s): {part.shows}", flush=True)
            outcome = attempt(part, Path(directory, part.name), dry=arguments.dry_run, facts=known)
            outcomes.append(outcome)
            if part.name == "facts" and outcome.verdict == PASS:
                known, machine = outcome.figures, outcome.figures["machine"]
            print(f"  {outcome.verdict} in {outcome.seconds:.0f} s {outcome.why}", flush=True)
            document = {"machine": machine, "date": date, "parts": [asdict(each) for each in outcomes]}
            if arguments.json is not None:  # what has been found is kept, whatever comes
                arguments.json.write_text(json.dumps(document, indent=1) + "\n")
            if arguments.page is not None:
                arguments.page.write_text(page(machine, outcomes, date))
    print(f"\n{page(machine, outcomes, date)}", end="")
    return code_of(outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
