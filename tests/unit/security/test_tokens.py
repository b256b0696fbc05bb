"""Tokens: what is taken, what is not, and that nobody but the signing key makes one."""

import os
import stat
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft import tokens
from swift_ft.errors import UsageError
from swift_ft.tokens import Authority, Grant, NotAuthenticated, Role, SigningKey, new_key
from tests.unit.security.world import JOB, RANK, Keys


@pytest.fixture
def authority(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """It looks at its keys for every token."""
    monkeypatch.setattr(tokens, "REFRESH_S", 0.0)
    return Authority(keys.verifying)


def test_what_a_token_says_comes_back(keys: Keys) -> None:
    grant = Authority(keys.verifying).grant(keys.mint(RANK, generation=7))
    assert (grant.job, grant.roles, grant.generation_max) == (JOB, frozenset(RANK), 7)
    assert grant.covers(JOB, 7)
    assert not grant.covers(JOB, 8), "a generation above"
    assert not grant.covers("job2", 7)
    everywhere = Authority(keys.verifying).grant(keys.mint([Role.COORDINATOR], tokens.EVERY_JOB))
    assert everywhere.covers("any", 1 << 60)


def test_a_key_is_its_owners_alone(keys: Keys) -> None:
    assert stat.S_IMODE(keys.signing.stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.signing.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(keys.file("a", "x").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o601])
def test_a_key_that_others_can_reach_is_refused_in_one_line(keys: Keys, mode: int) -> None:
    keys.signing.chmod(mode)
    with pytest.raises(UsageError, match="chmod 600") as caught:
        SigningKey.load(keys.signing, "--key")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("user", "owner", "mode", "exposed"),
    [
        *((7300, 0, mode, False) for mode in (0o400, 0o600, 0o440, 0o640)),
        *((7300, 0, mode, True) for mode in (0o660, 0o650, 0o444, 0o641)),
        *((7300, 7300, mode, False) for mode in (0o400, 0o600)),
        *((7300, 7300, mode, True) for mode in (0o440, 0o640, 0o620, 0o604)),
        *((0, 0, mode, False) for mode in (0o400, 0o600)),
        *((0, 0, mode, True) for mode in (0o440, 0o640)),
    ],
)
def test_roots_group_may_read_a_key_and_nobodys_else(
    user: int, owner: int, mode: int, exposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for PostgreSQL. The kubelet's are 0440."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert tokens.is_exposed(os.stat_result((mode, 0, 0, 1, owner, 7300, 0, 0, 0, 0))) == exposed


def test_an_expired_token_is_refused_also_if_it_is_known(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(keys.verifying)
    with pytest.raises(NotAuthenticated, match="expired"):
        authority.grant(keys.mint(RANK, lifetime_s=-1))
    token = keys.mint(RANK, lifetime_s=60)
    authority.grant(token)
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(NotAuthenticated, match="expired"):
        authority.grant(token)


def test_a_jump_of_the_clock_does_not_end_what_was_granted(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(keys.verifying)
    token = keys.mint(RANK, lifetime_s=60)
    authority.grant(token)
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    authority.grant(token)


def test_a_key_that_is_removed_while_its_token_is_verified(
    keys: Keys, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key(keys.directory)
    verify = authority._verify

    def slowly(token: str, now: float) -> Grant:
        grant = verify(token, now)
        (keys.verifying / keys.signing.name).unlink(missing_ok=True)
        authority._refresh(now)  # as another call does
        return grant

    monkeypatch.setattr(authority, "_verify", slowly)
    token = keys.mint(RANK)
    authority.grant(token)
    with pytest.raises(NotAuthenticated, match="not signed by a key that counts"):
        authority.grant(token)


def test_a_key_that_is_removed_revokes_its_tokens(keys: Keys, authority: Authority) -> None:
    token = keys.mint(RANK)
    authority.grant(token)
    new_key(keys.directory)
    authority.grant(token)
    (keys.verifying / keys.signing.name).unlink()
    with pytest.raises(NotAuthenticated, match="not signed by a key that counts"):
        authority.grant(token)


def test_a_key_is_rotated_without_a_gap(keys: Keys, authority: Authority) -> None:
    old = keys.mint(RANK)
    newer = SigningKey.load(new_key(keys.directory)[0], "--key").mint(JOB, RANK, 60)
    assert authority.grant(old).job == authority.grant(newer).job == JOB


def test_a_directory_that_loses_all_its_keys_lets_nobody_in(keys: Keys, authority: Authority) -> None:
    token = keys.mint(RANK)
    (keys.verifying / keys.signing.name).write_text("not a key")
    with pytest.raises(NotAuthenticated):
        authority.grant(token)
    with pytest.raises(UsageError, match="no public key"):
        Authority(keys.verifying)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, str]:
    keys = Keys(tmp_path_factory.mktemp("keys"))
    return Authority(keys.verifying), keys.mint(RANK)


@given(text=st.text(max_size=200))
def test_garbage_is_refused(lasting: tuple[Authority, str], text: str) -> None:
    with pytest.raises(NotAuthenticated):
        lasting[0].grant(text)


@given(data=st.data())
def test_a_changed_token_is_refused(lasting: tuple[Authority, str], data: st.DataObject) -> None:
    authority, token = lasting
    body = token.rpartition(".")[0]  # the last character of the signature has bits that say nothing
    at = data.draw(st.integers(0, len(body) - 1))
    changed = token[:at] + data.draw(st.characters(min_codepoint=33, max_codepoint=126)) + token[at + 1 :]
    if changed != token:
        with pytest.raises(NotAuthenticated):
            authority.grant(changed)


def test_what_is_remembered_is_bounded(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_GRANTS_MAX", 8)
    authority = Authority(keys.verifying)
    for number in range(30):
        authority.grant(keys.mint(RANK, job=f"job{number}"))
        assert len(authority._grants) <= 8
