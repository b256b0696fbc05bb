"""Threads that wait in a backend in the trainer's place, when their process ends."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ENDS_MEANWHILE = textwrap.dedent(
    """
    import sys, time
    from datetime import timedelta
    from torch.distributed import HashStore
    from swift_ft.comm.worker_thread import Runner

    class Large:
        def __del__(self):  # the interpreter frees it while it ends
            time.sleep(1.5)

    large, back_after_s = Large(), float(sys.argv[1])
    runner = Runner("swift-data")
    # Any wait of torch's: it lets Python's lock go, and wants it back when it is over.
    task = runner.submit(lambda: HashStore().wait(["never"], timedelta(seconds=back_after_s)))
    runner.stop()
    print("alive" if runner._thread.is_alive() else "ended", flush=True)
    """
)
AS_A_RANK = ENDS_MEANWHILE + textwrap.dedent(
    """
        import atexit
        from swift_ft.launch.worker import leave_if_threads_are_lost

        left_open = open("left_open", "w")
        left_open.write("flushed")
        atexit.register(lambda: print("handled"))
        endings = {"exit 3": SystemExit(3), "words": SystemExit("why"), "error": ValueError("wrong")}
        try:
            if sys.argv[2] in endings:
                raise endings[sys.argv[2]]
        finally:
            leave_if_threads_are_lost(0)
        """
)


def run(program: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    words, env = [sys.executable, "-c", program, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, check=False, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("back_after_s", [0.3, 60.0], ids=["late", "lost"])
def test_a_process_ends_well_while_a_wait_ends(back_after_s: float) -> None:
    """torch would end the process with SIGABRT if the wait ended while the interpreter does."""
    done = run(ENDS_MEANWHILE, str(back_after_s))
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [("well", 0, ""), ("exit 3", 3, ""), ("words", 1, "why"), ("error", 1, "wrong")],
)
def test_a_rank_ends_as_its_script_does_though_a_lost_thread_comes_back(
    ending: str, code: int, words: str, tmp_path: Path
) -> None:
    """While the interpreter would end: later than anybody waits for it."""
    done = run(AS_A_RANK, "0.8", ending, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "alive\nhandled\n"), done.stderr
    assert words in done.stderr
    assert (tmp_path / "left_open").read_text() == "flushed"
