"""Command lines: what every program refuses alike."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft.cli_parser import Parser, local_directory, number
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


@pytest.mark.parametrize(
    ("text", "words"),
    [("n=0", "1 to 9"), (f"n={'9' * 400}", "1 to 9"), ("f=-1", "0 or more"), ("f=nan", "0"), ("f=inf", "0")],
)
def test_a_number_is_in_its_range(text: str, words: str) -> None:
    parser = Parser(prog="swift-ft it", description="It.")
    parser.add_argument("--n", type=number(int, 1, 9))
    parser.add_argument("--f", type=number(float, 0))
    with pytest.raises(UsageError, match=f"argument --{text[0]}: {text[2:42]}: {words}"):
        parser.parse_args([f"--{text}"])
    assert vars(parser.parse_args(["--n=9", "--f=1e3"])) == {"n": 9, "f": 1000.0}


@pytest.mark.parametrize("program", ["log server", "coordinator"])
@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket", "az://container/run", "file:///tmp/run"])
def test_an_object_store_is_refused_where_a_directory_is_expected(program: str, url: str) -> None:
    """As a path it named a folder `./s3:`, in which files were written."""
    calls: dict[str, Callable[[], object]] = {
        "log server": lambda: logserver.parse([f"--directory={url}"]),
        "coordinator": lambda: coordinator.parse([f"--directory={url}"]),
    }
    with pytest.raises(UsageError, match=rf"{url} is a URL, and this takes only directories"):
        calls[program]()


def of_checkpoints(program: str, url: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What a program makes of a place for checkpoints."""
    if program == "run":
        flags = ["--coordinator=127.0.0.1:1", "--job=j", f"--checkpoint-dir={url}", __file__]
        return command.make_plan(flags).job.checkpoint_dir
    if program == "export":
        place: str = export.parse([f"--checkpoint-dir={url}", "--job=j", "out"]).directory
        return place.removesuffix("/j")
    monkeypatch.setenv("SWIFT_CHECKPOINT_DIR", url)
    return checkpoint_directory("j").removesuffix("/j")


@pytest.mark.parametrize("program", ["run", "export", "rank"])
def test_checkpoints_may_be_in_an_object_store(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("s3://bucket/a/run", "gs://bucket", "az://container/run"):
        for text in (url, f"{url}/"):
            assert of_checkpoints(program, text, monkeypatch) == url
    for url in ("file:///tmp/run", "hdfs://host/run", "s3a://bucket"):
        with pytest.raises(UsageError, match=rf"{url} is a URL, and this takes only directories"):
            of_checkpoints(program, url, monkeypatch)
    for url in ("s3://", "s3:///run", "s3://bucket/../run", "s3://bucket/a//run", "s3://bucket/run?x=1"):
        with pytest.raises(UsageError, match="names no object store: give s3://BUCKET/PREFIX"):
            of_checkpoints(program, url, monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        UsageError, match=r"s3://bucket: obstore is not installed: pip install 'swift-ft\[objects\]'"
    ):
        of_checkpoints(program, "s3://bucket", monkeypatch)


def test_a_directory_may_have_a_colon_in_its_name() -> None:
    assert local_directory("/data/s3:/a//b") == Path("/data/s3:/a/b")
