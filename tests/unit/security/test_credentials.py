"""`swift-ft credentials init`, and processes that find their credentials by SWIFT_CREDENTIALS."""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from swift_ft import cli, tokens
from swift_ft.cli_parser import Parser
from swift_ft.credentials import ENV_CREDENTIALS, ENV_TOKEN_FILE, Credentials, act_as, own_folder
from swift_ft.errors import AccessDenied, LogUnavailable, UsageError
from swift_ft.log import admin
from swift_ft.tokens import EVERY_JOB, Authority, write_file
from swift_ft.tools import credentials, doctor
from swift_ft_services import program
from tests.unit.log.service import InProcess


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    """As each process begins."""
    act_as("ranks")
    yield
    act_as("ranks")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    credentials.make(tmp_path / "all", ["node1", "10.0.0.5"])
    return tmp_path / "all"


class Service(InProcess):
    """A log server that has nothing but SWIFT_CREDENTIALS. A context manager."""

    def __init__(self) -> None:
        parser = Parser(prog="server", description="")
        program.add_flags(parser)
        self.protection = program.protection_of(parser.parse_args([]), "logserver")
        super().__init__(None, protection=self.protection, gate=self.protection.gate())


@pytest.fixture
def address(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with pytest.MonkeyPatch.context() as of_the_service:
        of_the_service.setenv(ENV_CREDENTIALS, str(directory))
        service = Service()
    act_as("ranks")
    monkeypatch.setenv(ENV_CREDENTIALS, str(directory))
    with service:
        assert service.protection.shown == "tls,mutual-tls,tokens"
        yield service.address


def test_secrets_are_their_owners_alone(directory: Path) -> None:
    files = [path for path in directory.rglob("*") if path.is_file()]
    secret = {
        str(path.relative_to(directory)) for path in files if stat.S_IMODE(path.stat().st_mode) == 0o600
    }
    keys = {str(path.relative_to(directory)) for path in directory.glob("authority/signing/*.pem")}
    held = {f"{holder}/{name}" for holder in credentials.HOLDERS for name in ("tls.key", "token")}
    assert secret == {"authority/ca.key", *keys, *held}
    assert stat.S_IMODE((directory / "authority").stat().st_mode) == 0o700


def test_a_renewal_keeps_the_hosts_that_were_named(directory: Path) -> None:
    credentials.make(directory, ["node2", "10.0.0.5"])
    credentials.make(directory, [])
    renewed = x509.load_pem_x509_certificate((directory / "services" / "tls.pem").read_bytes())
    names = renewed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(name.value) for name in names} == {
        *("localhost", "127.0.0.1", "::1"),
        *("node1", "node2", "10.0.0.5"),
    }
    assert len(list(names)) == 6


def test_a_command_that_is_killed_between_any_two_files_leaves_what_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, kill_at = [0], [0]

    def write(path: Path, data: bytes, **others: Any) -> None:
        written[0] += 1
        if written[0] == kill_at[0]:
            raise InterruptedError
        write_file(path, data, **others)

    monkeypatch.setattr(credentials, "write_file", write)
    monkeypatch.setattr(tokens, "write_file", write)
    for began_with in ("nothing", "all"):
        for number in range(1, 100):
            directory = tmp_path / f"{began_with}{number}"
            kill_at[0] = 0
            if began_with == "all":
                credentials.make(directory, ["node1"])
            written[0], kill_at[0] = 0, number
            try:
                credentials.make(directory, ["node2"])
            except InterruptedError:
                kill_at[0] = 0
            if began_with == "all":
                check_usable(directory)
            if kill_at[0]:
                assert number > 12
                break
            credentials.make(directory, ["node2"])
            check_usable(directory)


def check_usable(directory: Path) -> None:
    for holder in credentials.HOLDERS:
        folder = directory / holder
        files = {"SWIFT_TLS_CERT": str(folder / "tls.pem"), "SWIFT_TLS_KEY": str(folder / "tls.key")}
        assert {found.status for found in doctor.certificates(files, time.time())} <= {"ok", "warn"}
        assert (folder / "ca.pem").read_bytes() == (directory / "authority" / "ca.pem").read_bytes()
        x509.load_pem_x509_certificate((folder / "tls.pem").read_bytes()).verify_directly_issued_by(
            x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        )
        token = (folder / "token").read_text().strip()
        assert Authority(directory / "services").grant(token).subject == holder


