"""`swift-ft run` in a process that has imported torch already: forked, as its fork server will be.

An import of torch takes seconds of a core, and a launcher and its fork server make one each. Here both are forked
from one process that has it. Everything after that is the launcher's own: its agent, its spares, how ranks start.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

_MESSAGE_MAX = 1 << 20


class _Prepared:
    """Stands for `subprocess.Popen` in `swift_ft.launch.forkserver`: the first one is a process that waits already."""

    line: socket.socket | None = None
    waiting = 0

    def __new__(cls, command: list[str], *, env: dict[str, str], pass_fds: tuple[int], **rest: Any) -> Any:
        if cls.line is None:
            return subprocess.Popen(command, env=env, pass_fds=pass_fds, **rest)
        self = super().__new__(cls)
        self.pid, self.returncode = cls.waiting, None  # type: ignore[attr-defined]
        line, cls.line = cls.line, None
        arguments = command[command.index("swift_ft.launch.forkserver") + 1 :]
        message = json.dumps({"argv": arguments, "env": env}).encode()
        socket.send_fds(line, [message], [pass_fds[0]])
        line.close()
        return self

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])  # type: ignore[attr-defined]
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode


def _wait_to_serve(line: socket.socket) -> None:
    """(child) Becomes the fork server once it is told its arguments."""
    message, fds, _, _ = socket.recv_fds(line, _MESSAGE_MAX, 1)
    if not message:
        os._exit(0)
    line.close()
    order = json.loads(message)
    os.environ.clear()
    os.environ.update(order["env"])
    os.setsid()
    from swift_ft.launch import forkserver

    forkserver.main([str(fds[0]), *order["argv"][1:]])


def main() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _wait_to_serve(theirs)
        return
    theirs.close()
    _Prepared.line, _Prepared.waiting = ours, pid
    from swift_ft.launch import command, forkserver

    forkserver.subprocess = type(  # type: ignore[assignment]
        "subprocess", (), {"Popen": _Prepared, "TimeoutExpired": subprocess.TimeoutExpired}
    )
    code = command.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking an interpreter with torch apart takes a second


if __name__ == "__main__":
    main()
