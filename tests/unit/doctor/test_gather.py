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
from swift_ft.tools.machine_checks import Finding

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

    def found(**named: str) -> dict[str, Finding]:
        environment = {f"SWIFT_TLS_{what}": str(tmp_path / name) for what, name in named.items()}
        return {
            finding.check.removeprefix("SWIFT_TLS_"): finding
            for finding in doctor.certificates(environment, NOW.timestamp(), 10.0)
        }

    one = found(CERT="cert", KEY="key", CA="chain")
    assert one["CERT"].found == f"{tmp_path / 'cert'}: 20 days left"
    assert one["KEY"].found == f"{tmp_path / 'key'}: mode 0640"
    assert one["CA"].found == f"{tmp_path / 'chain'}: 7 days left"  # the first that ends
    assert [one[name].status for name in ("CERT", "KEY", "CA")] == ["ok", "fail", "warn"]
    (tmp_path / "other").chmod(0o600)
    assert found(CERT="cert", KEY="other")["KEY"].advice == "name the pair"
    assert found(KEY="other")["KEY"].status == "ok"
    for named, words in (
        ({"KEY": "locked"}, "encrypted"),
        ({"KEY": "text"}, "not a private key"),
        ({"CERT": "text"}, "not a certificate"),
        ({"CERT": "absent"}, "No such file"),
    ):
        (broken,) = found(**named).values()
        assert words in broken.found
        assert (broken.status, broken.advice) == ("fail", "name a readable PEM file")
    assert found() == {}


def test_a_directory_is_measured_and_nothing_stays_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "APPEND_BYTES", 8 << 20)
    found = {finding.check: finding.found for finding in doctor.directory(tmp_path)}
    assert found["directory"] == str(tmp_path)
    assert found.keys() == {
        *("directory", "filesystem", "disk space"),
        *("direct writes", "preallocation", "sync latency", "append speed"),
    }
    assert found["sync latency"].endswith(f" of {doctor.SYNCS}")
    assert list(tmp_path.iterdir()) == []


def test_directories_that_are_none(tmp_path: Path) -> None:
    def found(path: Path) -> Finding:
        return next(finding for finding in doctor.directory(path) if finding.check == "directory")

    assert found(tmp_path / "a" / "b").found == f"{tmp_path / 'a' / 'b'} will be made"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert found(tmp_path / "file").found == f"{tmp_path / 'file'}: Not a directory"
    assert found(Path("/proc/swift")).status == ("ok" if os.geteuid() == 0 else "fail")
    assert found(Path("/proc")).status == "fail"


