"""The client's side: which files hold its credentials, and channels that use them.

Every connection to a log server or a coordinator is made here. Without credentials it is a plain one, which
is only made to loopback, or if SWIFT_INSECURE=1 says that the network is trusted.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from swift import events
from swift.arguments import is_loopback
from swift.errors import UsageError
from swift.security.files import Signature, read_file, read_secret, signature

ENV_TOKEN_FILE = "SWIFT_TOKEN_FILE"
ENV_CA = "SWIFT_TLS_CA"
ENV_CERTIFICATE = "SWIFT_TLS_CERT"
ENV_KEY = "SWIFT_TLS_KEY"
ENV_INSECURE = "SWIFT_INSECURE"
AUTHORIZATION = "authorization"
BEARER = "Bearer "
_RELOAD_S = 1.0
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]{2,45}\]")
_PORT = re.compile("[0-9]{1,5}")
_SCHEMES = {"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p"}
"""gRPC takes "unix:7301" for a socket's path."""

Options = Sequence[tuple[str, Any]]


class _Details(NamedTuple):
    """What a multi-callable was made with."""

    kind: str
    method: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """Files that say who this process is, and whom it believes."""

    token_file: Path | None = None
    ca: Path | None = None
    """Signs the servers' certificates; given: connections are TLS."""
    certificate: Path | None = None
    """Of this client, for servers that ask for one."""
    key: Path | None = None
    insecure: bool = False
    """Plain connections off loopback are allowed."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UsageError(f"{ENV_CERTIFICATE} and {ENV_KEY}: give both, or neither")
        if self.certificate is not None and self.ca is None:
            raise UsageError(f"{ENV_CERTIFICATE}: a client's certificate needs {ENV_CA} too; set both")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Credentials":
        """What the SWIFT_ variables name; files are not read yet."""

        def path(name: str) -> Path | None:
            return Path(environment[name]) if environment.get(name) else None

        return cls(
            token_file=path(ENV_TOKEN_FILE),
            ca=path(ENV_CA),
            certificate=path(ENV_CERTIFICATE),
            key=path(ENV_KEY),
            insecure=environment.get(ENV_INSECURE) == "1",
        )

    def check(self, address: str) -> None:
        """UsageError, in one line: a file is missing or badly kept, or the connection would be in clear text."""
        host, _, port = address.rpartition(":")
        if not host or not _is_port(port):
            raise UsageError(f"{address!r} is not HOST:PORT, such as 10.0.0.5:7301")
        if self.ca is None and not self.insecure and not is_loopback(host):
            raise UsageError(
                f"{address} is not loopback and {ENV_CA} is not set: name the CA of its certificate there, "
                f"or say {ENV_INSECURE}=1 if the network is trusted"
            )
        self.tls()
        if self.token_file is not None:
            read_token(self.token_file)

    def check_named(self, address: str) -> None:
        """As `check`, of an address that somebody else has named: he must not get this process's token in clear text,
        wherever that is allowed otherwise, nor make it connect to anything but a host's port."""
        host, _, port = address.rpartition(":")
        if not _is_port(port) or not _HOST.fullmatch(host) or host.lower() in _SCHEMES:
            raise UsageError(f"{address!r} is not HOST:PORT, such as 10.0.0.5:7301")
        if self.token_file is not None and self.ca is None and not is_loopback(host):
            raise UsageError(
                f"{address} is not loopback, and without {ENV_CA} it would be given the token in clear text: "
                f"name the CA of its certificate there"
            )
        self.check(address)

    def tls(self) -> grpc.ChannelCredentials | None:
        if self.ca is None:
            return None
        return grpc.ssl_channel_credentials(
            read_file(self.ca, ENV_CA),
            None if self.key is None else read_secret(self.key, ENV_KEY),
            None if self.certificate is None else read_file(self.certificate, ENV_CERTIFICATE),
        )

    def tls_files(self) -> list[Path]:
        return [path for path in (self.ca, self.certificate, self.key) if path is not None]


def _is_port(text: str) -> bool:
    return _PORT.fullmatch(text) is not None and int(text) < 65536


