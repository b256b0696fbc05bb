"""Durations: what is read, and each way to be refused in one line."""

import argparse

import pytest

from swift_ft.lab.command_line import duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5h", 5400.0),
        ("30min", 1800.0),
        ("264d", 264 * 86400.0),
        ("250ms", 0.25),
        ("1e3s", 1000.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1s", "3 weeks", "nan", "inf", "1e999", "0x10", "5m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write a time"):
        duration(text)
