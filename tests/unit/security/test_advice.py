"""A client without TLS at a server with it, the other way round, and one that believes another authority."""

import select
import socket
import struct
from pathlib import Path

import pytest

from swift_ft import credentials
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.credentials import ENV_CA, advice
from swift_ft.errors import ServiceError
from swift_ft.tools import doctor, inspect, status
from swift_ft.tools.credentials import CertificateAuthority
from tests.health_probe import check_service
from tests.unit.security.world import JOB, Guarded

WANTS = "it wants TLS: name the CA of its certificate in SWIFT_TLS_CA"


def test_a_plain_client_is_told_that_the_server_wants_tls(
    ca: CertificateAuthority, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_CA, raising=False)
    monkeypatch.setattr("swift_ft.tools.status.PATIENCE_S", 0.5)
    with Guarded(None, ca=ca) as server:
        assert status.main(["--coordinator", server.address, "--job", JOB]) == 3
        at_once, at_last = capsys.readouterr().err.splitlines()
        assert WANTS in at_once
        assert WANTS in at_last
        assert inspect.main(["--server", server.address, "--timeout-s", "0.5"]) == 3
        assert WANTS in capsys.readouterr().err
        (found,) = doctor.peer("log server", server.address, 0.5)
        assert WANTS in found.found
        with pytest.raises(ServiceError, match=WANTS):
            check_service(server.address, timeout_s=0.5)


def test_with_tls_at_a_server_without_it(ca: CertificateAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_CA, str(ca.certificate))
    with (
        Guarded(None) as server,
        CoordinatorClient(server.address, JOB, patience_s=0.5) as client,
        pytest.raises(ServiceError, match="it does not speak TLS: start it with --tls-cert"),
    ):
        client.status()


def test_a_server_of_another_authority(
    ca: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = CertificateAuthority(tmp_path / "stranger")
    monkeypatch.setenv(ENV_CA, str(stranger.certificate))
    with (
        Guarded(None, ca=ca) as server,
        CoordinatorClient(server.address, JOB, patience_s=0.5) as client,
        pytest.raises(ServiceError, match=f"is not signed by the CA in {ENV_CA}, {stranger.certificate}"),
    ):
        client.status()


def test_nobody_there_is_nobodys_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_CA, raising=False)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert advice(address, "Socket closed") == ""
        assert advice("nonsense", "Socket closed") == ""


def test_a_connection_that_has_just_been_reset_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket left to the garbage collector is a ResourceWarning, an error here."""
    monkeypatch.delenv(ENV_CA, raising=False)
    connect = credentials._connected
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reset(address: str) -> socket.socket:
            connection = connect(address)
            accepted, _ = server.accept()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()
            poll = select.poll()
            poll.register(connection)
            assert any(event & select.POLLHUP for _, event in poll.poll(1000))
            return connection

        monkeypatch.setattr(credentials, "_connected", reset)
        assert advice(f"127.0.0.1:{server.getsockname()[1]}", "Socket closed") == ""
