"""The doctor's judgement: every finding, on both sides of its threshold."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from swift_ft.tools import machine_checks
from swift_ft.tools.doctor import lines
from swift_ft.tools.machine_checks import DAY_S, GIB, Finding, Status

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"torch": "2.13.0+cpu", "grpcio": "1.85.1", "protobuf": "7.36.2"}


def software(python: tuple[int, ...] = (3, 11, 7), kernels: tuple[str, ...] = ("avx2",)) -> list[Finding]:
    return list(machine_checks.software(python, PACKAGES, kernels))


def packages(**changes: str | None) -> list[Finding]:
    known = {**PACKAGES, **changes}
    versions = {name: version for name, version in known.items() if version is not None}
    return list(machine_checks.software((3, 11, 7), versions, ["avx2"]))


def machine(**changes: Any) -> list[Finding]:
    good = {"cpus": 8, "ranks": 4, "open_files": 20_000, "locked_bytes": -1, "no_ring": ""}
    return list(machine_checks.machine(**{**good, **changes}))


def directory(**changes: Any) -> list[Finding]:
    return [machine_checks.directory("/log", **{"exists": True, **changes})]


def file_system(kind: str = "ext4", free_bytes: int = 100 * GIB) -> list[Finding]:
    return list(machine_checks.file_system(kind, free_bytes, 200 * GIB))


def disk(**changes: Any) -> list[Finding]:
    good = {"direct": True, "preallocates": True, "syncs_s": [0.001, 0.002, 0.004], "append_bytes_per_s": 1e9}
    return list(machine_checks.disk(**{**good, **changes}))


def port(problem: str = "") -> list[Finding]:
    return [machine_checks.port("h:1", problem)]


def peer(**changes: Any) -> list[Finding]:
    good = {
        "serving": True,
        "round_trips_s": [0.002, 0.001],
        "version": "0.1.0",
        "own_version": "0.1.0",
        "security": [],
        "clock_offset_s": 0.1,
    }
    return list(machine_checks.peer("log server h:1", **{**good, **changes}))


def certificate(**changes: Any) -> list[Finding]:
    good = {"expires_in_s": 90 * DAY_S, "valid_since_s": DAY_S, "warn_days": 30.0}
    return [machine_checks.certificate("SWIFT_TLS_CERT", "c", **{**good, **changes})]


def key(**changes: Any) -> list[Finding]:
    return [machine_checks.key("SWIFT_TLS_KEY", "k", **{"mode": 0o600, "matches": True, **changes})]


def token(**changes: Any) -> list[Finding]:
    good = {"job": "j", "roles": ["writer"], "generation": None, "expires_in_s": 1800.0}
    return [machine_checks.token("t", **{**good, **changes})]


ALL = (software, machine, directory, file_system, disk, port, peer, certificate, key, token)


def test_where_all_is_well_nothing_is_to_be_done() -> None:
    for check in ALL:
        for finding in check():
            assert (finding.status, finding.advice) == (Status.OK, "")
            assert finding.found


def test_what_the_project_takes_is_what_is_judged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least, newest = machine_checks.PYTHONS[0], machine_checks.PYTHONS[-1]
    assert project["requires-python"] == f">={least[0]}.{least[1]},<{newest[0]}.{newest[1] + 1}"
    bounds = (machine_checks.LEAST["torch"], machine_checks.TORCH_BELOW)
    assert "torch>={}.{},<{}.{}".format(*bounds[0], *bounds[1]) in project["optional-dependencies"]["train"]


CASES = [
    (software(python=(3, 10, 0)), "python", "fail", "use Python 3.11 or 3.12 or 3.13"),
    (software(python=(3, 13, 1)), "python", "ok", ""),
    (software(python=(3, 14, 0)), "python", "fail", "use Python"),
    (packages(torch=None), "torch", "warn", "servers need none"),
    (packages(torch="2.11.1"), "torch", "fail", "too old"),
    (packages(torch="2.16.0"), "torch", "warn", "not tried"),
    (packages(torch="2.12.0"), "torch", "ok", ""),
    (packages(torch="2.15.1"), "torch", "ok", ""),
    (packages(grpcio=None), "grpcio", "fail", "pip install"),
    (packages(grpcio="1.84.9"), "grpcio", "fail", "too old"),
    (packages(grpcio="2.0.0rc1"), "grpcio", "ok", ""),
    (packages(protobuf="7.34.0"), "protobuf", "fail", "too old"),
    (software(kernels=()), "compiled kernels", "warn", "C++ compiler"),
    (machine(cpus=4), "processors", "warn", "fewer ranks"),
    (machine(cpus=5), "processors", "ok", ""),
    (machine(cpus=1, ranks=0), "processors", "ok", ""),
    (machine(open_files=1023), "open files", "fail", "LimitNOFILE"),
    (machine(open_files=1024), "open files", "warn", "LimitNOFILE"),
    (machine(open_files=8192), "open files", "ok", ""),
    (machine(open_files=-1), "open files", "ok", ""),
    (machine(no_ring="no memfd; use Linux"), "shared memory", "fail", "use Linux"),
    (machine(locked_bytes=8 << 20), "locked memory", "warn", "LimitMEMLOCK"),
    (machine(locked_bytes=GIB), "locked memory", "ok", ""),
    (directory(exists=False), "directory", "ok", ""),
    (directory(exists=False, writable=False), "directory", "fail", "make it"),
    (directory(problem="Permission denied"), "directory", "fail", "writable"),
    (file_system("tmpfs"), "filesystem", "fail", "memory"),
    (file_system("nfs4"), "filesystem", "warn", "local disk"),
    (file_system("fuse.sshfs"), "filesystem", "warn", "local disk"),
    (file_system("overlay"), "filesystem", "warn", "volume"),
    (file_system("xfs"), "filesystem", "ok", ""),
    (file_system(free_bytes=9 * GIB), "disk space", "warn", "10 GiB"),
    (disk(direct=False), "direct writes", "warn", "ext4"),
    (disk(preallocates=False), "preallocation", "warn", "ext4"),
    (disk(syncs_s=[0.0004, 0.0004, 0.03]), "sync latency", "warn", "implausibly quick"),
    (disk(syncs_s=[0.0001, 0.0006, 0.0007]), "sync latency", "ok", ""),
    (disk(syncs_s=[0.06, 0.06, 0.001]), "sync latency", "warn", "another disk"),
    (disk(append_bytes_per_s=199e6), "append speed", "warn", "another disk"),
    (disk(append_bytes_per_s=201e6), "append speed", "ok", ""),
    (token(), "SWIFT_TOKEN_FILE", "ok", ""),
    (token(expires_in_s=599.0), "SWIFT_TOKEN_FILE", "warn", "--renew running?"),
    (token(expires_in_s=600.0), "SWIFT_TOKEN_FILE", "ok", ""),
    (token(expires_in_s=0.0), "SWIFT_TOKEN_FILE", "fail", "--renew running?"),
    (token(generation=3), "SWIFT_TOKEN_FILE", "warn", "leave --generation out"),
    (port("Address already in use"), "port", "fail", "stop what"),
    (peer(serving=False), "log server h:1", "fail", "disk full"),
    (peer(round_trips_s=[0.02, 0.02]), "log server h:1", "warn", "nearer"),
    (peer(security=frozenset({"tls", "insecure"})), "log server h:1 security", "warn", "docs/security.md"),
    (peer(security=frozenset({"tls", "tokens"})), "log server h:1 security", "ok", ""),
    (peer(version="0.0.9"), "log server h:1 version", "warn", "one version"),
    (peer(version=""), "log server h:1 version", "warn", "one version"),
    (peer(clock_offset_s=None), "log server h:1 clock", "warn", "one version"),
    (peer(clock_offset_s=-1.1), "log server h:1 clock", "warn", "NTP"),
    (peer(clock_offset_s=1.1), "log server h:1 clock", "warn", "NTP"),
    (peer(clock_offset_s=1.004, round_trips_s=[0.009, 0.009]), "log server h:1 clock", "ok", ""),
    (peer(clock_offset_s=-0.9), "log server h:1 clock", "ok", ""),
    (certificate(expires_in_s=-1.0), "SWIFT_TLS_CERT", "fail", "renew"),
    (certificate(expires_in_s=29 * DAY_S), "SWIFT_TLS_CERT", "warn", "renew"),
    (certificate(expires_in_s=31 * DAY_S), "SWIFT_TLS_CERT", "ok", ""),
    (certificate(valid_since_s=-1.0), "SWIFT_TLS_CERT", "fail", "clock"),
    (key(mode=0o640), "SWIFT_TLS_KEY", "fail", "chmod 600"),
    (key(mode=0o604), "SWIFT_TLS_KEY", "fail", "chmod 600"),
    (key(mode=0o400), "SWIFT_TLS_KEY", "ok", ""),
    (key(matches=False), "SWIFT_TLS_KEY", "fail", "pair"),
    (key(matches=None), "SWIFT_TLS_KEY", "ok", ""),
]


@pytest.mark.parametrize(("findings", "check", "status", "advice"), CASES, ids=range(len(CASES)))
def test_one_thing_that_is_wrong(findings: list[Finding], check: str, status: str, advice: str) -> None:
    (found,) = [finding for finding in findings if finding.check == check]
    assert found.status == status, found
    assert advice in found.advice
    assert bool(found.advice) == (found.status is not Status.OK)
    assert all(finding.status is Status.OK for finding in findings if finding is not found), findings


def test_every_threshold_is_used() -> None:
    """A case above falls on each side of each: this counts that none was forgotten."""
    judged = {check for _, check, _, _ in CASES}
    assert {finding.check for check in ALL for finding in check()} <= judged


def test_the_table_has_one_line_each() -> None:
    findings = [
        Finding("python", Status.OK, "3.11"),
        Finding("sync latency", Status.WARN, "0.1 ms", "be sure"),
        Finding("port", Status.FAIL, "in use", "take another"),
    ]
    assert lines(findings) == [
        "ok    python        3.11",
        "warn  sync latency  0.1 ms - be sure",
        "fail  port          in use - take another",
        "1 ok, 1 to look at, 1 failed",
    ]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.OK),
        ({"uncorrected": None, "ecc": "[N/A]"}, Status.OK),
        ({"uncorrected": 1}, Status.FAIL),
        ({"ecc": "Disabled"}, Status.WARN),
        ({"used_bytes": 9 * GIB}, Status.WARN),
    ],
)
def test_a_gpu(changes: dict[str, Any], status: Status) -> None:
    good = {"memory_bytes": 80 * GIB, "used_bytes": 8 * GIB, "ecc": "Enabled", "uncorrected": 0}
    assert machine_checks.gpu("0", "a GPU", "580.1", **{**good, **changes}).status is status


def test_torch_of_a_machine_with_gpus() -> None:
    assert machine_checks.torch_for_gpus("2.13.0+cu130").status is Status.OK
    assert machine_checks.torch_for_gpus("2.13.0+cpu").status is Status.WARN
