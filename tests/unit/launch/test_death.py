"""The exit code of a process that is ending, by what /proc says of it."""

import os
import subprocess

from swift_ft.launch.death import exit_code_of


def test_only_a_process_that_ends_has_an_exit_code() -> None:
    assert exit_code_of(os.getpid()) is None
    for command, code in (("exit 3", 3), ("kill -9 $$", -9)):
        process = subprocess.Popen(["sh", "-c", command])
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert exit_code_of(process.pid) == code
        assert process.wait() == code
    assert exit_code_of(process.pid) is None, "it is gone"
