"""Who changed something, or was refused: one JSON object a line, appended to a file that only its owner reads.

What is said is what the gate knows when a call comes: `who` (the token's subject and id; empty without tokens), from
where, which call of which job, and whether it was let in. What came of it is in the service's own log.

``FILE`` grows to half of the bound and then becomes ``FILE.1``, in the place of the one before. A line is one write, so
a kill tears no line but the last. A trail that cannot be written stops no call, and is told once (event
`audit_failed`).
"""

import errno
import json
import os
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from services.security.rates import Rates
from swift import events
from swift.errors import UsageError
from swift.log.regular import open_regular

AUDITED = frozenset(
    {
        *("Fence", "Trim", "Reset", "Drop"),
        *("Fail", "Stop", "MemberExited", "ChangeLogServers", "ChangeGroups"),
    }
)
"""Calls that change or end what others have. Denials of every call are audited as well."""
BYTES_MAX = 128 << 20
_DENIALS_PER_S = 50.0
_FIELD_MAX = 200


class Audit:
    """One file. Thread-safe."""

    def __init__(self, path: Path, service: str, bytes_max: int = BYTES_MAX) -> None:
        """UsageError: it cannot be written."""
        self._path = path
        self._service = service
        self._half = bytes_max // 2
        self._lock = threading.Lock()
        self._denials = Rates(_DENIALS_PER_S)
        self._unsaid = 0
        self._failed = False
        try:
            self._fd = self._open()
        except OSError as error:
            raise UsageError(f"--audit {path}: {error.strerror}: name a file that can be written") from None

    def _open(self) -> int:
        fd = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.fchmod(fd, 0o600)
        return fd

    def allowed(self, call: str, *, job: str, peer: str, subject: str, token: str) -> None:
        if call.rpartition("/")[2] in AUDITED:
            self._write(call, "allowed", job=job, peer=peer, subject=subject, token=token)

    def denied(self, call: str, *, job: str, peer: str, subject: str, token: str, reason: str) -> None:
        """So many a second: a flood of refusals is not to push everything else out. The rest is counted."""
        if self._denials.takes("", time.monotonic()):
            others, self._unsaid = self._unsaid, 0
            more = {"others": others} if others else {}
            self._write(
                call, "denied", job=job, peer=peer, subject=subject, token=token, reason=reason, **more
            )
        else:
            self._unsaid += 1

    def _write(self, call: str, outcome: str, **fields: object) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "service": self._service,
            "call": call.rpartition("/")[2],
            "outcome": outcome,
            **{
                name: value[:_FIELD_MAX] if isinstance(value, str) else value
                for name, value in fields.items()
            },
        }
        data = json.dumps(line).encode() + b"\n"
        with self._lock:
            try:
                if os.fstat(self._fd).st_size + len(data) > self._half or not self._is_there():
                    self._turn()
                self._append(data)
                self._failed = False
                return
            except OSError as error:
                reason = error.strerror or str(error)
            failed_before, self._failed = self._failed, True
        if not failed_before:
            events.emit("audit_failed", path=str(self._path), reason=reason)

    def _append(self, data: bytes) -> None:
        """All of the line, or none. OSError."""
        written = os.write(self._fd, data)
        if written < len(data):  # the space was out in the middle of it
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _is_there(self) -> bool:
        try:
            there, ours = os.stat(self._path, follow_symlinks=False), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _turn(self) -> None:
        """Another file: this one is full, or was taken away by who keeps such files."""
        if self._is_there():
            os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
        fd = self._open()
        with suppress(OSError):
            os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)
