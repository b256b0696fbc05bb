"""The doctor's judgement over fabricated facts: every finding, on both sides of its threshold."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_ft.tools import machine_checks
from swift_ft.tools.doctor import table
from swift_ft.tools.machine_checks import (
    DAY_S,
    GIB,
    Certificate,
    Directory,
    Facts,
    Finding,
    Machine,
    Peer,
    Port,
    Software,
    Status,
    Token,
    examine,
    exit_code,
)

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"torch": "2.13.0+cpu", "grpcio": "1.85.1", "protobuf": "7.36.2"}
GOOD_DISK = Directory(
    path="/log",
    exists=True,
    filesystem="ext4",
    free_bytes=100 * GIB,
    size_bytes=200 * GIB,
    direct=True,
    preallocates=True,
    syncs_s=[0.001, 0.002, 0.004],
    append_bytes_per_s=1e9,
)
GOOD_PEER = Peer(
    kind="log server",
    address="h:1",
    serving=True,
    round_trips_s=[0.002, 0.001],
    version="0.1.0",
    clock_offset_s=0.1,
)
GOOD = Facts(
    own_version="0.1.0",
    software=Software(python=(3, 11, 7), packages=PACKAGES, kernels=["avx2"]),
    machine=Machine(cpus=8, open_files=20_000, locked_bytes=-1, no_ring=""),
    ranks=4,
    directory=GOOD_DISK,
    ports=[Port(address="127.0.0.1:1")],
    peers=[GOOD_PEER],
    certificates=[
        Certificate(
            variable="SWIFT_TLS_CERT", path="c", expires_in_s=90 * DAY_S, valid_since_s=DAY_S, mode=0o644
        ),
        Certificate(variable="SWIFT_TLS_KEY", path="k", mode=0o600, is_key=True, matches=True),
    ],
)


def token(**changes: Any) -> Facts:
    known: dict[str, Any] = {"path": "t", "job": "j", "roles": ["writer"], "expires_in_s": 1800.0, **changes}
    return replace(GOOD, token=Token(**known))


def software(**changes: Any) -> Facts:
    return replace(GOOD, software=replace(GOOD.software, **changes))


def machine(ranks: int = 4, **changes: Any) -> Facts:
    return replace(GOOD, ranks=ranks, machine=replace(GOOD.machine, **changes))


def disk(**changes: Any) -> Facts:
    return replace(GOOD, directory=replace(GOOD_DISK, **changes))


def peer(**changes: Any) -> Facts:
    return replace(GOOD, peers=[replace(GOOD_PEER, **changes)])


def certificate(**changes: Any) -> Facts:
    return replace(GOOD, certificates=[replace(GOOD.certificates[0], **changes)])


def key(**changes: Any) -> Facts:
    return replace(GOOD, certificates=[replace(GOOD.certificates[1], **changes)])


def packages(**changes: str | None) -> Facts:
    known = {**PACKAGES, **changes}
    return software(packages={name: version for name, version in known.items() if version is not None})


def test_where_all_is_well_nothing_is_to_be_done() -> None:
    findings = examine(GOOD)
    assert {finding.status for finding in findings} == {Status.OK}
    assert all(finding.found and not finding.advice for finding in findings)
    assert exit_code(findings) == 0


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
    (software(kernels=[]), "compiled kernels", "warn", "C++ compiler"),
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
    (disk(exists=False, parent_writable=True), "directory", "ok", ""),
    (disk(exists=False), "directory", "fail", "make it"),
    (disk(problem="Permission denied"), "directory", "fail", "writable"),
    (disk(filesystem="tmpfs"), "filesystem", "fail", "memory"),
    (disk(filesystem="nfs4"), "filesystem", "warn", "local disk"),
    (disk(filesystem="fuse.sshfs"), "filesystem", "warn", "local disk"),
    (disk(filesystem="overlay"), "filesystem", "warn", "volume"),
    (disk(filesystem="xfs"), "filesystem", "ok", ""),
    (disk(free_bytes=9 * GIB), "disk space", "warn", "10 GiB"),
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
    (token(problem="No such file"), "SWIFT_TOKEN_FILE", "fail", "swift-ft token"),
    (
        replace(GOOD, ports=[Port(address="h:1", problem="Address already in use")]),
        "port",
        "fail",
        "stop what",
    ),
    (peer(problem="cannot be reached"), "log server h:1", "fail", "is it running"),
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
    (certificate(problem="not a certificate in PEM"), "SWIFT_TLS_CERT", "fail", "PEM"),
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


@pytest.mark.parametrize(("facts", "check", "status", "advice"), CASES, ids=range(len(CASES)))
def test_one_thing_that_is_wrong(facts: Facts, check: str, status: str, advice: str) -> None:
    findings = examine(facts)
    (found,) = [finding for finding in findings if finding.check == check]
    assert found.status == status, found
    assert advice in found.advice
    assert bool(found.advice) == (found.status is not Status.OK)
    others = [f for f in findings if f.check != check and not f.check.startswith(check)]
    assert all(finding.status is Status.OK for finding in others), others
    if status == "fail":
        assert exit_code(findings) == 3
    else:
        assert exit_code(findings) == 0


def test_every_threshold_is_used() -> None:
    """A case above falls on each side of each: this counts that none was forgotten."""
    judged = {check for _, check, _, _ in CASES}
    wanted = {finding.check for finding in examine(GOOD)}
    assert wanted <= judged


def test_what_was_not_asked_for_is_not_judged() -> None:
    bare = replace(GOOD, directory=None, ports=[], peers=[], certificates=[])
    assert {finding.check for finding in examine(bare)} == {
        *("python", "grpcio", "protobuf", "torch", "compiled kernels"),
        *("processors", "open files", "shared memory", "locked memory"),
    }


def test_the_table_has_one_line_each() -> None:
    findings = [
        Finding("python", Status.OK, "3.11"),
        Finding("sync latency", Status.WARN, "0.1 ms", "be sure"),
        Finding("port", Status.FAIL, "in use", "take another"),
    ]
    assert table(findings).splitlines() == [
        "ok    python        3.11",
        "warn  sync latency  0.1 ms - be sure",
        "fail  port          in use - take another",
        "1 ok, 1 to look at, 1 failed",
    ]


def test_sizes_are_read_by_people() -> None:
    assert [machine_checks._size(size) for size in (12, 1 << 10, 3 << 20, 1536 << 20, 1 << 41)] == [
        *("12 B", "1.0 KiB", "3.0 MiB", "1.5 GiB", "2.0 TiB")
    ]
