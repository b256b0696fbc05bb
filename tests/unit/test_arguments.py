"""Command lines: what every program refuses alike."""

from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft.cli_parser import Parser, local_directory
from swift_ft.errors import UsageError
from swift_ft.launch import command
from swift_ft.tools import export
from swift_ft.train.config import checkpoint_directory
from swift_ft_services.coordinator import __main__ as coordinator
from swift_ft_services.logserver import __main__ as logserver


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


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket", "az://container/run", "file:///tmp/run"])
@pytest.mark.parametrize("program", ["run", "export", "rank", "log server", "coordinator"])
def test_an_object_store_is_refused_where_a_directory_is_expected(
    program: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a path it named a folder `./s3:`, in which the checkpoints were written."""
    monkeypatch.setenv("SWIFT_CHECKPOINT_DIR", url)
    calls: dict[str, Callable[[], object]] = {
        "run": lambda: command.make_plan(
            ["--coordinator=127.0.0.1:1", "--job=j", f"--checkpoint-dir={url}", "train.py"]
        ),
        "export": lambda: export.parse([f"--checkpoint-dir={url}", "--job=j", "out"]),
        "rank": lambda: checkpoint_directory("j"),
        "log server": lambda: logserver.parse([f"--directory={url}"]),
        "coordinator": lambda: coordinator.parse([f"--directory={url}"]),
    }
    with pytest.raises(UsageError, match=rf"{url} is a URL, and only directories are supported"):
        calls[program]()


def test_a_directory_may_have_a_colon_in_its_name() -> None:
    assert local_directory("/data/s3:/a//b") == Path("/data/s3:/a/b")