def read_token(path: Path) -> str:
    try:
        token = read_secret(path, ENV_TOKEN_FILE).decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise UsageError(f"{ENV_TOKEN_FILE} {path}: holds no token: make one with swift-ft token")
    return token


def open_channel(address: str, options: Options, credentials: Credentials | None = None) -> grpc.Channel:
    """Connects in the background, and again whenever the connection is lost. UsageError: see `check`."""
    credentials = credentials or Credentials.from_environment()
    credentials.check(address)
    if credentials.token_file is None and credentials.ca is None:
        return grpc.insecure_channel(address, options=options)
    return _CredentialedChannel(address, options, credentials)


class _CredentialedChannel(grpc.Channel):
    """Gives each call the token that is in its file at that moment, and connects anew with changed certificates.

    Calls under way stay on the connection they were made on; it is closed when the last of them has ended.
    """

    def __init__(self, address: str, options: Options, credentials: Credentials) -> None:
        self._address = address
        self._options = options
        self._credentials = credentials
        self._lock = threading.Lock()
        self._token: tuple[Signature, str] = ((), "")
        self._complained: Signature = ()
        self._files: Signature = signature(credentials.tls_files())
        self._look_at = time.monotonic() + _RELOAD_S
        self._channel = self._connect()
        self._number = 0
        self._closed = False

    def _connect(self) -> grpc.Channel:
        tls = self._credentials.tls()
        if tls is None:
            return grpc.insecure_channel(self._address, options=self._options)
        return grpc.secure_channel(self._address, tls, options=self._options)

    def current(self) -> tuple[int, grpc.Channel]:
        """The channel of now, and its number."""
        now = time.monotonic()
        with self._lock:
            if now >= self._look_at and not self._closed:
                self._look_at = now + _RELOAD_S
                files = signature(self._credentials.tls_files())
                if files != self._files:
                    try:
                        self._channel = self._connect()
                        self._number += 1
                        self._files = files
                    except UsageError:  # half-written: looked at again in a second
                        pass
            return self._number, self._channel

    def metadata(self) -> tuple[tuple[str, str], ...]:
        path = self._credentials.token_file
        if path is None:
            return ()
        current = signature([path])
        if current != self._token[0]:
            try:
                self._token = (current, read_token(path))
            except UsageError as error:  # the one we have may be good for a while
                if current and current != self._complained:  # not only being replaced
                    self._complained = current
                    events.emit("token_not_reloaded", reason=str(error))
        return ((AUTHORIZATION, BEARER + self._token[1]),)

    def _callable(
        self, kind: str, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        return _Callable(self, _Details(kind, method, arguments, keywords))

    def unary_unary(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._callable("unary_unary", method, arguments, keywords)

    def unary_stream(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._callable("unary_stream", method, arguments, keywords)

    def stream_unary(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._callable("stream_unary", method, arguments, keywords)

    def stream_stream(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._callable("stream_stream", method, arguments, keywords)

    def subscribe(self, callback: Callable[..., None], try_to_connect: bool | None = False) -> None:
        self.current()[1].subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[..., None]) -> None:
        self.current()[1].unsubscribe(callback)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._channel.close()

    def __enter__(self) -> "_CredentialedChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Callable:
    """A multi-callable of whatever channel is the current one."""

    def __init__(self, channel: _CredentialedChannel, details: _Details) -> None:
        self._channel = channel
        self._details = details
        self._made: tuple[int, Any] = (-1, None)

    def _now(self) -> Any:
        number, channel = self._channel.current()
        if self._made[0] != number:
            made = getattr(channel, self._details.kind)
            self._made = (
                number,
                made(self._details.method, *self._details.arguments, **self._details.keywords),
            )
        return self._made[1]

    def _with_token(self, keywords: dict[str, Any]) -> dict[str, Any]:
        return {**keywords, "metadata": (*(keywords.get("metadata") or ()), *self._channel.metadata())}

    def __call__(self, request: Any, **keywords: Any) -> Any:
        return self._now()(request, **self._with_token(keywords))

    def with_call(self, request: Any, **keywords: Any) -> Any:
        return self._now().with_call(request, **self._with_token(keywords))

    def future(self, request: Any, **keywords: Any) -> Any:
        return self._now().future(request, **self._with_token(keywords))