def test_a_port_is_free_until_somebody_listens(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert "in use" in doctor.port(address).found
    assert doctor.port(address).status == "ok"
    assert doctor.port("203.0.113.1:80").status == "fail"  # not an address of this machine


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

    token = found(key.mint("run42", [Role.WRITER, Role.REPLAYER], 600, generation_max=4))
    assert token.found == f"{path}: job run42, replayer, writer, 10 min left, to generation 4"
    assert "expired" in found(key.mint("run42", [Role.WRITER], -60)).found
    assert "no token of ours" in found("a.b.c").found
    assert "chmod 600" in found(key.mint("j", [Role.WRITER], 60), 0o640).found
    assert list(doctor.token({}, now)) == []
    path.unlink()
    (gone,) = doctor.token({"SWIFT_TOKEN_FILE": str(path)}, now)
    assert gone.found == f"{path}: No such file or directory"
    assert (gone.status, gone.advice) == ("fail", "make one with swift-ft token")


def test_compiled_kernels_are_found_where_they_are_built() -> None:
    built = Path(doctor.__file__).parents[1].rglob("_kernels_*.so")
    (found,) = (finding for finding in doctor.software() if finding.check == "compiled kernels")
    kernels = sorted(path.stem.removeprefix("_kernels_") for path in built)
    assert found.found == (", ".join(kernels) or "not built")


ONE_GPU = "0, NVIDIA H200, 580.159.03, 143771, 4, Enabled, {errors}"
XIDS = """\
4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.
4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault
4,3,3,-;NVRM: Xid (PCI:0000:5e:00): 13, pid=7, Graphics Exception
"""


def gpus(
    directory: Path, monkeypatch: pytest.MonkeyPatch, script: str, messages: str = ""
) -> list[tuple[str, str, str]]:
    """What is found with this nvidia-smi."""
    tool, kmsg = directory / "nvidia-smi", directory / "kmsg"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    kmsg.write_text(messages)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return [
        (f.check, str(f.status), f.found) for f in doctor.devices(1.0, kmsg) if f.check != "torch for GPUs"
    ]


def test_gpus_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"echo '{ONE_GPU.format(errors=0)}'; echo '{ONE_GPU.format(errors=3)}'"
    good, bad, xid = gpus(tmp_path, monkeypatch, script, XIDS)
    assert good[:2] == ("gpu 0", "ok")
    assert "NVIDIA H200, driver 580.159.03" in good[2]
    assert bad[1] == "fail"
    assert xid == ("gpu PCI:0000:3b:00", "warn", "XID 79")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'No devices were found'; exit 6", []),
        (
            'echo "couldn\'t communicate with the NVIDIA driver"; exit 9',
            ["communicate with the NVIDIA driver"],
        ),
        ("exec sleep 60", ["no answer in 1 s"]),
        ("echo 0, a GPU", ["0, a GPU"]),
    ],
)
def test_a_tool_that_cannot_tell(
    script: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = gpus(tmp_path, monkeypatch, script)
    assert len(said) == len(found)
    assert all(words in line[2] and line[1] == "warn" for words, line in zip(found, said, strict=True))


LINKS = """\
GPU {number}: NVIDIA H200 (UUID: GPU-1b2c)
\t Link 0: 26.562 GB/s
\t Link 1: {second}
"""
SLOW, DOWN = LINKS.format(number=1, second="13.281 GB/s"), LINKS.format(number=1, second="<inactive>")
NONE = LINKS.format(number=1, second="<inactive>").replace("26.562 GB/s", "<inactive>")
GOOD = LINKS.format(number=0, second="26.562 GB/s")


@pytest.mark.parametrize(
    ("status", "found"),
    [
        (f"echo '{GOOD}'", {"0": ("ok", "2 of 2 links up, 53 GB/s")}),
        (f"echo '{GOOD}{DOWN}'", {"0": ("ok", "2 of 2"), "1": ("warn", "1 of 2 links up, 27 GB/s")}),
        (f"echo '{GOOD}{SLOW}'", {"0": ("ok", "2 of 2"), "1": ("warn", "2 of 2 links up, 40 GB/s")}),
        (f"echo '{GOOD}{NONE}'", {"0": ("ok", "2 of 2"), "1": ("warn", "0 of 2 links up, 0 GB/s")}),
        (f"echo '{NONE}'", {}),
        ("echo 'no such option: nvlink'; exit 2", {}),
    ],
    ids=["up", "one is down", "one is slow", "all of one are down", "none", "an old tool"],
)
def test_nvlinks_are_looked_at(
    status: str, found: dict[str, tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        f"if [ \"$1 $2\" = 'nvlink --status' ]; then {status}\nelse echo '{ONE_GPU.format(errors=0)}'; fi"
    )
    said = {
        check.removeprefix("nvlink of gpu "): (judged, words)
        for check, judged, words in gpus(tmp_path, monkeypatch, script)
        if check.startswith("nvlink")
    }
    assert said.keys() == found.keys()
    assert all(
        said[gpu][0] == judged and said[gpu][1].startswith(words) for gpu, (judged, words) in found.items()
    )


def test_links_that_are_not_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"[ $1 = nvlink ] && exec sleep 60; echo '{ONE_GPU.format(errors=0)}'"
    assert [line[:2] for line in gpus(tmp_path, monkeypatch, script)] == [("gpu 0", "ok"), ("gpu", "warn")]


def test_nothing_is_said_where_there_is_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(doctor.devices()) == []
