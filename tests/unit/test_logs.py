"""What services say on stderr: JSON that a program can read, and never a secret."""

import fcntl
import io
import json
import logging
import os
import re
import threading
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft import events
from swift_ft.logs import JSON, REMOVED, TEXT, Log, Redactor, level_of

SECRET = "s3cr3t-v4lue-0123456789"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_TOKEN", SECRET)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_object_on_one_line(environment: None) -> None:
    stream = io.StringIO()
    stop = Log("coordinator", JSON, logging.INFO, stream).start()
    before = events.now()
    events.emit("state", job="a", generation=2, reason="two\nlines", ranks=[{"rank": 1}])
    stop()
    events.emit("unheard")
    (line,) = lines(stream)
    at = datetime.fromisoformat(str(line["time"]))
    assert at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert before - 0.001 <= float(str(line["monotonic"])) <= events.now()
    assert (line["level"], line["role"], line["event"]) == ("info", "coordinator", "state")
    assert line["fields"] == {"job": "a", "generation": 2, "reason": "two\nlines", "ranks": [{"rank": 1}]}


def test_as_text_an_event_is_one_line_that_moves_no_cursor(environment: None) -> None:
    stream = io.StringIO()
    stop = Log("coordinator", TEXT, logging.INFO, stream).start()
    events.emit("suspect", job="a", reason="two\nlines\r\x1b[2J\x9b1A\u2028\u202e, \ud800 und größer")
    stop()
    assert stream.getvalue() == "WARNING suspect job=a reason=two lines  [2J 1A  ,   und größer\n"


def test_logging_and_exceptions_are_json_too(environment: None) -> None:
    stream = io.StringIO()
    log = Log("logserver", JSON, logging.INFO, stream)
    stop = log.start()
    try:
        raise ValueError("it broke")
    except ValueError as error:
        logging.getLogger("services.x").exception("append %s", "failed")
        log.uncaught(error)
    log.fatal("no space")
    stop()
    said, caught, fatal = lines(stream)
    assert (said["event"], said["level"], said["message"]) == ("log", "error", "append failed")
    for line in (said, caught):
        fields = line["fields"]
        assert isinstance(fields, dict)
        assert "ValueError: it broke" in fields["exception"]
    assert (fatal["event"], fatal["message"]) == ("fatal", "no space")


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (logging.WARNING, ["disk_full", "storage_failed"]),
        (logging.INFO, ["serving", "disk_full", "storage_failed"]),
    ],
)
def test_text_is_for_people_and_quiet(environment: None, level: int, shown: list[str]) -> None:
    stream = io.StringIO()
    stop = Log("logserver", TEXT, level, stream).start()
    events.emit("serving", address="127.0.0.1:1")
    events.emit("disk_full", reason="no space\nleft")
    events.emit("storage_failed", reason="EIO")
    stop()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == shown
    assert stream.getvalue().splitlines()[-1] == "ERROR storage_failed reason=EIO"


def test_levels() -> None:
    assert [level_of(event) for event in ("serving", "disk_full", "storage_failed")] == [20, 30, 40]
    assert [level_of(event) for event in ("log_server_lost", "log_server_added")] == [30, 20]


LEAKS = [
    {"token": SECRET},
    {"headers": {"Authorization": f"Bearer {SECRET}"}},
    {"metadata": [("x", 1), {"api-key": SECRET}]},
    {"reason": f"call failed: authorization: Bearer {SECRET} was sent"},
    {"reason": f"authorization: Basic {SECRET}"},
    {"reason": f"token={SECRET}, job=a"},
    {"reason": f"my_token: '{SECRET}'"},
    {"reason": f'{{"password": "{SECRET}"}}'},
    {f"the secret {SECRET}": 1},
    {"error": RuntimeError(f"client_secret={SECRET}")},
]


