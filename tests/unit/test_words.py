"""What others say, as it is shown."""

import pytest

from swift_ft.text import one_line, show, tell, text_of

EVIL = "a\x1b[2J\nb\r\tc\x9b1A\u202e\u2028\u200f\ud800\U000e0041 größer \u4e2d"


def test_one_line_is_one_line() -> None:
    assert one_line(EVIL) == "a [2J b  c 1A      größer 中"
    assert one_line(ValueError("x\ny")) == "x y"


def test_several_lines_stay_where_they_are_meant() -> None:
    assert text_of("line 1\n\tline 2\x1b[2J\r") == "line 1\n\tline 2 [2J "


def test_what_is_shown_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    show(["one\ntwo", EVIL])
    tell(ValueError(EVIL))
    tell("three\nfour", "inspect")
    tell("five\n", "")
    said = capsys.readouterr()
    assert said.out == f"one two\n{one_line(EVIL)}\n"
    assert said.err == f"swift: {one_line(EVIL)}\ninspect: three four\nfive \n"
