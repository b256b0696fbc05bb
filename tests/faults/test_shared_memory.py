"""Fault 46: what a writer on the server's machine may do with the memory that it has handed over."""

import os
import random
import threading

import grpc
import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.protocol import reason_of
from swift_ft.log.shared_memory import hand_over
from tests.faults.world import TIMEOUT_S, Server
from tests.shared_bodies import memfd
from tests.unit.log.append_call import Call
from tests.unit.log.clients import following, reading
from tests.unit.log.frames import STREAM, frame_of
from tests.unit.log.test_shared_memory import Sharing

SIZE = 1 << 20


def test_f46_memory_that_changes_while_it_is_read_is_never_acknowledged_wrongly(server: Server) -> None:
    chance = random.Random(46)
    memory = memfd(2 * SIZE)
    stop, calm = threading.Event(), threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            calm.wait(0.001)
            if not calm.is_set():
                os.pwrite(memory, os.urandom(8), chance.randrange(SIZE))

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    acknowledged: list[bytes] = []
    reasons: list[str] = []
    try:
        while len(acknowledged) < 5 or len(reasons) < 5:
            call = Sharing(server, memory)
            assert call.opened[STREAM] == len(acknowledged)
            if len(reasons) >= 5:
                calm.set()
            body = chance.randbytes(SIZE)
            call.put(len(acknowledged), 0, body)
            try:
                call.until_acked(len(acknowledged) + 1)
                acknowledged.append(body)
                call.end()
            except grpc.RpcError as error:
                reasons.append(reason_of(error))
    finally:
        stop.set()
        disturbing.join()
        os.close(memory)
    assert set(reasons) == {"corrupt"}
    server.stop()
    server.start()
    with reading(server.address) as reader, following(reader, STREAM, 0) as cursor:
        for step, body in enumerate(acknowledged):
            assert cursor.get(frame_of(step)[0].key, TIMEOUT_S, lambda: False).body == body
    assert not server.inventory().corrupt


def test_f46_memory_cannot_be_made_smaller_and_other_memory_is_not_taken(server: Server) -> None:
    memory = memfd(SIZE)
    call = Sharing(server, memory)
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 0)
    call.name(frame_of(0)[0], SIZE)
    assert call.refused()[1] == "invalid"
    call = Call(server)
    call.open()
    assert call.welcome is not None
    assert not hand_over(call.welcome.memory_socket, call.welcome.memory_key, memfd(SIZE, seals=0))
    call.raw(log_pb2.AppendRequest(shared=b"x").SerializeToString())
    assert call.refused()[1] == "invalid"
    call = Call(server)
    call.open()
    call.send(frame_of(0)[1])  # bodies are sent then
    call.until_acked(1)
    call.end()
