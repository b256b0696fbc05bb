"""A replay in which nothing moves is found, and one that computes or reads is not."""

import threading
import time

from swift_ft.train.replay import Standstill, Stillness

LIMIT_S = 10.0


def test_what_counts_as_standing_still() -> None:
    still = Stillness(LIMIT_S, 0.0, (0, 0), 5.0)
    assert not still.observe(9.0, (0, 0), 5.1)
    assert still.observe(10.0, (0, 0), 5.1)


def test_whoever_moves_has_the_whole_time_again() -> None:
    still = Stillness(LIMIT_S, 0.0, (0, 0), 0.0)
    assert not still.observe(9.0, (0, 1), 0.0)
    assert not still.observe(18.0, (0, 1), 0.0)
    assert still.observe(19.0, (0, 1), 0.0)


def test_whoever_computes_is_not_still() -> None:
    still = Stillness(LIMIT_S, 0.0, 0, 0.0)
    assert not still.observe(10.0, 0, 8.0)
    assert not still.observe(19.0, 0, 8.0)
    assert still.observe(20.0, 0, 8.1)


def test_a_wait_of_the_trainers_is_refused_with_its_line() -> None:
    said: list[str] = []
    free = threading.Event()

    def refuse(why: str) -> None:
        said.append(why)
        free.set()

    with Standstill(0.05, lambda: 0, refuse, free.is_set):
        free.wait(60)  # the trainer's own
    assert len(said) == 1
    assert "stands still for 0.05 s, in test_standstill.py:" in said[0]
    assert "free.wait(60)" in said[0]


def test_a_replay_that_ends_is_left_alone() -> None:
    said: list[str] = []
    moved = iter(range(10**9))
    with Standstill(0.02, lambda: next(moved), said.append, lambda: False) as watch:
        time.sleep(0.1)
    watch._thread.join(60)
    assert said == []
