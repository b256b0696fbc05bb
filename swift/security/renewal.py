"""Token files that are renewed while they are used: long runs with tokens that are short-lived.

(operator)  swift-ft token --key FILE --job NAME --role … --hours 1 --out FILE --renew
(drill)     renewal = Renewal(key_file, file, job, roles, lifetime_s); renewal.turn() as often as it likes

Half of the lifetime is left when a new token is written: so long may this process be away. Whoever uses the file
reads it again at every call, so nobody is restarted. The key may be replaced as well (the file, or where a link
leads to): the next turn mints with the new one.
"""

import os
import time
from collections.abc import Collection
from pathlib import Path

from swift.errors import UsageError
from swift.security.files import Owner, Signature, signature, write_file
from swift.security.roles import Role
from swift.security.tokens import SigningKey

LOOK_EVERY_S = 1.0
_LEFT = 0.5


def due(now_s: float, monotonic_s: float, written_at: tuple[float, float], lifetime_s: float) -> bool:
    """Whether half of the lifetime is over, by either clock: servers go by the wall clock at a token's first call,
    which may be set; the other one stands still while a machine sleeps."""
    spent_s = max(now_s - written_at[0], monotonic_s - written_at[1])
    return spent_s >= (1 - _LEFT) * lifetime_s or now_s < written_at[0] - 1


class Renewal:
    """One token file. Errors of a turn: UsageError (the key), OSError (the file); the next turn tries again."""

    def __init__(
        self,
        key: Path,
        out: Path,
        job: str,
        roles: Collection[Role],
        lifetime_s: float,
        owner: Owner | None = None,
        subject: str = "",
    ) -> None:
        """``owner``: of the file; None: whoever runs this. ``subject``: whom the tokens are for."""
        self._subject = subject
        self.out = out
        self._owner = owner
        self._key_file = key
        self._job = job
        self._roles = frozenset(roles)
        self._lifetime_s = lifetime_s
        self._key: tuple[Signature, SigningKey] | None = None
        self._written_at: tuple[float, float] | None = None

    def turn(self) -> bool:
        """True: a new token is in the file."""
        now_s, monotonic_s = time.time(), time.monotonic()
        key, changed = self._current_key()
        if (
            not changed
            and self._written_at is not None
            and not due(now_s, monotonic_s, self._written_at, self._lifetime_s)
            and self.out.exists()
        ):
            return False
        self._written_at = None  # until it is there
        token = key.mint(self._job, self._roles, self._lifetime_s, subject=self._subject)
        write_file(self.out, f"{token}\n".encode(), secret=True, owner=self._owner)
        self._written_at = (now_s, monotonic_s)
        return True

    def _current_key(self) -> tuple[SigningKey, bool]:
        current = (*signature([self._key_file]), (os.path.realpath(self._key_file), 0, 0, 0))
        if self._key is not None and self._key[0] == current:
            return self._key[1], False
        key = SigningKey.load(self._key_file, "--key")
        self._key = (current, key)
        return key, True


class Complaints:
    """Trouble that lasts is told once."""

    def __init__(self) -> None:
        self._said = ""

    def about(self, error: UsageError | OSError | None) -> str:
        """A line to be said; empty: it was."""
        words = ""
        if isinstance(error, OSError):
            words = f"{error.filename}: {error.strerror}"
        elif error is not None:
            words = str(error)
        if words == self._said:
            return ""
        self._said = words
        return words and f"not renewed, tried again every {LOOK_EVERY_S:g} s: {words}"
