"""A log server that an operator names: what the coordinator tells whom, and what it will not connect to."""

import asyncio
import socket
import ssl
import threading
from pathlib import Path
from typing import cast

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.credentials import ENV_CA, ENV_INSECURE, ENV_TOKEN_FILE, Credentials
from swift_ft.errors import ServiceError, UsageError
from swift_ft.log.placement import parse_server
from swift_ft.tokens import COORDINATOR, MAY_CALL, Role
from swift_ft.tools.credentials import CertificateAuthority, Pair
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.driver import Driver
from swift_ft_services.coordinator.log_calls import LogServers
from swift_ft_services.coordinator.service import Context, Servicer
from tests.unit.coordinator.driver_world import Aborted, Caller, Taker
from tests.unit.security.world import JOB, Keys

NAMED = "10.255.255.1:7301"


class Listener:
    """Takes one TLS connection, and keeps what came through it."""

    def __init__(self, pair: Pair) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pair.certificate, pair.key)
        self._context.set_alpn_protocols(["h2"])
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(10)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.connected = False
        self.heard = b""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._socket, self._socket.accept()[0] as connection:
            self.connected = True
            connection.settimeout(5)
            try:
                with self._context.wrap_socket(connection, server_side=True) as through:
                    self.heard = through.recv(1 << 16)
            except OSError:  # the client has ended the handshake
                pass

    def wait(self) -> bytes:
        self._thread.join(20)
        assert self.connected
        return self.heard


@pytest.fixture
def token(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The coordinator's, in its environment."""
    path = keys.file("coordinator", keys.mint([Role.COORDINATOR], job="*"))
    monkeypatch.setenv(ENV_TOKEN_FILE, str(path))
    for name in (ENV_CA, ENV_INSECURE):
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("who", ["ours", "a stranger's", "ours for another name"])
def test_a_token_goes_to_nobody_whose_certificate_does_not_say_who_he_is(
    ca: CertificateAuthority, tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_CA, str(ca.certificate))
    pair = {
        "ours": lambda: ca.issue("server", "127.0.0.1"),
        "a stranger's": lambda: CertificateAuthority(tmp_path / "stranger").issue("server", "127.0.0.1"),
        "ours for another name": lambda: ca.issue("server", "127.0.0.2", "log.example"),
    }[who]()
    listener = Listener(pair)
    with pytest.raises(ServiceError):
        LogServers(5.0 if who == "ours" else 2.0).fence(listener.address, JOB, 2)
    assert bool(listener.wait()) is (who == "ours")


def asked(**fields: str) -> pb.ChangeLogServersRequest:
    return pb.ChangeLogServersRequest(job=JOB, **fields)


def change(**fields: str) -> list[m.Command]:
    """What the coordinator does about it."""
    taker = Taker()
    refused: list[str] = []
    servicer = Servicer(cast("Driver", taker), refused.append)
    try:
        asyncio.run(servicer.ChangeLogServers(asked(**fields), cast("Context", Caller())))
    except Aborted:
        assert refused == ["invalid"]
        assert taker.commands == []
        raise
    assert refused == []
    return taker.commands


def test_a_token_is_never_sent_in_clear_text_to_where_a_caller_says(
    token: Path, ca: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for insecure in ("", "1"):
        monkeypatch.setenv(ENV_INSECURE, insecure)
        with pytest.raises(Aborted, match=rf"INVALID_ARGUMENT.*{ENV_CA}.*clear text"):
            change(lost="127.0.0.1:1", add=NAMED)
    assert change(add="127.0.0.1:7301") == [asked(add="127.0.0.1:7301")]
    assert change(lost=NAMED) == [asked(lost=NAMED)], "nobody connects to what is given up"
    monkeypatch.delenv(ENV_TOKEN_FILE)
    assert change(add=NAMED) == [asked(add=NAMED)], "there is nothing to tell, and it was allowed"
    monkeypatch.setenv(ENV_INSECURE, "")
    with pytest.raises(Aborted, match=ENV_CA):
        change(add=NAMED)
    monkeypatch.setenv(ENV_TOKEN_FILE, str(token))
    monkeypatch.setenv(ENV_CA, str(ca.certificate))
    assert change(add=NAMED, add_host="a04") == [asked(add=NAMED, add_host="a04")]


@pytest.mark.parametrize(
    "address",
    [
        *("", "h", "h:", ":1", "h:65536", "h:-1", "h:1x", "h:\u0661", "h 1:2", "h\n:1"),
        *(
            "unix:7301",
            "UNIX:7301",
            "unix:/run/x:1",
            "dns:7301",
            "dns://8.8.8.8/h:1",
            "ipv4:10.0.0.1:1",
            "xds:///h:1",
        ),
        *("127.0.0.1,10.0.0.1:1", "[::1],[::2]:1", "http://h:1", "user@h:1", "h/..:1", "-h:1", "h.:1"),
        "h" * 300 + ":1",
    ],
)
def test_a_named_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(UsageError, match="is not HOST:PORT"):
        Credentials(insecure=True).check_named(address)


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1", ":7300", "h:", "h:99999", "h:x", "http://127.0.0.1:7702", "unix:7"]
)
def test_an_address_of_ones_own_is_a_host_and_a_port_as_well(address: str) -> None:
    """It was said to be off loopback, and to want TLS."""
    with pytest.raises(UsageError, match="is not HOST:PORT"):
        Credentials().check(address)
    with pytest.raises(UsageError, match="write HOST:PORT"):
        parse_server(address, "--log-servers")


@pytest.mark.parametrize(
    "address", ["h:1", "a01.example.org:7301", "10.0.0.5:7301", "[fd00::5]:7301", "log_1:1"]
)
def test_hosts_have_names_and_numbers(address: str) -> None:
    Credentials(insecure=True).check_named(address)


def test_only_an_operator_names_one() -> None:
    assert MAY_CALL[COORDINATOR + "ChangeLogServers"] == {Role.OPERATOR}
