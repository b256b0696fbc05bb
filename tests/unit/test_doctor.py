"""What the doctor finds in files and text, and what it says of that on both sides of each threshold."""

import datetime
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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

from swift_ft.credentials import SECURITY_KEY
from swift_ft.log.protocol import VERSION_KEY
from swift_ft.tokens import Role, SigningKey, new_key
from swift_ft.tools import doctor
from swift_ft.tools.doctor import GIB, Finding, Status, filesystem_of, lines

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
        "long": certificate_pem(key, -10, 90),
        "early": certificate_pem(key, 1, 90),
        "ended": certificate_pem(key, -10, -1),
        "chain": certificate_pem(key, -10, 20) + certificate_pem(other, -5, 7),
        "key": key_pem(key),
        "other": key_pem(other),
        "locked": key_pem(key, b"password"),
        "text": b"hello",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o600)

    def found(**named: str) -> dict[str, Finding]:
        environment = {f"SWIFT_TLS_{what}": str(tmp_path / name) for what, name in named.items()}
        return {
            finding.check.removeprefix("SWIFT_TLS_"): finding
            for finding in doctor.certificates(environment, NOW.timestamp())
        }

    good = found(CERT="long", KEY="key", CA="chain")
    assert good["CERT"] == Finding("SWIFT_TLS_CERT", Status.OK, f"{tmp_path / 'long'}: 90 days left")
    assert good["KEY"] == Finding("SWIFT_TLS_KEY", Status.OK, f"{tmp_path / 'key'}: can be used")
    assert good["CA"] == Finding(
        "SWIFT_TLS_CA", Status.WARN, f"{tmp_path / 'chain'}: 7 days left", "renew it"
    )
    assert found(CERT="long", KEY="other")["KEY"].advice == "name the pair"
    assert found(KEY="other")["KEY"].status == "ok"
    (tmp_path / "key").chmod(0o644)
    for named, words in (
        ({"CERT": "early"}, "not valid yet"),
        ({"CERT": "ended"}, "expired"),
        ({"KEY": "key"}, "users other than its owner can access it"),
        ({"KEY": "locked"}, "encrypted"),
        ({"KEY": "text"}, "Unable to load PEM"),
        ({"CERT": "text"}, "Unable to load PEM"),
        ({"CERT": "absent"}, "No such file"),
    ):
        (broken,) = found(**named).values()
        assert broken.status == "fail"
        assert words.lower() in broken.found.lower()
    assert found() == {}


def test_a_directory_is_measured_and_nothing_stays_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "APPEND_BYTES", 8 << 20)
    found = {finding.check: finding.found for finding in doctor.directory(tmp_path)}
    assert found["directory"] == str(tmp_path)
    assert found.keys() == {
        *("directory", "filesystem", "disk space", "sync latency", "append speed"),
    }
    assert found["sync latency"].endswith(f" of {doctor.SYNCS}")
    assert list(tmp_path.iterdir()) == []


def test_directories_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "APPEND_BYTES", 8 << 20)

    def found(path: Path) -> Finding:
        return next(finding for finding in doctor.directory(path) if finding.check == "directory")

    assert found(tmp_path / "a" / "b").found == f"{tmp_path / 'a' / 'b'} will be made"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert found(tmp_path / "file").found == f"{tmp_path / 'file'}: Not a directory"
    assert found(Path("/proc/swift")).status == "fail"


def test_a_token_is_looked_into_and_not_shown(tmp_path: Path) -> None:
    key = SigningKey.load(new_key(tmp_path)[0], "--key")
    path = tmp_path / "token"
    now = time.time()

    def found(content: str, mode: int = 0o600) -> Finding:
        path.write_text(content)
        path.chmod(mode)
        (finding,) = doctor.token({"SWIFT_TOKEN_FILE": str(path)}, now)
        assert content not in repr(finding)
        return finding

    for lifetime_s, bound, words, status in (
        (1800.0, None, "30 min left", "ok"),
        (600.0, None, "10 min left", "warn"),
        (-60.0, None, "expired", "fail"),
        (1800.0, 4, "30 min left, to generation 4", "warn"),
    ):
        roles = [Role.WRITER, Role.REPLAYER]
        token = found(key.mint("run42", roles, lifetime_s, generation_max=bound))
        assert token.found == f"{path}: job run42, replayer, writer: {words}"
        assert token.status == status
    assert "no token of ours" in found("a.b.c").found
    assert "chmod 600" in found(key.mint("j", [Role.WRITER], 60), 0o644).found
    assert list(doctor.token({}, now)) == []
    path.unlink()
    (gone,) = doctor.token({"SWIFT_TOKEN_FILE": str(path)}, now)
    assert gone.found == f"{path}: No such file or directory"
    assert (gone.status, gone.advice) == ("fail", "make one with swift-ft token")


