"""What others say, as it is shown."""

import pytest

from swift_ft.text import one_line, show, size_words, tell, text_of, time_words

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


def test_sizes_and_durations() -> None:
    assert [size_words(size) for size in (0, 999, 999.96, 1_234_567, 5e15)] == [
        *("0 B", "999 B", "1 kB", "1.235 MB", "5000 TB")
    ]
    assert [time_words(seconds) for seconds in (0, 0.0123456, 119.6, 5400, 7200, 1e6)] == [
        *("0 s", "0.0123 s", "120 s", "90 min", "2 h", "11.6 d")
    ]
