"""A script in a warm worker behaves as under plain python: arguments, path, output, traceback, exit code."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from swift_ft.launch.death import Life
from swift_ft.launch.worker import Program
from tests.integration.logserver_world import python

PROLOGUE = """
import os, sys
print(__name__, __file__, __package__, sys.argv, sys.path, os.getcwd(), sorted(os.environ))
print(sys.modules["__main__"].__dict__ is globals(), "HERE" if os.environ.get("RANK") == "3" else "NOT HERE")
"""
ENDINGS = {
    "ends": "",
    "exits with a number": "sys.exit(5)",
    "exits with words": "sys.exit('no more')",
    "exits with nothing": "sys.exit()",
    "leaves at once": "os._exit(9)",
    "raises": "def inner():\n    raise ValueError('boom')\ninner()",
    "raises from": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "raises a group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "does not compile": "def broken(:",
    "imports what does not compile": "import helper_broken",
    "imports a neighbour": "import helper; print(helper.VALUE)",
    "has its own hook": "sys.excepthook = lambda *about: print('hooked', about[1])\nraise ValueError('boom')",
    "says goodbye": "import atexit; atexit.register(lambda: print('bye', __name__)); raise ValueError('boom')",
    "is interrupted": "raise KeyboardInterrupt",
    "is killed": "import signal; os.kill(os.getpid(), signal.SIGKILL)",
    "starts a process": (
        "import multiprocessing as mp\ndef f(): print('child', __name__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    p = mp.get_context('spawn').Process(target=f); p.start(); p.join(); print(p.exitcode)"
    ),
    "pickles its own class": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
}


@dataclass
class Ended:
    exit_code: int
    stdout: str
    stderr: str
    said: bytes = b""  # of a worker: behind the word that it is warm


def run_plain(directory: Path, *arguments: str) -> Ended:
    done = python("-u", *arguments, cwd=directory, env={"RANK": "3"}, timeout_s=60)
    return Ended(done.returncode, done.stdout, done.stderr)


def run_worker(directory: Path, assignment: Program | None, path0: str, launcher_pid: int = 0) -> Ended:
    control_read, control_write = os.pipe()
    warm_read, warm_write = os.pipe()
    life = Life()
    command = [sys.executable, "-u", "-m", "swift_ft.launch.worker"]
    command += [str(fd) for fd in (control_read, warm_write, life.fd)]
    command += [str(launcher_pid or os.getpid()), path0, "json,no_such_module"]
    environment = {k: v for k, v in os.environ.items() if k != "RANK"}
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        pass_fds=(control_read, warm_write, life.fd),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(control_read)
    os.close(warm_write)
    with open(warm_read, "rb", buffering=0) as warm, open(control_write, "wb", buffering=0) as control:
        if launcher_pid == 0:
            assert warm.read(1) == b"w"
        if assignment is None:
            control.close()
        else:
            control.write(assignment.to_line())
        stdout, stderr = process.communicate(timeout=60)
        return Ended(process.returncode, stdout, stderr, warm.read())


def make_program(directory: Path, script: str, **fields: object) -> Program:
    given = {"env": {"RANK": "3"}, "module": False, "args": ["a", "-b", "c d", "ü"], "cwd": str(directory)}
    return Program(script=script, **{**given, **fields})


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_script_behaves_as_under_python(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(PROLOGUE + ending)
    (folder / "helper.py").write_text("VALUE = 7")
    (folder / "helper_broken.py").write_text("VALUE = (")
    expected = run_plain(tmp_path, "scripts/train.py", "a", "-b", "c d", "ü")
    found = run_worker(tmp_path, make_program(tmp_path, "scripts/train.py"), str(folder))
    assert found == expected


@pytest.mark.parametrize("ending", ["", "raise ValueError('boom')"])
def test_module_behaves_as_under_python(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "train.py").write_text(PROLOGUE + ending)
    expected = run_plain(tmp_path, "-m", "package.train", "a", "-b", "c d", "ü")
    found = run_worker(tmp_path, make_program(tmp_path, "package.train", module=True), str(tmp_path))
    # `python -m` shows its own two frames; nobody misses them.
    frozen = [line for line in expected.stderr.splitlines() if "<frozen runpy>" not in line]
    assert (found.exit_code, found.stdout) == (expected.exit_code, expected.stdout)
    assert found.stderr.splitlines() == frozen


@pytest.mark.parametrize(
    ("error", "exit_code"), [("UsageError", 2), ("ServiceError", 3), ("Divergence", 3)], ids=str
)
def test_our_own_errors_are_one_line(tmp_path: Path, error: str, exit_code: int) -> None:
    (tmp_path / "train.py").write_text(
        f"import swift_ft.errors\nraise swift_ft.errors.{error}('do this\\n  now')"
    )
    found = run_worker(tmp_path, make_program(tmp_path, "train.py"), str(tmp_path))
    assert found == Ended(exit_code, "", "swift: do this now\n", b"s")


def test_output_goes_to_files_and_is_appended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys; print('out'); os.system('echo below'); sys.exit('err')"
    )
    files = {"stdout": str(tmp_path / "out"), "stderr": str(tmp_path / "err")}
    for _ in range(2):
        found = run_worker(tmp_path, make_program(tmp_path, "train.py", **files), str(tmp_path))
        assert found == Ended(1, "", "")
    assert (tmp_path / "out").read_text() == "out\nbelow\n" * 2
    assert (tmp_path / "err").read_text() == "err\n" * 2


def test_spare_that_nobody_needs_ends_quietly(tmp_path: Path) -> None:
    assert run_worker(tmp_path, None, str(tmp_path)) == Ended(0, "", "")


def test_worker_whose_launcher_died_before_it_could_look_ends(tmp_path: Path) -> None:
    # Its parent is this test, not the launcher that it was told of: init has adopted it, as it were.
    (tmp_path / "train.py").write_text("print('must not run')")
    found = run_worker(tmp_path, make_program(tmp_path, "train.py"), str(tmp_path), launcher_pid=1)
    assert found == Ended(0, "", "")


def test_what_is_drawn_without_a_seed_is_drawn_alike_by_a_replacement(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import random; print(random.random(), random.sample(range(9), 9))")
    assignment = Program(env={}, script="script.py", module=False, args=[], cwd=str(tmp_path))
    first, again = (run_worker(tmp_path, assignment, str(tmp_path)) for _ in range(2))
    assert first.exit_code == 0, first.stderr
    assert first.stdout == again.stdout != ""


ENDS = {
    "exits": ("sys.exit(3)", "the script has ended with exit code 3"),
    "ends": ("", "the script has ended"),
    "raises": ("raise ValueError('two\\nlines')", "ValueError: two lines"),
}
ABOUT = """
import json, os, sys
from swift_ft import warm_up
about = {
    "rank": os.environ["RANK"],
    "peers": [name for name in ("MASTER_ADDR", "SWIFT_EVENTS", "SWIFT_FAULTS") if name in os.environ],
    "nice": os.nice(0),
    "oom": open("/proc/self/oom_score_adj").read().strip(),
    "beside": warm_up.is_warming_up(),
    "argv": sys.argv,
    "main": __name__,
}
json.dump(about, open("about.json", "w"))
print("nobody hears this")
print("nor this", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("end", ENDS)
def test_a_rehearsal_is_silent_and_poor_says_one_line_and_ends(tmp_path: Path, end: str) -> None:
    words, why_not = ENDS[end]
    (tmp_path / "train.py").write_text(ABOUT + words)
    env = {"RANK": "3", "MASTER_ADDR": "a", "SWIFT_EVENTS": str(tmp_path), "SWIFT_FAULTS": "[]"}
    program = make_program(tmp_path, "train.py", env=env, rehearse=5)
    found = run_worker(tmp_path, program, str(tmp_path))
    assert (found.exit_code, found.stdout, found.stderr) == (0, "", "")
    assert found.said.endswith(b"\n")
    assert json.loads(found.said) == {"steps": 0, "difference": "", "why_not": why_not, "passing": False}
    about = json.loads((tmp_path / "about.json").read_text())
    assert about == {
        "rank": "3",
        "peers": [],
        "nice": 19,
        "oom": "1000",
        "beside": True,
        "argv": ["train.py", *program.args],
        "main": "__main__",
    }
