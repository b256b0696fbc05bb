"""`swift-ft`: who is called, with what, and how fast."""

import subprocess
import sys

import pytest

from swift_ft import __version__, cli


def run_cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-X", "importtime", "-m", "swift_ft.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["run", "--nproc-per-node=4", "train.py"], "swift_ft.launch"),
        (["logserver", "--directory", "d"], "swift_ft_services.logserver"),
        (["coordinator"], "swift_ft_services.coordinator"),
    ],
)
def test_programs_take_the_process_over(
    arguments: list[str], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(cli.os, "execv", lambda *command: called.append(command) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert called == [(sys.executable, [sys.executable, "-P", "-m", module, *arguments[1:]])]


def test_version_is_quick() -> None:
    done = run_cli("version")
    assert (done.returncode, done.stdout) == (0, f"swift-ft {__version__}\n")
    assert "swift_ft.cli" in done.stderr or "importlib.metadata" in done.stderr
    assert "torch" not in done.stderr
    assert "grpc" not in done.stderr


def test_help_begins_with_what_it_is() -> None:
    text = cli.usage().splitlines()
    assert text[0].startswith("Exact recovery")
    assert all(any(line.split()[:1] == [name] for line in text) for name in [*cli.PROGRAMS, *cli.OTHERS])


@pytest.mark.parametrize("arguments", [["frobnicate"], []])
def test_unknown_command_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("swift: ")
    assert err.count("\n") == 1
    assert "drill" in err


def test_help_of_run_says_what_it_does_first() -> None:
    command = [sys.executable, "-m", "swift_ft.launch", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].startswith("Starts the ranks of a training job")
    assert "--spares" in done.stdout
    assert "--rdzv-backend" in done.stdout