def test_each_holder_may_do_what_its_roles_say(
    address: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' token is the default; a command of people takes that of operators."""
    with pytest.raises(AccessDenied):
        admin.status(address, 10)
    for part in ("operators", "services"):
        monkeypatch.setenv(ENV_CREDENTIALS, str(directory))
        act_as(part)
        assert own_folder() == directory / part
        assert admin.status(address, 10).jobs


def test_nobody_is_heard_without_a_certificate_of_the_authority(
    address: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials.make(tmp_path / "stranger", [])
    (tmp_path / "stranger" / "operators" / "ca.pem").write_bytes(
        (directory / "ranks" / "ca.pem").read_bytes()
    )
    monkeypatch.setenv(ENV_CREDENTIALS, str(tmp_path / "stranger" / "operators"))
    with pytest.raises(LogUnavailable):
        admin.status(address, 10, at_once=True)


def test_a_second_time_it_renews_and_adds_hosts(directory: Path) -> None:
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    old = (directory / "ranks" / "token").read_text().strip()
    credentials.make(directory, ["node2"])
    after = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert before.keys() == after.keys()
    changed = {path.name for path in before if before[path] != after[path]}
    assert changed == {"tls.pem", "token"}
    authority = Authority(directory / "services")
    new = (directory / "ranks" / "token").read_text().strip()
    assert [authority.grant(token).job for token in (old, new)] == [EVERY_JOB, EVERY_JOB]


def test_the_newest_key_signs_and_one_that_was_removed_is_named(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (old,) = (directory / "authority" / "signing").iterdir()
    for number in range(4):  # names are drawn: one of them is below the old one's, or above it
        new, _ = tokens.new_key(directory / "authority")
        os.utime(new, ns=(time.time_ns(), time.time_ns() + number * 10**9))
        assert credentials.make(directory, []) == new
    assert credentials.main(["init", str(directory)]) == 0
    assert not capsys.readouterr().err
    (directory / "authority" / "verifying" / old.name).unlink()
    old.unlink()
    assert credentials.main(["init", str(directory)]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{directory}/services/{old.name} is not in authority/verifying" in said


def test_a_variable_of_one_file_goes_first(directory: Path, tmp_path: Path) -> None:
    environment = {ENV_CREDENTIALS: str(directory / "ranks"), ENV_TOKEN_FILE: str(tmp_path / "other")}
    found = Credentials.from_environment(environment)
    assert (found.token_file, found.ca) == (tmp_path / "other", directory / "ranks" / "ca.pem")
    (directory / "ranks" / "token").unlink()
    assert Credentials.from_environment({ENV_CREDENTIALS: str(directory / "ranks")}).token_file is None


def test_a_directory_without_credentials_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"SWIFT_CREDENTIALS .*: there is no ca.pem .*: make one with"):
        Credentials.from_environment({ENV_CREDENTIALS: str(tmp_path)})


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--hosts", "node1:7000"], "credentials: --hosts node1:7000: a name or an address, without a port"),
        (
            ["--hosts", "http://node1"],
            "credentials: --hosts http://node1: a name or an address, without a port",
        ),
        (["--hours", "0"], "credentials: --hours 0: more than 0, at most 8784"),
        (["--days", "900"], "credentials: --days 900: more than 0, at most 825"),
    ],
)
def test_what_is_refused(
    flags: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["credentials", "init", str(tmp_path / "new"), *flags]) == 2
    assert capsys.readouterr().err == f"swift: {line}\n"
    assert not (tmp_path / "new").exists()


def test_a_damaged_authority_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "authority" / "ca.key").write_text("no key")
    assert cli.main(["credentials", "init", str(directory)]) == 2
    assert capsys.readouterr().err.startswith(f"swift: {directory}/authority: its authority cannot be used: ")


def test_a_directory_may_be_named_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENV_CREDENTIALS, str(tmp_path / "new"))
    assert cli.main(["credentials", "init", str(tmp_path / "new")]) == 0
    assert Credentials.from_environment().ca == tmp_path / "new" / "operators" / "ca.pem"
