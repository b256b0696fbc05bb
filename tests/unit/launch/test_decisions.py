"""What the launcher does about an exit: the whole table."""

import pytest

from swift_ft.launch.decisions import (
    ATTEMPTS_MAX,
    CHECKS_MAX,
    RETURNS_MAX,
    Action,
    Situation,
    check_delay_s,
    delay_s,
    describe_exit,
    judge_exit,
    judge_place,
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


@pytest.mark.parametrize(
    ("failed", "changed", "action", "launcher_code"),
    [
        (1, {}, Action.REPLACE, 0),
        (
            CHECKS_MAX - 1,
            {"replacements_left": 0},
            Action.REPLACE,
            0,
        ),  # the loss has used one, its checks use none
        (CHECKS_MAX, {}, Action.STOP, 3),
        (CHECKS_MAX, {"may_shrink": True}, Action.VACANT, 0),
        (CHECKS_MAX, {"finished": True, "may_shrink": True}, Action.LOST, 1),
    ],
)
def test_what_becomes_of_a_place_that_is_not_fit(
    failed: int, changed: dict[str, int], action: Action, launcher_code: int
) -> None:
    verdict = judge_place("rank 2: no process can be started", failed, Situation(**{**FRESH, **changed}))
    assert (verdict.action, verdict.exit_code) == (action, launcher_code)
    assert verdict.reason.startswith("rank 2: no process can be started")


def test_a_place_is_checked_less_and_less_often() -> None:
    assert [check_delay_s(failed) for failed in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert sum(check_delay_s(failed) for failed in range(1, CHECKS_MAX)) == 31
