"""Command lines: what every program refuses alike."""

import pytest

from swift_ft.cli_parser import Parser
from swift_ft.errors import UsageError
from swift_ft.launch import command


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "soon"])
def test_a_number_of_seconds_is_a_number(text: str) -> None:
    """No comparison finds anything wrong with nan: a log server was to sync every nan seconds."""
    parser = Parser(prog="swift-ft it", description="It.")
    parser.add_argument_group("times").add_argument("--every", type=float)
    with pytest.raises(UsageError, match=f"argument --every: invalid float value: {text!r}"):
        parser.parse_args([f"--every={text}"])
    with pytest.raises(UsageError, match=r"argument --monitor-interval.*: invalid float value"):
        command.make_plan(["--coordinator=127.0.0.1:1", f"--monitor-interval={text}", "train.py"])
    assert parser.parse_args(["--every=0.5"]).every == 0.5
