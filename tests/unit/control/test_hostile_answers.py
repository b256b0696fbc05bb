"""Answers that mean the terminal, or that no coordinator of this version gives: our own lines alone, no traceback."""

import json
import math
import re
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from swift_ft._pb import coordinator_pb2, log_pb2
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.log import admin
from swift_ft.tools import inspect, status
from tests.descriptors import is_map, is_repeated


def main_of(which: str, argv: list[str]) -> int:
    return status.main(argv, which)


JOBS, LOGS = partial(main_of, "jobs"), partial(main_of, "logs")

EVIL = "x\x1b[2J\x1b]0;title\x07\nFORGED: all is well\r\x9b1A\u202e\u2028FORGED\x00"
MOVES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]")
NUMBERS = (0, 1, -1, (1 << 31) - 1, (1 << 63) - 1, 99)


def filled(message: Message, number: int, depth: int = 4) -> Any:
    """Every field set: texts are evil, states unknown, numbers odd."""
    for field in message.DESCRIPTOR.fields:
        if is_map(field) or (field.message_type is not None and depth == 0):
            continue
        if field.message_type is not None:
            inner = getattr(message, field.name)
            filled(inner.add() if is_repeated(field) else inner, number, depth - 1)
            continue
        value = _value(field, number)
        if is_repeated(field):
            getattr(message, field.name).extend([value, value])
        else:
            setattr(message, field.name, value)
    return message


def _value(field: Any, number: int) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return EVIL if field.type == FieldDescriptor.TYPE_STRING else EVIL.encode()
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300)[number]
    wide = field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
    signed = field.cpp_type in (
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_ENUM,
    )
    value = NUMBERS[number]
    value = value if wide else min(value, (1 << 31) - 1)
    return value if signed else max(value, 0)


@pytest.mark.parametrize("number", range(len(NUMBERS)))
@pytest.mark.parametrize(
    ("main", "call", "reply"),
    [
        (status.main, "status", coordinator_pb2.StatusReply),
        (LOGS, "status", coordinator_pb2.StatusReply),
        (JOBS, "jobs", coordinator_pb2.JobsReply),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_every_field_of_an_answer_is_shown_as_it_is_meant_to_be(
    main: Callable[[list[str]], int],
    call: str,
    reply: Callable[[], Message],
    number: int,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = filled(reply(), number)
    monkeypatch.setattr(CoordinatorClient, call, lambda self: answer)
    flags = ["--coordinator", "127.0.0.1:1", *([] if main is JOBS else ["--job", "j"])]
    assert main([*flags, *(["--json"] if as_json else [])]) == 0
    shown = capsys.readouterr().out
    assert not MOVES.search(shown)
    assert not any(line.startswith("FORGED") for line in shown.splitlines())
    if as_json:
        assert EVIL in _texts(json.loads(shown))


def _texts(found: Any) -> list[str]:
    if isinstance(found, str):
        return [found]
    if isinstance(found, dict):
        return [text for one in found.items() for text in _texts(list(one))]
    return [text for one in found for text in _texts(one)] if isinstance(found, list) else []


def test_what_a_log_server_says_of_itself_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = filled(log_pb2.StatusReply(), 1)
    monkeypatch.setattr(admin, "status", lambda *_, **_options: told)
    monkeypatch.setattr(
        admin,
        "inventory",
        lambda *_: [filled(log_pb2.StreamInventory(), 1)],
    )
    assert inspect.main(["--server", "127.0.0.1:1"]) in (0, 1)
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert not MOVES.search(text)
        assert not any(line.startswith("FORGED") for line in text.splitlines())
    assert "FORGED" in said.out


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND]
)
def test_an_error_of_a_server_is_one_line(
    code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_request: bytes, context: Any) -> bytes:
        context.abort(code, EVIL)
        return b""

    class Everything(grpc.GenericRpcHandler):
        def service(self, _details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(refuse)

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Everything()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert status.main(["--coordinator", address, "--job", "j"]) in (2, 3)
        assert inspect.main(["--server", address]) in (2, 3)
    finally:
        server.stop(None).wait()
    said = capsys.readouterr()
    assert said.out == ""
    ours, theirs = said.err.splitlines()
    assert "FORGED" in ours
    assert "FORGED" in theirs
    assert not MOVES.search(said.err)
