"""Drills as a person runs them: `swift-ft drill` in a process of its own, and its report."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS, CHECKPOINT_EVERY = 15, 5
COMMAND = [sys.executable, "-m", "swift.cli", "drill", "--model", "tiny", "--microbatches", "4"]
COMMAND += ["--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY)]


@dataclass
class Outcome:
    """What a drill left."""

    exit_code: int
    stdout: str
    stderr: str
    report: dict[str, Any] | None

    def explain(self) -> str:
        return f"exit code {self.exit_code}\n{self.stdout}\n{self.stderr}"


# What a failure-free run does not depend on.
_OF_RECOVERY = (
    "--kill",
    "--strategy",
    "--groups",
    "--undo",
    "--spares",
    "--html",
    "--random-kills",
    "--log-servers",
    "--copies",
)
_WITHOUT_VALUE = ("--secure",)


def drill(*arguments: str, twins: Path | None = None, at: Path, timeout_s: float = 200.0) -> Outcome:
    """Runs one. `twins`: where the failure-free runs of a test session are kept, one for each configuration."""
    words = [*COMMAND, *arguments, "--json", str(at / "report.json")]
    if twins is not None:
        valued = [word for word in arguments if word not in _WITHOUT_VALUE]
        pairs = zip(valued[::2], valued[1::2], strict=True)
        shape = [f"{flag.removeprefix('--')}={value}" for flag, value in pairs if flag not in _OF_RECOVERY]
        words += ["--twin", str(twins / ("-".join(sorted(shape)) or "plain"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    path = at / "report.json"
    report = json.loads(path.read_text()) if path.exists() else None
    return Outcome(done.returncode, done.stdout, done.stderr, report)


def kills(*specs: str) -> list[str]:
    return [word for spec in specs for word in ("--kill", spec)]


def passed(outcome: Outcome) -> dict[str, Any]:
    """The report of a drill that must have passed."""
    assert outcome.exit_code == 0, outcome.explain()
    report = outcome.report
    assert report is not None
    assert report["verdict"] == "PASS"
    assert report["bitwise_equal"] is True
    assert report["survivors_kept"] is True
    assert report["negative_control"]["caught"] is True
    assert all(fault["fired"] for fault in report["faults"])
    return report
