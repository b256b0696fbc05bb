"""Token files that are made for another user: whose they are, from when on, and who may ask for it."""

import grp
import os
import pwd
import stat
import time
from pathlib import Path

import pytest

from swift_ft.credentials import Renewal
from swift_ft.errors import UsageError
from swift_ft.tokens import Owner, write_file
from swift_ft.tools import token
from tests.unit.security.world import JOB, RANK, Keys

OTHER = pwd.getpwnam("nobody")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def owner_of(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


def test_an_owner_is_a_user_with_his_group_or_another_by_name_or_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    group = grp.getgrgid(0)
    for user in (OTHER.pw_name, str(OTHER.pw_uid)):
        assert Owner.parse(user, "--owner") == Owner(OTHER.pw_uid, OTHER.pw_gid)
        for name in (group.gr_name, str(group.gr_gid)):
            assert Owner.parse(f"{user}:{name}", "--owner") == Owner(OTHER.pw_uid, group.gr_gid)
    for text in ("nobody-of-that-name", "nobody:no-such-group", ":", "nobody:", "4294967295", "9" * 30):
        with pytest.raises(UsageError, match="no such user or group"):
            Owner.parse(text, "--owner")


def test_only_root_gives_files_away(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: OTHER.pw_uid + 1)
    out = keys.directory / "rank.token"
    words = ["--key", str(keys.signing), "--job", JOB, "--role", "writer", "--out", str(out)]
    assert token.main([*words, "--owner", OTHER.pw_name]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "only root" in said
    assert not out.exists()


def test_an_owner_is_of_a_file(keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    me = str(os.geteuid())
    words = ["--key", str(keys.signing), "--job", JOB, "--role", "writer"]
    assert token.main([*words, "--owner", me]) == 2
    assert "name it with --out FILE" in capsys.readouterr().err
    assert token.main(["--new-key", str(keys.directory), "--owner", me]) == 2


def test_a_key_needs_a_directory(keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    assert token.main(["--new-key", str(keys.signing)]) == 2
    said = capsys.readouterr().err
    assert (
        said
        == f"swift: token: --new-key {keys.signing}: Not a directory; name a directory that can be written\n"
    )


@as_root
def test_the_file_is_its_owners_before_the_token_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    chown = os.fchown

    def watched(fd: int, uid: int, gid: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        chown(fd, uid, gid)

    monkeypatch.setattr(os, "fchown", watched)
    out = tmp_path / "t"
    write_file(out, b"secret", secret=True, owner=Owner(OTHER.pw_uid, OTHER.pw_gid))
    assert sizes == [0]
    assert owner_of(out) == (OTHER.pw_uid, OTHER.pw_gid, 0o600)


def test_what_lies_where_the_file_is_made_is_not_written_to(tmp_path: Path) -> None:
    """Whoever may write to the directory could have put there a link to somebody else's file."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    os.link(victim, tmp_path / f".t.{os.getpid()}")
    write_file(tmp_path / "t", b"secret", secret=True)
    assert victim.read_text() == "mine"
    assert (tmp_path / "t").read_bytes() == b"secret"


@as_root
def test_each_renewed_file_is_its_owners(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    out = keys.directory / "rank.token"
    renewal = Renewal(keys.signing, out, JOB, RANK, 60, Owner(OTHER.pw_uid, OTHER.pw_gid))
    began = time.time()
    for ahead in (0, 31):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: began + ahead)
        assert renewal.turn()
        assert owner_of(out) == (OTHER.pw_uid, OTHER.pw_gid, 0o600)


@as_root
def test_the_command_makes_it_for_another_user(keys: Keys) -> None:
    out = keys.directory / "rank.token"
    words = ["--key", str(keys.signing), "--job", JOB, "--role", "writer", "--out", str(out)]
    assert token.main([*words, "--owner", OTHER.pw_name]) == 0
    assert owner_of(out) == (OTHER.pw_uid, OTHER.pw_gid, 0o600)
    config = token.parse([*words, "--renew", "--owner", OTHER.pw_name])
    assert config.owner == Owner(OTHER.pw_uid, OTHER.pw_gid)
    assert config.renew
