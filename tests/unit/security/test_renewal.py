"""Tokens that are renewed while they are used: when, with which key, and what happens if that fails."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import jwt
import pytest

from swift_ft import credentials as channel
from swift_ft import events, tokens
from swift_ft.credentials import ENV_TOKEN_FILE, Credentials, Renewal, open_channel
from swift_ft.errors import AccessDenied, RecordMissing, UsageError
from swift_ft.log import admin
from swift_ft.log.reader import LogReader, never
from swift_ft.log.record import RecordKey
from swift_ft.tokens import Authority, Role, SigningKey, new_key
from swift_ft.tools import token as command
from swift_ft_services.authorization import Gate
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.security.world import JOB, RANK, Guarded, Keys, put, touched


class Clock:
    """Both clocks, as the renewal sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._began = (time.time(), time.monotonic())
        self._ahead_s = [0.0, 0.0]
        monkeypatch.setattr(time, "time", lambda: self._began[0] + self._ahead_s[0])
        monkeypatch.setattr(time, "monotonic", lambda: self._began[1] + self._ahead_s[1])

    def go(self, wall_s: float, monotonic_s: float) -> None:
        self._ahead_s[0] += wall_s
        self._ahead_s[1] += monotonic_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def renewal_of(keys: Keys, key: Path | None = None, lifetime_s: float = 60.0) -> Renewal:
    return Renewal(key or keys.signing, keys.directory / "rank.token", JOB, RANK, lifetime_s)


@pytest.mark.parametrize(
    ("wall_s", "monotonic_s", "expected"),
    [(29, 29, False), (30, 30, True), (0, 30, True), (30, 0, True), (-0.5, 0, False), (-2, 0, True)],
)
def test_half_of_the_lifetime_is_left_by_either_clock(
    keys: Keys, clock: Clock, wall_s: float, monotonic_s: float, expected: bool
) -> None:
    renewal = renewal_of(keys)
    renewal.turn()
    clock.go(wall_s, monotonic_s)
    assert renewal.turn() is expected


def test_a_token_is_written_when_half_of_it_is_over_and_not_before(keys: Keys, clock: Clock) -> None:
    renewal = renewal_of(keys)
    assert renewal.turn()
    first = renewal.out.read_text()
    assert stat.S_IMODE(renewal.out.stat().st_mode) == 0o600
    grant = Authority(keys.verifying).grant(first.strip())
    assert (grant.job, grant.roles, grant.generation_max) == (JOB, frozenset(RANK), None)
    clock.go(29, 29)
    assert not renewal.turn()
    assert renewal.out.read_text() == first
    clock.go(1, 1)
    assert renewal.turn()
    assert renewal.out.read_text() != first
    assert not renewal.turn()
    renewal.out.unlink()
    assert renewal.turn(), "a file that was removed is written again"


def kid_of(path: Path) -> str:
    return str(jwt.get_unverified_header(path.read_text().strip())["kid"])


def test_a_key_is_replaced_by_its_link(keys: Keys) -> None:
    """The token names the file that the link leads to: that is what the public key is called."""
    link = keys.signing.with_name("current.pem")
    link.symlink_to(keys.signing.name)
    renewal = renewal_of(keys, link)
    renewal.turn()
    assert kid_of(renewal.out) == keys.signing.stem
    newer = new_key(keys.directory)[0]
    aside = link.with_name("next")
    aside.symlink_to(newer.name)
    aside.replace(link)
    assert renewal.turn(), "at once, whatever is left of the old one"
    assert kid_of(renewal.out) == newer.stem
    Authority(keys.verifying).grant(renewal.out.read_text().strip())


def test_what_cannot_be_renewed_leaves_the_old_token_and_is_tried_again(keys: Keys, clock: Clock) -> None:
    renewal = renewal_of(keys)
    renewal.turn()
    before = renewal.out.read_text()
    clock.go(30, 30)
    away = keys.signing.with_suffix(".away")
    keys.signing.rename(away)
    for _ in range(2):
        with pytest.raises(UsageError, match="No such file"):
            renewal.turn()
        assert renewal.out.read_text() == before
    away.rename(keys.signing)
    assert renewal.turn()


def test_a_file_that_cannot_be_written_is_tried_again(keys: Keys, clock: Clock, tmp_path: Path) -> None:
    renewal = Renewal(keys.signing, tmp_path / "absent" / "rank.token", JOB, RANK, 60)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            renewal.turn()
    (tmp_path / "absent").mkdir()
    assert renewal.turn()
    clock.go(30, 30)
    assert renewal.turn()