def test_compiled_kernels_are_found_where_they_are_built() -> None:
    built = Path(doctor.__file__).parents[1].rglob("_kernels_*.so")
    (found,) = (finding for finding in doctor.machine() if finding.check == "compiled kernels")
    kernels = sorted(path.stem.removeprefix("_kernels_") for path in built)
    assert found.found == (", ".join(kernels) or "not built")


def disk(syncs_s: list[float], append_bytes_per_s: float = 1e9) -> Iterable[Finding]:
    return doctor.disk(syncs_s, append_bytes_per_s)


def peer(
    *, serving: bool = True, trip_s: float = 0.002, offset_s: float | None = 0.1, **about: str
) -> Iterable[Finding]:
    metadata = {VERSION_KEY: doctor.metadata.version("swift-ft"), **about}
    return doctor.answer("log server h:1", serving, [trip_s], metadata, offset_s)


CASES: list[tuple[Iterable[Finding], str, str, str]] = [
    ([doctor.open_files(1023)], "open files", "fail", "LimitNOFILE"),
    ([doctor.open_files(1024)], "open files", "warn", "LimitNOFILE"),
    ([doctor.open_files(8192)], "open files", "ok", ""),
    ([doctor.open_files(resource.RLIM_INFINITY)], "open files", "ok", ""),
    (doctor.file_system("tmpfs", 10 * GIB, 20 * GIB), "filesystem", "fail", "memory"),
    (doctor.file_system("nfs4", 10 * GIB, 20 * GIB), "filesystem", "warn", "local disk"),
    (doctor.file_system("fuse.sshfs", 10 * GIB, 20 * GIB), "filesystem", "warn", "local disk"),
    (doctor.file_system("overlay", 10 * GIB, 20 * GIB), "filesystem", "warn", "volume"),
    (doctor.file_system("xfs", 10 * GIB, 20 * GIB), "filesystem", "ok", ""),
    (doctor.file_system("xfs", 9 * GIB, 20 * GIB), "disk space", "warn", "10 GiB"),
    (disk([0.0004, 0.0004, 0.03]), "sync latency", "warn", "implausibly quick"),
    (disk([0.0001, 0.0006, 0.0007]), "sync latency", "ok", ""),
    (disk([0.06, 0.06, 0.001]), "sync latency", "warn", "another disk"),
    (disk([0.001], 199e6), "append speed", "warn", "another disk"),
    (disk([0.001], 201e6), "append speed", "ok", ""),
    (peer(serving=False), "log server h:1", "fail", "disk full"),
    (peer(trip_s=0.02), "log server h:1", "warn", "nearer"),
    (peer(**{SECURITY_KEY: "tls,insecure"}), "log server h:1 security", "warn", "docs/security.md"),
    (peer(**{SECURITY_KEY: "tls,tokens"}), "log server h:1 security", "ok", ""),
    (peer(**{VERSION_KEY: "0.0.9"}), "log server h:1 version", "warn", "one version"),
    (peer(**{VERSION_KEY: ""}), "log server h:1 version", "warn", "one version"),
    (peer(offset_s=-1.1), "log server h:1 clock", "warn", "NTP"),
    (peer(offset_s=1.1), "log server h:1 clock", "warn", "NTP"),
    (peer(trip_s=0.009, offset_s=1.004), "log server h:1 clock", "ok", ""),
    (peer(offset_s=-0.9), "log server h:1 clock", "ok", ""),
]


@pytest.mark.parametrize(("findings", "check", "status", "advice"), CASES, ids=range(len(CASES)))
def test_one_thing_that_is_wrong(findings: Any, check: str, status: str, advice: str) -> None:
    found = {finding.check: finding for finding in findings}
    wrong = found.pop(check)
    assert wrong.status == status, wrong
    assert advice in wrong.advice
    assert bool(wrong.advice) == (wrong.status is not Status.OK)
    assert all((other.status, other.advice) == (Status.OK, "") for other in found.values()), found


def test_the_table_has_one_line_each() -> None:
    findings = [
        Finding("open files", Status.OK, "no limit"),
        Finding("sync latency", Status.WARN, "0.1 ms", "be sure"),
        Finding("directory", Status.FAIL, "/x", "make it"),
    ]
    assert lines(findings) == [
        "ok    open files    no limit",
        "warn  sync latency  0.1 ms - be sure",
        "fail  directory     /x - make it",
        "1 ok, 1 to look at, 1 failed",
    ]
