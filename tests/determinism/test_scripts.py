"""Scripts as other people write them: each gets the verdict, and the cause, that its first lines state."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swift_ft.lab.determinism import command as report
from swift_ft.lab.determinism.runs import SessionRuns
from swift_ft.lab.determinism.verify import ENV_RECORDS, Verdict, verify
from swift_ft.lab.drill.cluster import with_environment
from tests.determinism.world import FOLDER, Script, asked, scripts, verified
from tests.integration.forked import Forks

OWN = [script for script in scripts() if not script.session]


def name(value: Script | str) -> str:
    return value.path.stem if isinstance(value, Script) else value


def judge(verdict: Verdict, script: Script) -> None:
    said = "\n".join(report.verdict_lines(verdict))
    assert verdict.word == script.verdict, said
    assert [cause.name for cause in verdict.causes][:1] == ([script.cause] if script.cause else []), said
    assert script.says in said, said


@pytest.mark.parametrize("script", [s for s in OWN if s.quick], ids=name)
def test_a_script_with_checkpoints_of_its_own(script: Script, tmp_path: Path, forks: Forks) -> None:
    judge(verified(script, tmp_path, forks), script)


@pytest.mark.matrix
@pytest.mark.parametrize("script", [s for s in OWN if not s.quick], ids=name)
def test_every_script_with_checkpoints_of_its_own(script: Script, tmp_path: Path, forks: Forks) -> None:
    judge(verified(script, tmp_path, forks), script)


SESSIONS = [(script, strategy) for script in scripts() if script.session for strategy in script.strategies]


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("script", "strategy"), SESSIONS, ids=name)
def test_a_script_with_a_session(script: Script, strategy: str, tmp_path: Path) -> None:
    judge(verify(SessionRuns(asked(script, strategy=strategy), tmp_path)), script)


# --- the command, as it is called ---


def start(place: Path, *words: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "swift_ft.cli",
        "verify-determinism",
        "--directory",
        str(place / "runs"),
        *words,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_says_it_and_writes_it(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    script = FOLDER / "momentum_not_saved.py"
    process = start(
        tmp_path, "--own-checkpoints", "--json", str(found), "--kill", "rank=0,step=6", str(script)
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    assert "first difference: step 6, rank 0: optimizer 0.state.Linear.weight." in out
    assert json.loads(found.read_text())["causes"][0]["name"] == "optimizer-not-saved"


def test_an_interrupt_leaves_nothing_running(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(1, 1)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "while True:\n    model(torch.ones(1)).backward()\n    optimizer.step()\n"
    )
    process = start(tmp_path, "--own-checkpoints", "--nproc-per-node", "2", str(script))
    records = tmp_path / "runs" / "first" / "records"
    while len(list(records.glob("*.jsonl"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert with_environment(ENV_RECORDS, str(records))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "swift: SIGINT: the verification was ended, nothing of it is left running"
    assert with_environment(ENV_RECORDS, str(records)) == []


def test_a_script_that_fails_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("raise SystemExit('no such corpus')\n")
    process = start(tmp_path, "--own-checkpoints", str(script))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "the script has failed (exit code 1)" in err
    assert "no such corpus" in err
