"""Which connections of a process an abort of gloo's shuts."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from swift_ft.comm.gloo import Sockets

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(stack: ExitStack) -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = stack.enter_context(socket.create_connection(server.getsockname()))
        theirs = stack.enter_context(server.accept()[0])
    theirs.settimeout(20.0)
    return ours, theirs


def lives(pair: Pair) -> bool:
    try:
        pair[0].sendall(b"x")
    except BrokenPipeError:
        return False
    return pair[1].recv(1) == b"x"


def test_only_those_that_were_opened_while_it_was_connected_are_shut(stack: ExitStack) -> None:
    before, ports = connected(stack), list[int]()
    sockets = Sockets(lambda: ports)
    serving, own = connected(stack), connected(stack)
    ports += [each.getsockname()[1] for each in serving]
    sockets.finish_connecting()
    after = connected(stack)
    sockets.shut()
    assert [lives(pair) for pair in (before, serving, own, after)] == [True, True, False, True]


def test_one_that_gets_the_number_of_a_closed_one_meanwhile_is_not_shut(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo closes what was shut, and the trainer opens another connection at the same time."""
    sockets = Sockets(tuple)
    first, second = connected(stack), connected(stack)
    sockets.finish_connecting()
    trainers = connected(stack)
    real = os.dup

    def slow(descriptor: int) -> int:
        if descriptor == first[0].fileno():  # the second one's is listed already
            os.dup2(trainers[0].fileno(), second[0].fileno())
        return real(descriptor)

    monkeypatch.setattr(os, "dup", slow)
    sockets.shut()
    assert lives(trainers)
    assert not lives(first)
