"""TLS: who is believed, what is refused before a byte is sent, and certificates that change while it runs."""

from pathlib import Path

import grpc
import pytest

from swift_ft import credentials as channels
from swift_ft import events
from swift_ft._pb import log_pb2
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.credentials import (
    ENV_CA,
    ENV_CERTIFICATE,
    ENV_INSECURE,
    ENV_KEY,
    ENV_TOKEN_FILE,
    Credentials,
    open_channel,
)
from swift_ft.errors import ServiceError, UsageError
from swift_ft.log import admin
from swift_ft.log.protocol import method
from swift_ft.tokens import Role, write_file
from swift_ft.tools.credentials import CertificateAuthority
from swift_ft_services.program import Protection
from tests.health_probe import check_service
from tests.patience import eventually
from tests.unit.security.world import JOB, RANK, Guarded, Keys, touched


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENV_CA, ENV_CERTIFICATE, ENV_KEY, ENV_TOKEN_FILE, ENV_INSECURE):
        monkeypatch.delenv(name, raising=False)


def test_over_tls_with_a_token_from_the_environment(
    keys: Keys, ca: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Guarded(keys, ca=ca) as server:
        monkeypatch.setenv(ENV_CA, str(ca.certificate))
        monkeypatch.setenv(ENV_TOKEN_FILE, str(keys.file("c", keys.mint([Role.COORDINATOR]))))
        admin.fence(server.address, JOB, 2, 10.0)
        health = check_service(server.address)
        assert (health.tls, health.mutual_tls, health.tokens, health.insecure) == (True, False, True, False)


def test_a_plain_client_and_another_authoritys_are_not_heard(
    ca: CertificateAuthority, tmp_path: Path
) -> None:
    stranger = CertificateAuthority(tmp_path / "stranger")
    with Guarded(None, ca=ca) as server:
        for credentials in (Credentials(), Credentials(ca=stranger.certificate)):
            with pytest.raises(ServiceError, match="does not answer"):
                check_service(server.address, timeout_s=2.0, credentials=credentials)
        assert check_service(server.address, credentials=Credentials(ca=ca.certificate)).tls


def test_a_server_under_another_name_is_not_believed(ca: CertificateAuthority) -> None:
    with Guarded(None, ca=ca) as server:
        port = server.address.rpartition(":")[2]
        with pytest.raises(ServiceError):
            check_service(f"127.0.0.2:{port}", timeout_s=2.0, credentials=Credentials(ca=ca.certificate))


def test_mutual_tls_hears_nobody_without_a_certificate(ca: CertificateAuthority) -> None:
    client = ca.issue("client")
    with Guarded(None, ca=ca, mutual=True) as server:
        with pytest.raises(ServiceError):
            check_service(server.address, timeout_s=2.0, credentials=Credentials(ca=ca.certificate))
        known = Credentials(ca=ca.certificate, certificate=client.certificate, key=client.key)
        assert check_service(server.address, credentials=known).mutual_tls


def test_a_servers_new_certificate_is_used_at_the_next_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is of another authority: who trusts only that one gets in after the change, not before."""
    monkeypatch.setenv("SWIFT_EVENTS", str(tmp_path))
    events.configure("test")
    old, new = CertificateAuthority(tmp_path / "old"), CertificateAuthority(tmp_path / "new")
    trusts_old, trusts_new = Credentials(ca=old.certificate), Credentials(ca=new.certificate)
    with Guarded(None, ca=old) as server:
        assert check_service(server.address, credentials=trusts_old).tls
        with pytest.raises(ServiceError):
            check_service(server.address, timeout_s=2.0, credentials=trusts_new)
        pair = new.issue("server", "127.0.0.1")
        of = server.protection
        assert of.certificate is not None
        assert of.key is not None
        touched(of.certificate, pair.certificate.read_bytes())  # half of it: the old pair stays
        assert check_service(server.address, credentials=trusts_old).tls
        touched(of.key, pair.key.read_bytes())
        assert check_service(server.address, credentials=trusts_new).tls
        with pytest.raises(ServiceError):
            check_service(server.address, timeout_s=2.0, credentials=trusts_old)
    said = [event["event"] for event in events.read(tmp_path)]
    assert said.count("certificate_not_reloaded") == 1
    assert said.count("certificate_reloaded") == 1


def test_a_client_connects_anew_with_a_new_certificate_and_calls_under_way_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_RELOAD_S", 0.0)
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    request = log_pb2.ReadRequest(job=JOB, stream="s0.F", follow=True)
    old, new = CertificateAuthority(tmp_path / "old"), CertificateAuthority(tmp_path / "new")
    trusted = tmp_path / "trusted.pem"
    write_file(trusted, old.certificate.read_bytes(), secret=False)
    with Guarded(None, ca=old) as before, Guarded(None, ca=new) as after:
        with open_channel(before.address, (), Credentials(ca=trusted)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            before.engine.administration.fence(JOB, 1)
            job = before.engine.state.core.known(JOB)
            reading = channel.unary_stream(method("Read"))(request.SerializeToString(), timeout=20)
            eventually(lambda: job.readers, "the call to begin")
            touched(trusted, new.certificate.read_bytes())
            # The connection that stands is not asked again; a new one is made, and that one is refused.
            with pytest.raises(grpc.RpcError):
                stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
            assert reading.is_active()
            assert job.readers
            reading.cancel()
        assert check_service(after.address, credentials=Credentials(ca=trusted)).tls


@pytest.mark.parametrize("address", ["10.0.0.1:1", "host:1", "0.0.0.0:1", "[::]:1", "127.0.0.1.evil.org:1"])
def test_clear_text_off_loopback_must_be_said(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (lambda: open_channel(address, ()), lambda: CoordinatorClient(address, JOB)):
        with pytest.raises(UsageError, match=ENV_CA) as caught:
            make()
        assert "\n" not in str(caught.value)
    monkeypatch.setenv(ENV_INSECURE, "1")
    open_channel(address, ()).close()


def test_credentials_that_cannot_be_used_are_refused_at_the_start(
    keys: Keys, ca: CertificateAuthority, tmp_path: Path
) -> None:
    client = ca.issue("client")
    token = keys.file("t", keys.mint(RANK))
    empty = keys.file("empty", " \n")

    def use(**files: Path) -> None:
        open_channel("127.0.0.1:1", (), Credentials(**files)).close()

    use(token_file=token, ca=ca.certificate, certificate=client.certificate, key=client.key)
    for message, files in (
        ("No such file", {"token_file": tmp_path / "none"}),
        ("holds no token", {"token_file": empty}),
        ("No such file", {"ca": tmp_path / "none"}),
        ("give both", {"ca": ca.certificate, "key": client.key}),
        ("needs SWIFT_TLS_CA too", {"certificate": client.certificate, "key": client.key}),
    ):
        with pytest.raises(UsageError, match=message):
            use(**files)
    for secret in (token, client.key):
        secret.chmod(0o644)
        with pytest.raises(UsageError, match="chmod 600"):
            use(token_file=token, ca=ca.certificate, certificate=client.certificate, key=client.key)
        secret.chmod(0o600)


def protection(listen: str, **other: object) -> Protection:
    return Protection(listen=listen, **other)  # type: ignore[arg-type]


def test_a_server_off_loopback_wants_both_or_the_word(keys: Keys, ca: CertificateAuthority) -> None:
    pair = ca.issue("server", "127.0.0.1")
    tls = {"certificate": pair.certificate, "key": pair.key}
    for missing, given in (
        ("--tls-cert and --tls-key and --token-keys", {}),
        ("--token-keys", tls),
        ("--tls-cert and --tls-key", {"token_keys": keys.verifying}),
    ):
        with pytest.raises(UsageError, match=f"give {missing}, or --insecure"):
            protection("0.0.0.0:0", **given)
        said = protection("0.0.0.0:0", insecure_allowed=True, **given)
        assert said.fields()["insecure"]
        assert "insecure" in said.shown.split(",")
        assert not protection("127.0.0.1:0", insecure_allowed=True, **given).insecure
    assert not protection("0.0.0.0:0", token_keys=keys.verifying, **tls).insecure


def test_certificates_that_cannot_be_used_are_refused_at_the_start(
    ca: CertificateAuthority, tmp_path: Path
) -> None:
    pair, other = ca.issue("server", "127.0.0.1"), ca.issue("other")
    nothing = tmp_path / "nothing.pem"
    write_file(nothing, b"nothing", secret=True)
    for message, certificate, key in (
        ("not the key of", pair.certificate, other.key),
        ("not a certificate", nothing, pair.key),
        ("not a private key", pair.certificate, nothing),
        ("No such file", tmp_path / "none", pair.key),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            protection("127.0.0.1:0", certificate=certificate, key=key).credentials()
        assert "\n" not in str(caught.value)
    pair.key.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        protection("127.0.0.1:0", certificate=pair.certificate, key=pair.key).credentials()
