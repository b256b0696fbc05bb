"""Files that a user names: whatever is there, every command answers soon, in one line that names it; exit code 2."""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swift_ft.errors import UsageError
from swift_ft.files import GIVEN_BYTES_MAX
from swift_ft.lab.failures import schedule as failures
from swift_ft.lab.plan import command as plan
from swift_ft.text import DEPTH_MAX, parse_json

NONE = {
    "deep": (b"[" * 200_000, "nested too deeply"),
    "deeper than is written again": (
        b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1),
        "nested too deeply",
    ),
    "deep in objects": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested too deeply"),
    "many digits": (b'{"a": ' + b"1" * 5000 + b"}", "a number has too many digits"),
    "NaN": (b'{"a": NaN}', "NaN is no number"),
    "infinite": (b'{"a": [-Infinity]}', "-Infinity is no number"),
    "infinite by its exponent": (b'{"a": 1e999}', "1e999 is too large a number"),
    "half of a character": (b'{"a": "\\ud800"}', "half of a character"),
    "half of a character in a name": (b'{"\\udfff": 1}', "half of a character"),
    "no UTF-8": (b'{"a": "\xed\xa0\x80"}', "not UTF-8 at byte"),
    "twice": (b'{"a": 1, "a": 2}', "a: comes twice"),
    "cut off": (b'{"a": ', "not JSON: line 1, column 7"),
}


@pytest.mark.parametrize(("content", "words"), NONE.values(), ids=NONE)
def test_json_that_nobody_could_write_again_is_refused_in_one_line(content: bytes, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_json(content, "--flag FILE")
    assert str(raised.value).startswith("--flag FILE: ")
    assert words in str(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 200


def test_json_as_people_write_it() -> None:
    document = {"é": [1, -2.5e-3, True, None, "\U0001f600\ud7ff"], "deep": {"a": {}}}
    assert (
        parse_json('{"é": [1, -2.5e-3, true, null, "\\ud83d\\ude00\\ud7ff"], "deep": {"a": {}}}') == document
    )
    assert parse_json("[" * DEPTH_MAX + "]" * DEPTH_MAX)


# --- commands ---

HEAD = b"node,start,end,kind,class\n"
DEEP = b'{"node_id": %b, "event_time": 1, "event_type": "fault_start", "fault_type": {"Class": "x"}}'
EVENT = b'[{"node_id": "a", "event_time": %b, "event_type": "fault_start", "fault_type": {"Class": "x"}}]'
HOSTILE_TRACES = {
    "deep": b"[" + DEEP % (b"[" * 900 + b"]" * 900) + b"]",
    "deeper": b"[" * 200_000,
    "a schedule of numbers": b'{"schedule": [[], 1]}',
    "a schedule that is an object": b'{"schedule": {"rank=1,step=2": 1}}',
    "5,000 digits": EVENT % (b"1" * 5000),
    "400 digits": EVENT % (b"1" * 400),
    "NaN": EVENT % b"NaN",
    "NaN in a text": EVENT % b'"nan"',
    "a time before the first": EVENT % b"-4",
    "half of a character": EVENT.replace(b'"a"', b'"\\ud800"') % b"1",
    "no text": b"\xff\xfe\x00",
    "NaN in a row": HEAD + b"a,nan,2,,\n",
    "5,000 digits in a row": HEAD + b"a," + b"1" * 5000 + b",2,,\n",
    "a host of 5,000 digits": HEAD + b"1" * 5000 + b",1,2,,\n2,soon,,,\n",
    "a long kind": HEAD + b"a,1,2," + b"k" * 100_000 + b",\n",
    "a long cell": HEAD + b"a" * 200_000 + b",1,2,,\n",
    "an open quote": HEAD + b'"a,1,2,,\n' * 1000,
    "a long line": b"rank=" + b"1" * 1_000_000 + b",step=1\n",
    "many lines": b"rank=1,step=1\n" * 1000,
    "large": b" " * (GIVEN_BYTES_MAX + 1),
    "rows without end": HEAD + b"\n" * (GIVEN_BYTES_MAX - 100),
}


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """A gigabyte more than there is."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What a command has said."""
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("\n")
    assert said.err.count("\n") == 1
    assert len(said.err) < 1000, "a person reads it"
    return said.err


@pytest.mark.timeout(30)
@pytest.mark.parametrize("content", HOSTILE_TRACES.values(), ids=HOSTILE_TRACES)
def test_a_hostile_trace_is_refused_in_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    assert failures.main([str(path), "--ranks", "4"]) == 2
    assert str(path) in one_line(capsys)


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def dangling(path: Path) -> Path:
    path.symlink_to("nowhere")
    return path


def looped(path: Path) -> Path:
    path.symlink_to(path.name)
    return path


NO_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a FIFO": (fifo, "Not a regular file"),
    "a device": (lambda _: Path("/dev/zero"), "Not a regular file"),
    "a directory": (lambda path: path.parent, "Is a directory"),
    "a dangling link": (dangling, "o such file"),
    "a link to itself": (looped, ""),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("make", "words"), NO_FILES.values(), ids=NO_FILES)
@pytest.mark.parametrize(
    "argv",
    [
        ["failures", "FILE", "--ranks", "4"],
        ["failures", "trace=FILE", "--ranks", "4"],
        ["plan", "FILE"],
    ],
    ids=" ".join,
)
def test_what_is_no_file_is_refused_in_one_line(
    argv: list[str],
    make: Callable[[Path], Path],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make(tmp_path / "given")
    program, *rest = [word.replace("FILE", str(path)) for word in argv]
    assert (plan.main(rest) if program == "plan" else failures.main(rest)) == 2
    said = one_line(capsys)
    assert str(path) in said
    assert words in said


def test_what_can_be_no_files_name_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list").write_bytes(b"trace=\x00,per=1\n")
    assert failures.main([str(tmp_path / "list"), "--ranks", "4"]) == 2
    assert "no file can have this name" in one_line(capsys)


def test_a_link_to_a_file_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").write_text("rank=1,step=2\n")
    (tmp_path / "link").symlink_to("there")
    assert failures.main([str(tmp_path / "link"), "--ranks", "4"]) == 0
    assert capsys.readouterr().out.startswith("rank=1,step=2")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("ranks", ["0", "-1", "65537", "1000000000000"])
@pytest.mark.parametrize("spec", ["every=exponential,mtbf=40,count=3", "rank=0,step=1"])
def test_no_job_has_so_many_ranks(ranks: str, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.main([spec, "--ranks", ranks]) == 2
    assert f"a job has 1 to 65536 ranks, not {ranks}" in one_line(capsys)
