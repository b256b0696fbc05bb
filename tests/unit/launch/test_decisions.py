"""What the launcher does about an exit: the whole table."""

import pytest

from swift.launch.decisions import (
    ATTEMPTS_MAX,
    RETURNS_MAX,
    Action,
    Situation,
    delay_s,
    describe_exit,
    judge_exit,
)

FRESH = {"replacements_left": 3, "attempts": 1, "has_run": True, "finished": False}


@pytest.mark.parametrize(
    ("exit_code", "changed", "action", "launcher_code"),
    [
        (0, {}, Action.DONE, 0),
        (0, {"replacements_left": 0, "attempts": 99}, Action.DONE, 0),
        (1, {}, Action.STOP, 1),
        (2, {}, Action.STOP, 2),
        (2, {"finished": True}, Action.STOP, 2),
        (3, {}, Action.REPLACE, 0),
        (3, {"has_run": False}, Action.STOP, 3),
        (4, {"has_run": False}, Action.REPLACE, 0),
        (-9, {}, Action.REPLACE, 0),
        (-9, {"has_run": False}, Action.REPLACE, 0),
        (-9, {"finished": True}, Action.LOST, 1),
        (1, {"finished": True, "can_return": True}, Action.LOST, 1),
        (-9, {"finished": True, "can_return": True}, Action.REPLACE, 0),
        (7, {"finished": True, "can_return": True, "attempts": RETURNS_MAX}, Action.LOST, 1),
        (-11, {"attempts": ATTEMPTS_MAX - 1}, Action.REPLACE, 0),
        (-11, {"attempts": ATTEMPTS_MAX}, Action.STOP, 1),
        (3, {"attempts": ATTEMPTS_MAX}, Action.STOP, 3),
        (-9, {"replacements_left": 0}, Action.STOP, 1),
        (-9, {"replacements_left": 0, "finished": True}, Action.LOST, 1),
    ],
)
def test_verdicts(exit_code: int, changed: dict[str, int], action: Action, launcher_code: int) -> None:
    verdict = judge_exit(2, exit_code, Situation(**{**FRESH, **changed}))
    assert (verdict.action, verdict.exit_code) == (action, launcher_code)
    assert verdict.reason.startswith("rank 2: ") or action is Action.DONE


@pytest.mark.parametrize(
    ("exit_code", "words"), [(3, "exit code 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_exits_have_words(exit_code: int, words: str) -> None:
    assert describe_exit(exit_code) == words


def test_who_dies_again_and_again_waits_longer_and_never_for_ever() -> None:
    assert [delay_s(deaths) for deaths in range(1, 12)] == [0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert delay_s(10**6) == 30
