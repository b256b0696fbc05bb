"""Who did what, and who was denied: subjects and ids of tokens in the trail, a list of revoked ones, and how often."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from swift_ft import tokens
from swift_ft._pb import log_pb2
from swift_ft.errors import UsageError
from swift_ft.log.protocol import Reason
from swift_ft.tokens import Authority, NotAuthenticated, Revoked, Role
from swift_ft.tools import token as command
from swift_ft_services import authorization
from swift_ft_services.authorization import Audit, CallLimits, Rates
from swift_ft_services.program import Protection
from tests.patience import eventually
from tests.unit.log.append_call import opening
from tests.unit.security.test_gate import call
from tests.unit.security.world import JOB, Guarded, Keys


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def server(keys: Keys, trail: Path) -> Iterator[Guarded]:
    with Guarded(keys, audit=trail) as server:
        yield server


def lines(trail: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trail.read_text().splitlines()]


def fence(generation: int = 2, job: str = JOB) -> bytes:
    return log_pb2.FenceRequest(job=job, generation=generation).SerializeToString()


def test_the_trail_names_who_changed_something_and_who_was_denied(
    server: Guarded, keys: Keys, trail: Path
) -> None:
    good = keys.key.mint(JOB, [Role.COORDINATOR], 600, subject="coordinator-a", token_id="a" * 32)
    wrong_job = keys.key.mint("other", [Role.COORDINATOR], 600, subject="mallory", token_id="b" * 32)
    wrong_role = keys.key.mint(JOB, [Role.WRITER], 600, subject="rank", token_id="c" * 32)
    assert call(server.address, "Fence", fence(), good)[0] is grpc.StatusCode.OK
    assert call(server.address, "Inventory", log_pb2.InventoryRequest(job=JOB).SerializeToString(), good)[
        0
    ] is (grpc.StatusCode.OK)
    for token in (wrong_job, wrong_role, None, "nonsense"):
        assert call(server.address, "Fence", fence(), token)[0] is not grpc.StatusCode.OK
    eventually(lambda: len(lines(trail)) == 5)
    found = [
        (line["outcome"], line["call"], line["job"], line["subject"], line["token"]) for line in lines(trail)
    ]
    assert found[:3] == [
        ("allowed", "Fence", JOB, "coordinator-a", "a" * 32),
        ("denied", "Fence", JOB, "mallory", "b" * 32),
        ("denied", "Fence", JOB, "rank", "c" * 32),
    ]
    assert all(line[3:] == ("", "") for line in found[3:])
    assert {line["peer"] for line in lines(trail)} == {"ipv4:127.0.0.1"}
    assert [line.get("reason") for line in lines(trail)[1:]] == ["denied", "denied", *["unauthenticated"] * 2]
    assert good not in trail.read_text()
    assert stat.S_IMODE(trail.stat().st_mode) == 0o600


def test_a_stream_that_is_ended_is_in_the_trail(keys: Keys, trail: Path) -> None:
    token = keys.key.mint(JOB, [Role.WRITER], 600, subject="rank", token_id="d" * 32)
    with Guarded(keys, audit=trail) as server:
        assert call(server.address, "Append", opening(job="other"), token)[2] == Reason.DENIED
        (line,) = lines(trail)
    found = [line[name] for name in ("outcome", "call", "job", "subject")]
    assert found == ["denied", "Append", "other", "rank"]


def test_the_trail_is_bounded_and_follows_a_rotation(trail: Path, tmp_path: Path) -> None:
    audit = Audit(trail, "logserver", bytes_max=4000)
    for n in range(100):
        audit.allowed("/x/Fence", f"job{n}", "p", None)
    files = [trail, trail.with_name("audit.jsonl.1")]
    assert all(path.stat().st_size <= 2000 for path in files)
    assert lines(trail)[-1]["job"] == "job99"
    trail.rename(tmp_path / "taken")
    audit.allowed("/x/Fence", "after", "p", None)
    assert [line["job"] for line in lines(trail)] == ["after"]
    audit.close()


@pytest.mark.parametrize("kind", ["pipe", "directory", "link", "device", "gone"])
def test_something_else_in_its_place_stops_no_call_and_is_told_once(
    trail: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(authorization.events, "emit", lambda event, **_: told.append(event))
    audit = Audit(trail, "logserver")
    audit.allowed("/x/Fence", "before", "p", None)
    kept = tmp_path / "kept"
    trail.rename(kept)
    match kind:
        case "pipe":
            os.mkfifo(trail)
            reading = os.open(trail, os.O_RDONLY | os.O_NONBLOCK)
        case "directory":
            trail.mkdir()
        case "link":
            trail.symlink_to("/dev/full")
        case "device":
            trail.symlink_to(tmp_path / "to")
            (tmp_path / "to").symlink_to("/dev/full")
        case _:
            trail.parent.rename(tmp_path.with_name(tmp_path.name + "-gone"))
    for _ in range(5):
        audit.allowed("/x/Fence", "meanwhile", "p", None)
    assert told == ["audit_failed"]
    if kind == "pipe":
        os.close(reading)
    if kind == "gone":
        tmp_path.with_name(tmp_path.name + "-gone").rename(tmp_path)
    elif kind == "directory":
        trail.rmdir()
    else:
        trail.unlink()
    audit.allowed("/x/Fence", "after", "p", None)
    assert [line["job"] for line in lines(trail)] == ["after"]
    assert [line["job"] for line in lines(kept)] == ["before"]
    audit.close()


def test_a_line_for_which_there_is_no_room_leaves_no_part_of_it(
    trail: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = Audit(trail, "logserver")
    audit.allowed("/x/Fence", "before", "p", None)
    whole = os.write

    def little(fd: int, data: bytes) -> int:
        return whole(fd, data[:20])

    monkeypatch.setattr(authorization.os, "write", little)
    audit.allowed("/x/Fence", "meanwhile", "p", None)
    monkeypatch.undo()
    audit.allowed("/x/Fence", "after", "p", None)
    assert [line["job"] for line in lines(trail)] == ["before", "after"]
    audit.close()


def test_a_flood_of_denials_is_counted(trail: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorization, "_DENIALS_PER_S", 1.0)
    audit = Audit(trail, "logserver")
    for _ in range(1000):
        audit.denied("/x/Fence", "j", "p", None, "denied")
    assert len(lines(trail)) < 10
    audit.close()


def test_a_trail_that_cannot_be_written_stops_nobody(keys: Keys, trail: Path, tmp_path: Path) -> None:
    for bad in (tmp_path, Path("/nowhere/at/all")):
        with pytest.raises(UsageError, match="--audit"):
            Audit(bad, "logserver")
    os.mkfifo(trail)
    with pytest.raises(UsageError, match="--audit"):
        Audit(trail, "logserver")
    full = Audit(tmp_path / "full", "logserver")
    os.close(full._fd)
    full._fd = os.open("/dev/full", os.O_WRONLY)
    full._path = Path("/dev/full")
    full.allowed("/x/Fence", "j", "p", None)
    full.close()


def test_a_revoked_token_does_not_count_from_the_next_look_on(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "REFRESH_S", 0.0)
    listed = tmp_path / "revoked"
    with pytest.raises(UsageError, match="--revoked"):
        Revoked(listed)
    listed.write_text("# nobody yet\n")
    one, other, third = (
        keys.key.mint(JOB, [Role.WRITER], 600, subject=subject, token_id=char * 32)
        for subject, char in (("anna", "1"), ("bert", "2"), ("bert", "3"))
    )
    revoked = Revoked(listed)
    authority = Authority(keys.verifying, revoked)
    for token in (one, other, third):
        authority.grant(token)
    listed.write_text(f"{'1' * 32}  # lost\n")
    with pytest.raises(NotAuthenticated, match="was revoked") as refused:
        authority.grant(one)
    assert refused.value.grant is not None
    assert refused.value.grant.subject == "anna"
    authority.grant(other)
    listed.write_text("sub:bert\n")
    for token in (other, third):
        with pytest.raises(NotAuthenticated, match="was revoked"):
            authority.grant(token)
    authority.grant(one)
    listed.unlink()  # what it last said counts
    with pytest.raises(NotAuthenticated):
        authority.grant(other)


def test_a_stream_ends_when_its_token_is_revoked(keys: Keys, tmp_path: Path) -> None:
    listed = tmp_path / "revoked"
    listed.write_text("")
    token = keys.key.mint(JOB, [Role.COORDINATOR], 600, token_id="e" * 32)
    with Guarded(keys, revoked=listed) as server:
        assert call(server.address, "Fence", fence(), token)[0] is grpc.StatusCode.OK
        listed.write_text("e" * 32)
        eventually(lambda: call(server.address, "Fence", fence(), token)[0] is not grpc.StatusCode.OK)


def test_a_token_may_begin_so_many_calls_a_second(keys: Keys) -> None:
    one, other = (keys.mint([Role.COORDINATOR]) for _ in range(2))
    request = log_pb2.StatusRequest(job=JOB).SerializeToString()
    with Guarded(keys, limits=CallLimits(per_token_s=0.5)) as server:
        assert call(server.address, "Status", request, one)[0] is grpc.StatusCode.OK
        code, words, reason = call(server.address, "Status", request, one)
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.LIMIT)
        assert "--calls-per-token-s" in words
        assert call(server.address, "Status", request, other)[0] is grpc.StatusCode.OK


def test_rates() -> None:
    rates = Rates(10.0)
    assert sum(rates.takes("a", 0.0) for _ in range(100)) == 20
    assert sum(rates.takes("a", 1.0) for _ in range(100)) == 10
    assert sum(Rates(0.0).takes("a", 0.0) for _ in range(100)) == 100


def test_tokens_have_a_subject_and_an_id(
    keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "token"
    flags = ["--key", str(keys.signing), "--job", JOB, "--role", "writer", "--out", str(out)]
    assert command.main([*flags, "--subject", "anna"]) == 0
    token_id = capsys.readouterr().err.split()[-1]
    grant = Authority(keys.verifying).grant(out.read_text().strip())
    assert (grant.subject, grant.token_id) == ("anna", token_id)
    assert command.main([*flags, "--subject", "a\nb"]) == 2
    assert command.main([*flags, "--subject", "x" * 200]) == 2


def test_a_list_of_revoked_tokens_needs_tokens(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--revoked"):
        Protection(listen="127.0.0.1:0", revoked=tmp_path / "revoked")
