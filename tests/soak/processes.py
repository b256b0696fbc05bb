"""The processes of a soak: the log server, which is killed and started again in one place, and ranks that talk JSON.
And the program around a run that is judged."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import check_file, write_json
from swift_ft.errors import ServiceError, SwiftError
from swift_ft.lab.bench import output

SERVER = (sys.executable, "-P", "-m", "swift_ft_services.logserver")
START_TIMEOUT_S = 60.0

EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}

Message = tuple["Rank", dict[str, Any]]


def judge_in_place(arguments: Namespace, judged: Callable[[Path], dict[str, Any]]) -> int:
    """Runs what is judged in --directory, prints the verdict, and writes it to --json. Returns the exit code."""
    check_file("--json", arguments.json)
    on, began = output.machine(), time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its processes end with it
    try:
        with output.place(arguments.directory) as directory:
            result = {"machine": on, **judged(Path(directory))}
    except KeyboardInterrupt:
        print(f"swift: stopped after {time.monotonic() - began:.0f} s; nothing is judged", file=sys.stderr)
        return EXIT_CODES["INCONCLUSIVE"]
    print(json.dumps(result, indent=1))
    write_json(arguments.json, result)
    return EXIT_CODES[result["verdict"]]


def end(main: Callable[[], int]) -> None:
    """Ends this process with its exit code; an error of ours is one line."""
    try:
        sys.exit(main())
    except SwiftError as error:
        print(f"swift: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def rss_bytes(pid: int) -> int | None:
    """None: it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None  # a zombie has none


class Rank:
    """One writer or reader. What it says goes into `inbox`, the end of it as an empty message."""

    def __init__(self, name: str, inbox: "queue.SimpleQueue[Message]", role: str, *words: object) -> None:
        self.name = name
        self.killed = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.soak.ranks", role, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._inbox = inbox
        self._thread = threading.Thread(target=self._listen, name=f"from-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # else it was killed while it spoke
                self._inbox.put((self, json.loads(line)))
        self._inbox.put((self, {}))

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its end is in the inbox, or will be

    def kill(self) -> None:
        self.killed = True
        self._process.kill()

    def close(self) -> int:
        """Kills the process and waits for it. Returns its exit code."""
        self._process.kill()
        code = self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        return code


class Server:
    """A log server on one directory and one address."""

    def __init__(self, directory: Path, command: Sequence[str] = SERVER) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._said = directory / "server.stderr"
        self._address_file = directory / "address"
        self._command = [*command, "--directory", str(directory / "log"), "--listen", self.address]
        self._command += ["--address-file", str(self._address_file)]
        self._process: subprocess.Popen[bytes] | None = None
        self._begun_at = 0.0
        self.up = False

    def begin(self) -> None:
        """Starts it; `poll` tells when it serves."""
        self._address_file.unlink(missing_ok=True)
        with self._said.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=output)
        self._begun_at = time.monotonic()

    def poll(self) -> bool:
        """Whether it serves. ServiceError: it ended by itself, or does not come."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise ServiceError(f"the log server ended with exit code {code}: {self.last_words()}")
        self.up = self.up or self._address_file.exists()
        if not self.up and time.monotonic() > self._begun_at + START_TIMEOUT_S:
            raise ServiceError(f"the log server does not serve after {START_TIMEOUT_S:.0f} s")
        return self.up

    def wait(self) -> None:
        while not self.poll():
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self.up = False
        self._process.kill()
        self._process.wait()

    def stop(self, timeout_s: float) -> int:
        """SIGTERM; gives the exit code, that of SIGKILL if it does not end."""
        assert self._process is not None
        self.up = False
        self._process.terminate()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def last_words(self) -> str:
        lines = self._said.read_text(errors="replace").strip().splitlines() if self._said.exists() else []
        return lines[-1] if lines else "it said nothing"
