"""What is run with one pair of versions: little, but all that touches torch's own names."""

import json
import re
import subprocess
import tempfile
from pathlib import Path

from tests.compat.environment import ROOT, Environment
from tests.compat.table import REFUSED

SUITE = (
    "tests/unit/launch/test_command.py",
    "tests/unit/optim/test_journal.py",
    "tests/unit/optim/test_native.py",
    "tests/unit/runtime/test_groups.py",
    "tests/unit/runtime/test_loaders.py",
    "tests/unit/runtime/test_module_state.py",
    "tests/unit/runtime/test_rng.py",
    "tests/unit/runtime/test_recording.py",
    "tests/unit/runtime/test_registered.py",
    "tests/unit/runtime/test_shapes.py",
    "tests/unit/runtime/test_sharded.py",
    "tests/unit/runtime/test_shared_replay.py",
    "tests/unit/runtime/test_state.py",
    "tests/unit/runtime/test_torch_names.py",
    "tests/integration/test_communicator.py",
)
FLOORS_SUITE = ("tests/unit/control", "tests/unit/log", "tests/unit/security", "tests/unit/test_metrics.py")
"""Run besides, if dependencies are the oldest ones: what touches them."""
TRAINERS = {"fsdp2": 4, "pipeline_eval_sizes": 2}
"""name → ranks"""
SHARDED = "fsdp2"
_KILL = "rank=1,step=8,microbatch=3,phase=backward"
_TINY = ("--model", "tiny", "--steps", "14", "--checkpoint-every", "5")
DRILLS = {
    "replay under ZBV": (*_TINY, "--stages", "2", "--schedule", "zbv", "--kill", _KILL),
    "shared replay": (*_TINY, "--stages", "3", "--helpers", "2", "--kill", _KILL),
    "2 x 2, interleaved 1F1B, DDP": (
        *(*_TINY, "--stages", "2", "--replicas", "2", "--schedule", "interleaved1f1b"),
        *("--data-parallel", "ddp", "--kill", "rank=2,step=8,microbatch=3,phase=backward"),
    ),
    "1 x 2, undo": (
        *(*_TINY, "--stages", "1", "--replicas", "2", "--updates", "wait_free"),
        *("--kill", "rank=1,step=8,phase=update"),
    ),
}
_SUITE_LIMIT_S = 1800.0
_TRAINER_LIMIT_S = 600.0
_DRILL_LIMIT_S = 600.0
_END_S = 30.0
_IMPORT = """
import swift_ft.train.session, swift_ft.launch.command
from swift_ft import torch_private
print(torch_private.RESETS_SHARDED)
"""
_COUNT = re.compile(r"(\d+) (passed|failed|error|errors)\b")
_VERDICT = re.compile(r"^(\w+) +(\w+) x\d+ ", re.MULTILINE)


def imported(environment: Environment) -> tuple[str, bool]:
    """Why swift refuses this torch when it is imported, empty if it does not; and whether it takes FSDP2 with it.

    Raises TimeoutError if the import does not end.
    """
    done = _run(environment, ["-c", _IMPORT], _TRAINER_LIMIT_S)
    if done is None:
        raise TimeoutError(f"the import of swift does not end within {_TRAINER_LIMIT_S:.0f} s")
    if done.returncode == 0:
        return "", done.stdout.strip() == "True"
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return last.removeprefix("swift_ft.errors.ServiceError: "), False


def suite(environment: Environment, output: Path, *, floors: bool) -> dict[str, int]:
    """How many tests of `SUITE` pass and fail; what pytest prints goes to `output`."""
    tests = (*SUITE, *FLOORS_SUITE) if floors else SUITE
    done = _run(environment, ["-m", "pytest", "-q", "-n", "2", "-m", "not matrix", *tests], _SUITE_LIMIT_S)
    if done is None:
        return {"passed": 0, "failed": 1}
    output.write_text(done.stdout + done.stderr)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {word: int(number) for number, word in _COUNT.findall(last)}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    # No data is never a pass.
    return {"passed": counts.get("passed", 0), "failed": failed or int(done.returncode != 0)}


def trainers(environment: Environment, output: Path, *, shards: bool) -> dict[str, str]:
    """The verdict of each of `TRAINERS`: ok, MISS, or REFUSED for FSDP2 if swift does not take it."""
    found = {}
    for name, world in TRAINERS.items():
        if name == SHARDED and not shards:
            found[name] = REFUSED
            continue
        done = _run(
            environment, ["-m", "tests.trainers.harness", name, "--world", str(world)], _TRAINER_LIMIT_S
        )
        words = _VERDICT.findall(done.stdout) if done is not None else []
        found[name] = "ok" if words and all(word == "ok" for word, _ in words) else "MISS"
        if done is not None:
            with output.open("a") as file:
                file.write(done.stdout + done.stderr)
    return found


def drills(environment: Environment, output: Path) -> dict[str, str]:
    """The verdict of each of `DRILLS`: that of its report, or NO REPORT."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="swift-compat-") as place:
        for name, options in DRILLS.items():
            report = Path(place, f"{name}.json")
            done = _run(
                environment, ["-m", "swift_ft.cli", "drill", *options, "--json", str(report)], _DRILL_LIMIT_S
            )
            found[name] = json.loads(report.read_text())["verdict"] if report.exists() else "NO REPORT"
            if done is not None:
                with output.open("a") as file:
                    file.write(done.stdout + done.stderr)
    return found


def _run(
    environment: Environment, arguments: list[str], limit_s: float
) -> subprocess.CompletedProcess[str] | None:
    """None: it did not end in time, and was told to (a drill ends what it has started)."""
    with subprocess.Popen(
        [environment.python, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return None
        except BaseException:  # told to end, as by SIGTERM; a drill ends what it has started
            process.terminate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
