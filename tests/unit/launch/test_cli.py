"""`swift-ft`: who is called, with what, and how fast."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swift_ft import __version__, cli
from swift_ft.cli_parser import end_quietly


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


QUICK = """status, events --x, jobs, logs --lost x, inspect, token --x, export, doctor --timeout x, completion,
drill --stages x, drill --kill x, study --steps x, failures, verify-determinism, plan, plan --goodput --x,
plan --adaptive, bench, bench nothing, bench recovery --x"""
SLOW = ("torch", "scipy", "sklearn", "matplotlib", "prometheus_client")
"""What takes longer to import than all the rest."""


@pytest.mark.parametrize("arguments", re.split(r",\s+", QUICK))
def test_a_usage_error_is_one_line_and_waits_for_no_import(arguments: str) -> None:
    program = f"import sys; from swift_ft import cli; code = cli.main({arguments.split()})\n"
    loaded = f"print([name for name in {SLOW} if name in sys.modules]); sys.exit(code)"
    own = {name: value for name, value in os.environ.items() if not name.startswith("SWIFT_")}
    done = subprocess.run(
        [sys.executable, "-c", program + loaded], env=own, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["swift_ft_services.coordinator", "swift_ft_services.logserver"])
def test_so_is_a_services(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module], capture_output=True, text=True, check=False
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 2
    assert "grpc" in imported
    assert not imported & set(SLOW)


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "swift_ft.cli", "help"],
        ["-m", "swift_ft.cli", "jobs", "--help"],
        ["-m", "swift_ft.cli", "doctor"],
        ["-m", "swift_ft_services.coordinator", "--help"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_nobody_reads_ends_it_quietly(command: list[str], unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    assert done.stderr == ""
    # argparse, which prints help, ignores errors of its own.
    assert done.returncode == (0 if "--help" in command and unbuffered else 141)


def test_a_broken_pipe_of_another_kind_is_a_bug() -> None:
    def bug() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        end_quietly(bug)


ASKING = """
import threading, time
from torch.distributed import TCPStore
from swift_ft.cli_parser import end_process

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def ask_on():
    while True:
        store.check(["key"])

for _ in range(2):
    threading.Thread(target=ask_on, daemon=True).start()
time.sleep(0.2)
print("all is well")
end_process(lambda: 3)
"""


def test_a_thread_within_torch_does_not_change_how_the_process_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ASKING], check=False, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (3, "all is well\n"), ended.stderr


@pytest.mark.parametrize(
    ("locale", "said"), [("latin-1:strict", r"gs://\u2026 \udcff"), ("utf-8:strict", r"gs://… \udcff")]
)
def test_what_a_locale_lacks_is_printed_escaped(locale: str, said: str) -> None:
    program = "import sys; from swift_ft import cli; cli._main = print; cli.main('gs://\\u2026 \\udcff')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": locale},
        check=True,
        capture_output=True,
    )
    assert done.stdout.decode(locale.partition(":")[0]) == f"{said}\n"


CLOSED = """\
import os, subprocess, sys
from swift_ft import cli, logs

def said(_argv):
    assert os.open(__file__, os.O_RDONLY) > 2
    logs.Log("me", logs.TEXT, 0).fatal("to nobody")
    print("to nobody", flush=True)
    for number in range(3):
        subprocess.run([sys.executable, "-c", f"import os; os.fstat({number})"], check=True)
    return 7

cli._main = said
sys.exit(cli.main())
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    """And nothing that is opened later gets their numbers."""
    (script := tmp_path / "closed.py").write_text(CLOSED)
    words = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, str(script)]
    assert subprocess.run(words, timeout=60, check=False).returncode == 7