@pytest.mark.parametrize("log_format", [TEXT, JSON])
@pytest.mark.parametrize("fields", LEAKS, ids=[str(n) for n in range(len(LEAKS))])
def test_a_secret_is_never_written_by_its_name_or_its_words(
    log_format: str, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the environment's help: the value is known from what stands before it."""
    stream = io.StringIO()
    log = Log("logserver", log_format, logging.DEBUG, stream)
    if "the secret" in next(iter(fields)):
        monkeypatch.setenv("SWIFT_TOKEN", SECRET)
        log = Log("logserver", log_format, logging.DEBUG, stream)
    log.say("event", logging.INFO, fields=fields)
    assert REMOVED in stream.getvalue()
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize("log_format", [TEXT, JSON])
def test_a_secret_of_the_environment_is_never_written_wherever_it_stands(
    log_format: str, environment: None
) -> None:
    stream = io.StringIO()
    log = Log("logserver", log_format, logging.DEBUG, stream)
    stop = log.start()
    events.emit("event", path=f"/x/{SECRET}/y", many=[SECRET], level_value=1)
    logging.getLogger("x").error("sent %s", SECRET)
    log.fatal(f"refused {SECRET}")
    try:
        raise RuntimeError(SECRET)
    except RuntimeError as error:
        logging.getLogger("x").exception("failed")
        log.uncaught(error)
    stop()
    assert SECRET not in stream.getvalue()
    assert stream.getvalue().count(REMOVED) >= 5


def test_innocent_words_stay() -> None:
    redactor = Redactor({"TOKEN": "abc", "PATH": "/usr/bin"})
    for text in ("a stream_tag 12 of abc", "/usr/bin", "basic research", "tokens of the model: 12 per line"):
        assert redactor.text(text) == text
    assert redactor.value({"key": "step 3", "stream": "s0.F"}) == {"key": "step 3", "stream": "s0.F"}


@pytest.mark.parametrize("name", ["SWIFT_CREDENTIALS", "SWIFT_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS"])
def test_where_secrets_are_is_none(name: str) -> None:
    assert (
        Redactor({name: "/etc/swift"}).text("/etc/swift/tls.key: no such file")
        == "/etc/swift/tls.key: no such file"
    )
    assert Redactor({f"{name}_VALUE": SECRET}).text(SECRET) == REMOVED


@given(
    st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=8), st.sampled_from(["", "'", '"'])
)
def test_whatever_the_token_is(token: str, quote: str) -> None:
    redactor = Redactor({})
    said = redactor.text(
        f"authorization={quote}{token}{quote}; x-token: {quote}{token}{quote} Bearer {token} end"
    )
    assert not re.search(rf"(?<![a-z\[]){re.escape(token)}(?!\])", said) or token in (
        REMOVED,
        "authorization",
    )
    assert said.count(REMOVED) == 3
    assert said.endswith(" end")


class Full(io.StringIO):
    """Fails at so many writes."""

    full = 0

    def write(self, text: str) -> int:
        if self.full:
            self.full -= 1
            raise BrokenPipeError
        return super().write(text)


@pytest.mark.parametrize("log_format", [TEXT, JSON])
def test_a_stderr_that_fails_troubles_nobody_and_says_what_is_missing(
    log_format: str, environment: None
) -> None:
    stream = Full()
    stop = Log("logserver", log_format, logging.INFO, stream).start()
    stream.full = 2
    for number in range(4):
        events.emit("storage_failed", reason=f"EIO {number}")
    stop()
    lost, first, second = stream.getvalue().splitlines()
    if log_format == TEXT:
        assert (lost, first) == ("WARNING lines_lost count=2", "ERROR storage_failed reason=EIO 2")
        assert second == "ERROR storage_failed reason=EIO 3"
    else:
        said = [json.loads(line) for line in (lost, first, second)]
        assert [line["event"] for line in said] == ["lines_lost", "storage_failed", "storage_failed"]
        assert said[0]["fields"] == {"count": 2}
        assert said[1]["fields"] == {"reason": "EIO 2"}


@pytest.mark.parametrize("size", [80, 5000])
def test_a_pipe_that_nobody_reads_holds_nobody_up(environment: None, size: int) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as unread:
        log = Log("coordinator", TEXT, logging.INFO, stream)

        def say(count: int) -> None:
            for number in range(count):
                log.say("refused", logging.WARNING, fields={"n": number, "x": "x" * size})

        saying = threading.Thread(target=say, args=(200,), daemon=True)
        saying.start()
        saying.join(10)
        assert not saying.is_alive()
        os.set_blocking(reading, False)
        first = unread.read()
        whole = first.splitlines() if first.endswith("\n") else first.splitlines()[:-1]
        log.say("refused", logging.WARNING, fields={"n": "last"})
        lost, last = unread.read().strip().splitlines()
        assert last == "WARNING refused n=last"
        assert lost == f"WARNING lines_lost count={200 - len(whole)}"
