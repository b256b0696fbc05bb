"""An error that nothing catches ends the process at once, with one line and an exit code."""

import re
import subprocess
import sys
import textwrap

import pytest

from swift_ft.logs import described

BEGIN = """
import sys, threading, time
from swift_ft import logs

def say(error):
    print(logs.described(error), file=sys.stderr, flush=True)

logs.end_process_on_uncaught(say)

def work():
    raise RuntimeError("no more")

def wait():
    threading.Event().wait()
"""

ENDINGS = {
    "in a thread, while others wait": "threading.Thread(target=work).start(); wait()",
    "in the main thread, while others wait": "threading.Thread(target=wait).start(); work()",
    # Whoever starts a thread waits until it has begun.
    "where a thread begins": """
def fail(self, original=threading.Thread._set_ident):
    threading.Thread._set_ident = original
    raise MemoryError("no more")

threading.Thread._set_ident = fail
threading.Thread(target=work).start()
""",
}


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_the_process(ending: str) -> None:
    done = run(ENDINGS[ending])
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert re.match("(Runtime|Memory)Error: no more in thread ", line)
    assert "<string>:" in line


def test_what_ends_only_its_thread_does_not() -> None:
    done = run("thread = threading.Thread(target=sys.exit); thread.start(); thread.join(); print('goes on')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


def test_other_errors_that_python_cannot_raise_are_only_said() -> None:
    done = run(
        """
        class Noisy:
            def __del__(self):
                raise RuntimeError("in passing")

        Noisy()
        print("goes on")
        """
    )
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert "in passing" in done.stderr


def test_it_ends_although_nothing_can_be_said() -> None:
    done = run("logs.end_process_on_uncaught(lambda error: work(), 5); work()")
    assert (done.returncode, done.stderr) == (5, "")


def test_the_line_names_the_error_the_thread_and_the_lines_of_code() -> None:
    try:
        raise ValueError("bad")
    except ValueError as error:
        words = described(error)
    assert words.startswith("ValueError: bad in thread MainThread (test_uncaught.py:")
    assert described(ValueError("bad")) == "ValueError: bad in thread MainThread"