def test_trouble_is_told_once_and_again_after_its_end(
    keys: Keys, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    renewal = renewal_of(keys)
    gone = UsageError("the key is gone")
    problem = ""
    told = []
    for error in (gone, gone, None, gone, OSError(28, "No space left", "f")):
        monkeypatch.setattr(renewal, "turn", mock.Mock(side_effect=error, return_value=False))
        problem = command._turn(renewal, 1.0, problem)
        told.append(capsys.readouterr().err)
    assert [line.count("\n") for line in told] == [1, 0, 0, 1, 1]
    assert "the key is gone" in told[0]
    assert told[-1].endswith("f: No space left\n")


# -- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--job", JOB, "--role", "writer", "--renew"],
        ["--job", JOB, "--role", "writer", "--renew", "--out", "f", "--generation", "3"],
        ["--new-key", "d", "--renew"],
    ],
    ids=" ".join,
)
def test_flags_that_do_not_go_together(
    keys: Keys, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    key = [] if "--new-key" in words else ["--key", str(keys.signing)]
    assert command.main([*key, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("swift: token: ")
    assert said.count("\n") == 1


def test_the_command_renews_until_it_is_told_to_stop(keys: Keys, tmp_path: Path) -> None:
    out = tmp_path / "run.token"
    words = ["--key", str(keys.signing), "--job", JOB, "--role", "writer,replayer", "--hours", str(3 / 3600)]
    words += ["--out", str(out), "--renew"]
    process = subprocess.Popen(
        [sys.executable, "-m", "swift_ft.cli", "token", *words], stderr=subprocess.PIPE, text=True
    )
    seen: dict[str, None] = {}

    def look() -> int:
        assert process.poll() is None
        if out.exists():
            seen[out.read_text().strip()] = None
        return len(seen)

    try:
        eventually(lambda: look() >= 3, timeout_s=30)
        authority = Authority(keys.verifying)
        assert authority.grant(list(seen)[-1]).roles == frozenset(RANK)
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=10)[1]
    assert process.returncode == 0
    assert f"{out}: written, good for" in said
    assert "renewed" in said
    assert [part for token in seen for part in token.split(".")[1:] if part in said] == []


def test_what_is_wrong_at_the_start_is_told_in_one_line(
    keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--key", str(tmp_path / "none.pem"), "--job", JOB, "--role", "writer", "--renew"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert command.main([*words, "--out", str(tmp_path / "t")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


# -- while they are used ----------------------------------------------------------------------------------


@pytest.fixture
def server(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    monkeypatch.setattr(tokens, "REFRESH_S", 0.0)
    with Guarded(keys) as server:
        yield server


def test_a_signing_key_is_rotated_under_a_writer(
    server: Guarded, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/security.md says it: a new key, its public part to the servers, the link, then the old one away."""
    link = keys.signing.with_name("current.pem")
    link.symlink_to(keys.signing.name)
    renewal = renewal_of(keys, link)
    renewal.turn()
    old = renewal.out.read_text().strip()
    monkeypatch.setenv(ENV_TOKEN_FILE, str(renewal.out))
    writer = LogWriter([server.address], JOB, 1, patience_s=20)
    put(writer, 0)
    newer = new_key(keys.directory)[0]
    put(writer, 1)
    assert admin_sees(server, keys, old) == 2, "with the old key's token, while both are there"
    link.unlink()
    link.symlink_to(newer.name)
    assert renewal.turn()
    assert admin_sees(server, keys, renewal.out.read_text().strip()) == 2
    put(writer, 2)
    (keys.verifying / keys.signing.name).unlink()
    put(writer, 3)  # its call had the old token: it is told so, and comes back with the new one
    with pytest.raises(AccessDenied, match="not signed by a key that counts"):
        admin_sees(server, keys, old)
    assert admin_sees(server, keys, renewal.out.read_text().strip()) == 4
    writer.close(5)


def admin_sees(server: Guarded, keys: Keys, token: str) -> int:
    """How many records there are, asked for with this token."""
    before = os.environ.get(ENV_TOKEN_FILE)
    os.environ[ENV_TOKEN_FILE] = str(keys.file("asked", token))
    try:
        return sum(stream.records for stream in admin.inventory(server.address, JOB, 5.0))
    finally:
        if before is None:
            del os.environ[ENV_TOKEN_FILE]
        else:
            os.environ[ENV_TOKEN_FILE] = before


@pytest.fixture
def denials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    monkeypatch.setenv("SWIFT_EVENTS", str(tmp_path))
    events.configure("test")
    return lambda: sum(event["event"] == "denied" for event in events.read(tmp_path))


def test_a_replay_that_begins_with_an_expired_token_waits_for_the_newer_one(
    server: Guarded, keys: Keys, monkeypatch: pytest.MonkeyPatch, denials: Callable[[], int]
) -> None:
    monkeypatch.setenv(ENV_TOKEN_FILE, str(keys.file("rank", keys.mint(RANK))))
    writer = LogWriter([server.address], JOB, 1)
    put(writer, 0)
    writer.close(5)
    keys.file("rank", keys.mint(RANK, lifetime_s=-5))
    reader = LogReader([server.address], JOB)
    cursor = reader.follow("s0.F", 0)
    found: list[int] = []
    asking = threading.Thread(
        target=lambda: found.append(len(reader.digests("s0.F", 0, timeout_s=20, cancelled=never))),
        daemon=True,
    )
    asking.start()
    eventually(lambda: denials() >= 1)
    with pytest.raises(RecordMissing, match="the token has expired"):
        cursor.get(RecordKey(0, 0, 0), 0.2, lambda: False)
    assert not found
    keys.file("rank", keys.mint(RANK))
    assert cursor.get(RecordKey(0, 0, 0), 20, lambda: False).body.nbytes == 4
    asking.join(20)
    assert found == [1]
    cursor.close()
    reader.close()


def test_a_replay_that_no_token_will_let_in_is_told_so(
    server: Guarded, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_TOKEN_FILE, str(keys.file("rank", keys.mint([Role.WRITER]))))
    reader = LogReader([server.address], JOB)
    with pytest.raises(AccessDenied, match="another job or role"):
        reader.digests("s0.F", 0, timeout_s=20, cancelled=never)
    cursor = reader.follow("s0.F", 0)
    with pytest.raises(AccessDenied, match="another job or role"):
        cursor.get(RecordKey(0, 0, 0), 3, lambda: False)
    keys.file("rank", keys.mint(RANK, lifetime_s=-5))
    with pytest.raises(AccessDenied, match="expired"):
        reader.digests("s0.F", 0, timeout_s=0.3, cancelled=never)
    cursor.close()
    reader.close()


def test_a_token_file_that_cannot_be_taken_over_is_told_once(
    server: Guarded, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denials: Callable[[], int]
) -> None:
    """The old token goes on; the line says which file, why and what to do, and nothing of what is in it."""
    credentials = keys.client(keys.mint(RANK))
    path = credentials.token_file
    assert path is not None
    old = path.read_text()
    newer = keys.mint(RANK)
    call = open_channel(server.address, (), Credentials(token_file=path))
    assert isinstance(call, channel._Channel)
    assert call.metadata()[0][1].endswith(old)
    path.unlink()
    assert call.metadata()[0][1].endswith(old), "it is just being replaced"
    keys.file("client", newer)
    path.chmod(0o644)
    for _ in range(3):
        assert call.metadata()[0][1].endswith(old)
    (said,) = [event for event in events.read(tmp_path) if event["event"] == "token_not_reloaded"]
    assert f"chmod 600 {path}" in said["reason"]
    assert newer not in str(said)
    path.chmod(0o600)
    assert call.metadata()[0][1].endswith(newer)
    call.close()
    assert denials() == 0


def test_a_public_key_that_could_not_be_read_is_looked_at_again(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor was left at that moment. Its file does not change any more."""
    monkeypatch.setattr(tokens, "REFRESH_S", 0.0)
    authority = Authority(keys.verifying)
    newer = SigningKey.load(new_key(keys.directory)[0], "--key")
    read = tokens._bytes_of
    monkeypatch.setattr(tokens, "_bytes_of", lambda path: None if path.stem == newer.name else read(path))
    token = newer.mint(JOB, RANK, 60)
    with pytest.raises(tokens.NotAuthenticated):
        authority.grant(token)
    authority.grant(keys.mint(RANK))
    monkeypatch.setattr(tokens, "_bytes_of", read)
    assert authority.grant(token).job == JOB


def test_a_key_file_that_is_written_again_with_another_key_counts_at_once(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "REFRESH_S", 0.0)
    gate = Gate(Authority(keys.verifying))
    other = Keys(keys.directory / "other")
    token = other.key.mint(JOB, RANK, 60)
    public = keys.verifying / other.signing.name
    with pytest.raises(Exception, match="not signed by a key that counts"):
        gate.grant(token)
    public.write_text("half of")
    with pytest.raises(Exception, match="not signed by a key that counts"):
        gate.grant(token)
    touched(public, (other.verifying / other.signing.name).read_bytes())
    assert gate.grant(token).job == JOB
