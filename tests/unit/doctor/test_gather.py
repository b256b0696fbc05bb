"""What the doctor gathers, as far as it is a function of files and text."""

import datetime
import os
import socket
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from swift_ft.tokens import Role, SigningKey, new_key
from swift_ft.tools import doctor
from swift_ft.tools.doctor import filesystem_of
from swift_ft.tools.machine_checks import Token

MOUNTS = """\
24 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 24 0:26 / /run rw shared:5 - tmpfs tmpfs rw
31 24 8:1 / /data rw - xfs /dev/sda1 rw
32 31 0:99 / /data/log rw - nfs4 server:/x rw
33 24 0:50 / /with\\040space rw - btrfs /dev/sdc rw
34 24 0:51 / /data/log rw - tmpfs over rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/x", "ext4"),
        ("/run", "tmpfs"),
        ("/running", "ext4"),
        ("/data/logs", "xfs"),
        ("/data/log/job", "tmpfs"),  # mounted over
        ("/with space/x", "btrfs"),
    ],
)
def test_the_filesystem_is_that_of_the_innermost_and_latest_mount(path: str, kind: str) -> None:
    assert filesystem_of(path, MOUNTS.splitlines()) == kind


NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def key_pem(key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    protection = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection)


def certificate_pem(key: ec.EllipticCurvePrivateKey, begins_days: int, ends_days: int) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + datetime.timedelta(days=begins_days))
        .not_valid_after(NOW + datetime.timedelta(days=ends_days))
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(Encoding.PEM)


def test_certificates_and_keys(tmp_path: Path) -> None:
    key, other = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    files = {
        "cert": certificate_pem(key, -10, 20),
        "chain": certificate_pem(key, -10, 20) + certificate_pem(other, -5, 7),
        "key": key_pem(key),
        "other": key_pem(other),
        "locked": key_pem(key, b"password"),
        "text": b"hello",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o640)

    def found(**named: str) -> dict[str, object]:
        environment = {f"SWIFT_TLS_{what}": str(tmp_path / name) for what, name in named.items()}
        return {
            c.variable.removeprefix("SWIFT_TLS_"): c
            for c in doctor.certificates(environment, NOW.timestamp())
        }

    one = found(CERT="cert", KEY="key", CA="chain")
    cert, own, authority = one["CERT"], one["KEY"], one["CA"]
    assert (cert.expires_in_s, cert.valid_since_s) == (20 * 86400, 10 * 86400)  # type: ignore[attr-defined]
    assert (own.is_key, own.mode, own.matches) == (True, 0o640, True)  # type: ignore[attr-defined]
    assert authority.expires_in_s == 7 * 86400  # type: ignore[attr-defined]  # the first that ends
    assert found(CERT="cert", KEY="other")["KEY"].matches is False  # type: ignore[attr-defined]
    assert found(KEY="other")["KEY"].matches is None  # type: ignore[attr-defined]
    for named, words in (
        ({"KEY": "locked"}, "encrypted"),
        ({"KEY": "text"}, "not a private key"),
        ({"CERT": "text"}, "not a certificate"),
        ({"CERT": "absent"}, "No such file"),
    ):
        (broken,) = found(**named).values()
        assert words in broken.problem  # type: ignore[attr-defined]
    assert found() == {}


def test_a_directory_is_measured_and_nothing_stays_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "APPEND_BYTES", 8 << 20)
    found = doctor.directory(tmp_path)
    assert found.exists
    assert not found.problem
    assert len(found.syncs_s) == doctor.SYNCS
    assert min(found.syncs_s) > 0
    assert found.append_bytes_per_s > 0
    assert found.filesystem
    assert 0 < found.free_bytes <= found.size_bytes
    assert not found.in_use
    assert list(tmp_path.iterdir()) == []


def test_directories_that_are_none(tmp_path: Path) -> None:
    absent = doctor.directory(tmp_path / "a" / "b")
    assert (absent.exists, absent.parent_writable, absent.problem) == (False, True, "")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert doctor.directory(tmp_path / "file").problem == "Not a directory"
    assert doctor.directory(Path("/proc/swift")).parent_writable is (os.geteuid() == 0)
    assert doctor.directory(Path("/proc")).problem


def test_a_port_is_free_until_somebody_listens(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert "in use" in doctor.port(address).problem
    assert doctor.port(address).problem == ""
    assert doctor.port("203.0.113.1:80").problem  # not an address of this machine


def test_a_token_is_looked_into_and_not_shown(tmp_path: Path) -> None:
    key = SigningKey.load(new_key(tmp_path)[0], "--key")
    path = tmp_path / "token"
    now = time.time()

    def found(content: str, mode: int = 0o600) -> Token:
        path.write_text(content)
        path.chmod(mode)
        token = doctor.token({"SWIFT_TOKEN_FILE": str(path)}, now)
        assert token is not None
        assert content not in repr(token)
        return token

    token = found(key.mint("run42", [Role.WRITER, Role.REPLAYER], 600, generation_max=4))
    assert (token.job, token.roles, token.generation, token.problem) == (
        *("run42", ["replayer", "writer"], 4, ""),
    )
    assert 590 < token.expires_in_s <= 601
    expired = found(key.mint("run42", [Role.WRITER], -60))
    assert (expired.problem, expired.generation) == ("", None)
    assert -62 < expired.expires_in_s < -58
    assert "no token of ours" in found("a.b.c").problem
    assert "chmod 600" in found(key.mint("j", [Role.WRITER], 60), 0o640).problem
    assert doctor.token({}, now) is None
    path.unlink()
    gone = doctor.token({"SWIFT_TOKEN_FILE": str(path)}, now)
    assert gone is not None
    assert gone.problem == "No such file or directory"


def test_compiled_kernels_are_found_where_they_are_built() -> None:
    built = Path(doctor.__file__).parents[1].rglob("_kernels_*.so")
    assert doctor.software().kernels == sorted(path.stem.removeprefix("_kernels_") for path in built)
