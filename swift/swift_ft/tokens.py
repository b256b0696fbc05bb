"""Job tokens: JSON web tokens signed with Ed25519.

Signatures are asymmetric: a server holds public keys only, so neither it nor a thief of its files can create a token.
Claims, besides ``aud`` and ``exp``::

    job    the job's name, or "*": every job
    roles  of `Role`
    gen    highest generation of the job for which the token is valid; absent: any
    sub    subject, for the audit file
    jti    token id of 32 hexadecimal digits, by which a single token is revoked (`Revoked`)

The header's ``kid`` is the name of the key's file (of the target if that is a link). Several keys may be valid at a
time. A key is replaced by adding the next one, minting with it, and removing the old one, which revokes its tokens.
"""

import base64
import contextlib
import grp
import json
import os
import pwd
import stat
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from swift_ft.errors import UsageError
from swift_ft.files import read_regular, write_whole
from swift_ft.text import one_line, unique_keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


# Calls that each role may make. A call that is not in the table is denied.


class Role(StrEnum):
    WRITER = "writer"
    """A rank or a launcher: appends, and calls the coordinator as a member."""
    REPLAYER = "replayer"
    """A rank that replays: reads the log."""
    OPERATOR = "operator"
    """A person: reads everything of a job, trims and drops it, declares a rank dead or a job failed, changes log
    servers."""
    COORDINATOR = "coordinator"
    """The coordinator as a client of log servers: fences, trims, resets."""


LOG = "/swift.log.v1.Log/"
COORDINATOR = "/swift.coordinator.v1.Coordinator/"

_MEMBER = frozenset({Role.WRITER})
_MEMBER_OR_OPERATOR = frozenset({Role.WRITER, Role.OPERATOR})
_READ = frozenset({Role.REPLAYER, Role.OPERATOR})
_SEE = frozenset({Role.WRITER, Role.REPLAYER, Role.OPERATOR})
_COORDINATOR = frozenset({Role.COORDINATOR})

MAY_CALL: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        LOG + "Append": _MEMBER,
        LOG + "Read": _READ,
        LOG + "Digests": _READ,
        LOG + "Inventory": frozenset({Role.REPLAYER, Role.OPERATOR, Role.COORDINATOR}),
        LOG + "Fence": _COORDINATOR,
        LOG + "Trim": frozenset({Role.OPERATOR, Role.COORDINATOR}),
        LOG + "Reset": _COORDINATOR,
        LOG + "Status": frozenset({Role.OPERATOR, Role.COORDINATOR}),
        LOG + "Drop": frozenset({Role.OPERATOR}),
        COORDINATOR + "Join": _MEMBER,
        COORDINATOR + "Watch": _SEE,
        COORDINATOR + "Heartbeat": _MEMBER,
        COORDINATOR + "Report": _MEMBER,
        COORDINATOR + "Ready": _MEMBER,
        COORDINATOR + "Refuse": _MEMBER,
        COORDINATOR + "Differs": _MEMBER,
        COORDINATOR + "Rehearsed": _MEMBER,
        COORDINATOR + "CheckpointDurable": _MEMBER,
        COORDINATOR + "AskCheckpoint": _MEMBER,
        COORDINATOR + "Measure": _MEMBER,
        COORDINATOR + "Share": _MEMBER,
        COORDINATOR + "Meet": _MEMBER,
        COORDINATOR + "Measurements": _SEE,
        COORDINATOR + "MemberExited": _MEMBER_OR_OPERATOR,
        COORDINATOR + "Suspect": _MEMBER,
        COORDINATOR + "Finish": _MEMBER,
        COORDINATOR + "ChangeLogServers": frozenset({Role.OPERATOR}),
        COORDINATOR + "Fail": _MEMBER_OR_OPERATOR,
        COORDINATOR + "Revoke": _MEMBER,
        COORDINATOR + "Vote": _MEMBER,
        COORDINATOR + "Stop": _MEMBER,
        COORDINATOR + "Status": _SEE,
        COORDINATOR + "Jobs": _SEE,
    }
)


# Secret files: created with mode 0600, and refused if others can read them. For a process that is not root's, what
# belongs to root may be readable by its group, as for PostgreSQL: so the kubelet and Debian's ssl-cert give keys to it.

_BYTES_MAX = 1 << 20


def read_file(path: Path, flag: str) -> bytes:
    """Returns the content of a file that need not be secret. Raises UsageError, which names the flag or variable."""
    try:
        with path.open("rb") as file:
            return file.read(_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


def is_exposed(status: os.stat_result) -> bool:
    """Returns whether a secret file may be accessed by more users than its owner (and readers in its group, if that is
    root and this process is not root's)."""
    by_group = status.st_uid == 0 and os.geteuid() != 0
    return bool(stat.S_IMODE(status.st_mode) & (0o037 if by_group else 0o077))


def read_secret(path: Path, flag: str) -> bytes:
    try:
        with path.open("rb") as file:
            if is_exposed(os.fstat(file.fileno())):
                raise UsageError(f"{flag} {path}: users other than its owner can access it: chmod 600 {path}")
            return file.read(_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Owner:
    uid: int
    gid: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Self:
        """Parses USER or USER:GROUP, names or numbers; the default group is the user's. Raises UsageError if there is
        no such user or group, or if this process may not change owners."""
        user, colon, group = text.partition(":")
        try:
            account = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
            gid = account.pw_gid
            if colon:
                gid = (grp.getgrgid(int(group)) if group.isdecimal() else grp.getgrnam(group)).gr_gid
        except (KeyError, OverflowError):
            raise UsageError(f"{flag} {text}: there is no such user or group here") from None
        if os.geteuid() != 0 and (
            account.pw_uid != os.geteuid() or gid not in {os.getegid(), *os.getgroups()}
        ):
            raise UsageError(
                f"{flag} {text}: only root can give files to others; run it as root, or leave it out"
            )
        return cls(account.pw_uid, gid)


def write_file(path: Path, data: bytes, *, secret: bool, owner: Owner | None = None) -> None:
    """Writes a file atomically (`swift_ft.files.write_whole`): mode 0600 if secret, else 0644."""
    write_whole(path, data, 0o600 if secret else 0o644, None if owner is None else (owner.uid, owner.gid))


Signature = tuple[tuple[str, int, int, int], ...]


def signature(paths: "list[Path]") -> Signature:
    """Returns a value that changes whenever one of the files is written, replaced or removed."""
    parts = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        parts.append((str(path), status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(parts)


EVERY_JOB = "*"
AUDIENCE = "swift"
ALGORITHM = "EdDSA"
SUFFIX = ".pem"
TOKEN_BYTES_MAX = 4096
REFRESH_S = 1.0
"""Seconds for which a removed key may still be used."""
_GRANTS_MAX = 4096
_KEY_BYTES_MAX = 1 << 16
_NONSENSE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""Errors that invalid JSON may raise."""
_REVOKED_BYTES_MAX = 16 << 20
SUBJECT_MAX = 128


class NotAuthenticated(Exception):
    """The token is not valid here. The message never contains any part of it."""

    grant: "Grant | None" = None
    """Grant of the token, if it is signed but expired or revoked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Rights of a token's bearer, until `expires_at` on the monotonic clock."""

    job: str
    roles: frozenset[Role]
    generation_max: int | None
    expires_at: float
    subject: str = ""
    token_id: str = ""
    """Not a secret: identifies the token in lists and logs."""

    def covers(self, job: str, generation: int = 0) -> bool:
        if self.job not in (job, EVERY_JOB):
            return False
        return self.generation_max is None or generation <= self.generation_max


@dataclass(frozen=True, kw_only=True, slots=True)
class SigningKey:
    """A private Ed25519 key; `name` is the `kid` of the tokens that it signs."""

    name: str
    private: "Ed25519PrivateKey"

    @classmethod
    def load(cls, path: Path, flag: str) -> "SigningKey":
        """Loads a key. Raises UsageError if it is unreadable, readable by others, or no Ed25519 key."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        data = read_secret(path, flag)
        try:
            key = load_pem_private_key(data, password=None)
        except (ValueError, TypeError):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise UsageError(
                f"{flag} {path}: not an Ed25519 private key: make one with swift-ft token --new-key"
            )
        return cls(name=path.resolve().stem, private=key)

    def mint(
        self,
        job: str,
        roles: Iterable[Role],
        lifetime_s: float,
        *,
        generation_max: int | None = None,
        subject: str = "",
        token_id: str = "",
    ) -> str:
        """Returns a token that expires in `lifetime_s`. ``token_id``: random if empty."""
        import jwt

        claims: dict[str, object] = {
            "aud": AUDIENCE,
            "exp": int(time.time() + lifetime_s),
            "job": job,
            "roles": sorted(role.value for role in roles),
            "jti": token_id or uuid.uuid4().hex,
        }
        if subject:
            claims["sub"] = subject
        if generation_max is not None:
            claims["gen"] = generation_max
        return jwt.encode(claims, self.private, algorithm=ALGORITHM, headers={"kid": self.name})


def new_key(directory: Path) -> tuple[Path, Path]:
    """Creates a key pair in `directory`. Returns the files (signing key, verifying key)."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    name = uuid.uuid4().hex[:12] + SUFFIX
    signing, verifying = directory / "signing" / name, directory / "verifying" / name
    signing.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    signing.parent.chmod(0o700)
    verifying.parent.mkdir(exist_ok=True)
    secret = private.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    public = private.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    write_file(verifying, public, secret=False)  # first: a signing key that is there can be checked
    write_file(signing, secret, secret=True)
    return signing, verifying


def shown(text: str) -> str:
    return one_line(text[:SUBJECT_MAX])


class Revoked:
    """File of revoked tokens. Each line has a token's id (jti), or ``sub:NAME`` for all tokens of a subject; text after
    a # is a comment. Checked for changes every second. Thread-safe.

    The file must exist at the start. If it vanishes or cannot be read later, its last content stays in force.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: Signature = ()
        self._look_at = 0.0
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise UsageError(f"--revoked {path}: {error}: make it, it may be empty") from None

    def names(self, grant: Grant, now: float) -> bool:
        """Returns whether the token, or all tokens of its subject, are revoked."""
        if now >= self._look_at:
            with self._lock:
                self._look_at = now + REFRESH_S
                if signature([self._path]) not in (self._signature, ()):
                    with contextlib.suppress(OSError, ValueError):  # retried a second later
                        self._read()
        names = self._names
        return bool(names) and (
            grant.token_id in names or bool(grant.subject and f"sub:{grant.subject}" in names)
        )

    def _read(self) -> None:
        now = signature([self._path])
        with self._path.open("rb") as file:
            data = file.read(_REVOKED_BYTES_MAX + 1)
        if len(data) > _REVOKED_BYTES_MAX:
            raise ValueError(f"more than {_REVOKED_BYTES_MAX} bytes")
        lines = (line.partition("#")[0].strip() for line in data.decode().splitlines())
        self._names = frozenset(line for line in lines if line)
        self._signature = now


class Authority:
    """Checks tokens against the public keys in a directory, which it checks for changes every second.

    Verified tokens are cached, so that a call costs a dictionary lookup. Thread-safe.
    """

    def __init__(self, directory: Path, revoked: "Revoked | None" = None) -> None:
        self._directory = directory
        self._revoked = revoked
        self._lock = threading.Lock()
        self._keys: Mapping[str, Ed25519PublicKey] = {}
        self._signature: Signature | None = None
        self._look_at = 0.0
        self._grants: dict[str, Grant] = {}
        self._refresh(time.monotonic())
        if not self._keys:
            raise UsageError(
                f"--token-keys {directory}: no public key (*.pem) is there: make one with "
                "swift-ft token --new-key DIR and give DIR/verifying"
            )

    def grant(self, token: str) -> Grant:
        """Returns the token's grant. Raises NotAuthenticated if it is malformed, expired, revoked, or not signed by a
        current key."""
        now = time.monotonic()
        if now >= self._look_at:
            self._refresh(now)
        grants = self._grants  # read before the keys: `_refresh` changes those first
        grant = grants.get(token)
        if grant is None:
            grant = self._verify(token, now)
            with self._lock:
                if len(grants) >= _GRANTS_MAX:
                    grants.clear()
                grants[token] = grant  # if the keys have changed meanwhile, this dictionary is no longer used
        why = ""
        if now >= grant.expires_at:
            why = "the token has expired: put a newer one into its file"
        elif self._revoked is not None and self._revoked.names(grant, now):
            why = "the token was revoked: put another one into its file"
        if why:
            refused = NotAuthenticated(why)
            refused.grant = grant
            raise refused
        return grant

    def _refresh(self, now: float) -> None:
        with self._lock:
            self._look_at = now + REFRESH_S
            paths = sorted(self._directory.glob(f"*{SUFFIX}"))
            current = signature(paths)
            if current == self._signature:
                return
            data = {path.stem: _bytes_of(path) for path in paths}
            self._keys = {name: key for name, pem in data.items() if pem and (key := _public_key(pem))}
            # A file that could not be read is tried again, even if it is unchanged.
            self._signature = None if None in data.values() else current
            self._grants = {}

    def _verify(self, token: str, now: float) -> Grant:
        import jwt

        if len(token) > TOKEN_BYTES_MAX:
            raise NotAuthenticated("the token is too long")
        try:
            name = jwt.get_unverified_header(token).get("kid")
            key = self._keys.get(name) if isinstance(name, str) else None
            if key is None:
                raise NotAuthenticated("the token is not signed by a key that counts here")
            claims = jwt.decode(
                token,
                key,
                algorithms=[ALGORITHM],
                audience=AUDIENCE,
                options={"require": ["exp", "aud", "job", "roles"]},
            )
            _check_said_once(token)
            return _grant_of(claims, now)
        except jwt.ExpiredSignatureError:
            raise NotAuthenticated("the token has expired: put a newer one into its file") from None
        except (jwt.PyJWTError, *_NONSENSE):
            raise NotAuthenticated("the token is not valid") from None


def _check_said_once(token: str) -> None:
    """Raises ValueError for duplicate JSON keys, which other parsers may resolve differently."""
    for part in token.split(".")[:2]:
        json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)), object_pairs_hook=unique_keys)


def _grant_of(claims: Mapping[str, object], now: float) -> Grant:
    """Validates the claims. The token is signed, but its key may sign other things as well."""
    job, roles, generation, expires = (claims.get(name) for name in ("job", "roles", "gen", "exp"))
    if not isinstance(job, str) or not job or not isinstance(roles, list):
        raise ValueError("job or roles")
    if generation is not None and (not isinstance(generation, int) or isinstance(generation, bool)):
        raise ValueError("gen")
    if not isinstance(expires, int | float):
        raise ValueError("exp")
    subject, token_id = claims.get("sub", ""), claims.get("jti", "")
    if not isinstance(subject, str) or not isinstance(token_id, str):
        raise ValueError("sub or jti")
    return Grant(
        subject=shown(subject),
        token_id=shown(token_id),
        job=job,
        roles=frozenset(Role(role) for role in roles),
        generation_max=generation,
        expires_at=now + expires - time.time(),
    )


def claims_of(token: str) -> Grant | None:
    """Returns a token's claims without verifying them; None if it is no token. `expires_at` is on the wall clock."""
    import jwt

    try:
        claims = jwt.decode(token, options={"verify_signature": False})
        return _grant_of(claims, time.time())
    except (jwt.PyJWTError, *_NONSENSE):
        return None


def _bytes_of(path: Path) -> bytes | None:
    try:
        return read_regular(Path(os.path.realpath(path)), _KEY_BYTES_MAX)
    except OSError:
        return None


def _public_key(data: bytes) -> "Ed25519PublicKey | None":
    """Returns the key, or None if it is no Ed25519 public key. A server continues with its other keys."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(data)
    except (ValueError, TypeError):
        return None
    return key if isinstance(key, Ed25519PublicKey) else None
