"""The hostile side of `scripts/hostile`: a process with a thread for each kind of attack, over and over.

    python -m tests.hostile.clients ADDRESS SECONDS PAUSE_S TOKEN_FILE KIND,KIND,...

PAUSE_S lies between two rounds of a kind. An empty TOKEN_FILE: no token. No kinds: all of them.

Every attack is a function that makes one round of it. They know one job, `JOB`; with a token, it is of that job. What
they did is one line of JSON in the end: rounds, and answers by their codes. The process is nice: what is asked is what
the server does for others, and not who gets the processor.
"""

import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import grpc

from swift_ft._pb import log_pb2
from swift_ft.credentials import AUTHORIZATION, BEARER
from swift_ft.log.protocol import MESSAGE_BYTES_MAX, SERVICE, code_of
from tests.unit.log.frames import frame_of

# A client of gRPC that no library would be: it opens calls with a window of 0, sends half a request, reads nothing.
#
# Just enough of HTTP/2 (RFC 9113) for that, and no header compression: every field is sent as it is.

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
CANCEL = 8
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_BYTES_MAX = 16384


def grpc_message(data: bytes) -> bytes:
    """As it stands in a call."""
    return struct.pack(">BI", 0, len(data)) + data


class Connection:
    """One connection. A thread reads what comes and forgets it; it answers pings: the server sees nothing wrong."""

    def __init__(self, address: str, *, window: int = 0) -> None:
        """``window``: bytes that the server may send in each call before it is told that they were read."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._socket.settimeout(None)
        self._lock = threading.Lock()
        self._next = 1
        self._room = threading.Condition()
        self._window = 65535
        self._windows: dict[int, int] = {}
        self._initial = 65535
        self.ended: dict[int, bool] = {}
        """Calls that the server has ended."""
        self.frames: list[tuple[int, int]] = []
        """(kind, stream) of what has come."""
        self.closed = threading.Event()
        self._send(_PREFACE + _frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window)))
        self._thread = threading.Thread(target=self._listen, name="http2", daemon=True)
        self._thread.start()

    def _send(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(data)

    def begin(self, path: str, fields: Mapping[str, str] | None = None) -> int:
        """Opens a call; gives its stream."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "hostile",
            "te": "trailers",
            "content-type": "application/grpc",
            **(fields or {}),
        }
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
        with self._lock:
            stream, self._next = self._next, self._next + 2
            self._windows[stream] = self._initial
            parts = [block[at : at + _FRAME_BYTES_MAX] for at in range(0, len(block), _FRAME_BYTES_MAX)]
            data = _frame(HEADERS, END_HEADERS if len(parts) == 1 else 0, stream, parts[0])
            for part in parts[1:]:
                data += _frame(CONTINUATION, END_HEADERS if part is parts[-1] else 0, stream, part)
            self._socket.sendall(data)
        return stream

    def data(self, stream: int, data: bytes, *, end: bool = False, timeout_s: float = 5.0) -> int:
        """Sends bytes of a call, as far as the server has room for them; gives how many."""
        sent = 0
        while sent < len(data) or (end and not data):
            size = min(len(data) - sent, _FRAME_BYTES_MAX)
            with self._room:
                if not self._room.wait_for(
                    lambda: self._may_send(stream) > 0 or self.closed.is_set(), timeout_s
                ):
                    return sent
                if self.closed.is_set() or stream in self.ended:
                    return sent
                size = min(size, self._may_send(stream))
                self._window -= size
                self._windows[stream] -= size
            last = end and sent + size == len(data)
            self._send(_frame(DATA, END_STREAM if last else 0, stream, data[sent : sent + size]))
            sent += size
            if last:
                break
        return sent

    def _may_send(self, stream: int) -> int:
        return 1 << 30 if stream in self.ended else min(self._window, self._windows[stream])

    def message(self, stream: int, data: bytes, *, end: bool = False) -> int:
        return self.data(stream, grpc_message(data), end=end)

    def reset(self, stream: int) -> None:
        self._send(_frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))

    def ping(self, count: int) -> None:
        """All at once. OSError: the server has closed the connection."""
        self._send(_frame(PING, 0, 0, bytes(8)) * count)

    def allow(self, stream: int, size: int) -> None:
        """The server may send so many bytes more."""
        self._send(_frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size)))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what comes -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                head = self._exactly(9)
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                stream = int.from_bytes(head[5:]) & 0x7FFFFFFF
                self._take(kind, flags, stream, self._exactly(size))
        self.closed.set()
        with self._room:
            self._room.notify_all()

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _take(self, kind: int, flags: int, stream: int, data: bytes) -> None:
        if len(self.frames) < 100_000:
            self.frames.append((kind, stream))
        if kind == PING and not flags & ACK:
            self._send(_frame(PING, ACK, 0, data))
        elif kind == SETTINGS and not flags & ACK:
            with self._room:
                for at in range(0, len(data), 6):
                    name, value = struct.unpack_from(">HI", data, at)
                    if name == INITIAL_WINDOW_SIZE:
                        for stream_id in self._windows:
                            self._windows[stream_id] += value - self._initial
                        self._initial = value
                self._room.notify_all()
            self._send(_frame(SETTINGS, ACK, 0, b""))
        elif kind == WINDOW_UPDATE:
            with self._room:
                size = int.from_bytes(data) & 0x7FFFFFFF
                if stream:
                    self._windows[stream] = self._windows.get(stream, 0) + size
                else:
                    self._window += size
                self._room.notify_all()
        elif kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            with self._room:
                self.ended[stream] = True
                self._windows.pop(stream, None)
                self._room.notify_all()


def _frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return len(data).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + data


def _text(text: str) -> bytes:
    """A string of HPACK, as it is: its length in 7 bits, or more bytes."""
    data = text.encode(errors="surrogateescape")  # "\udcXX": the byte XX
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, head = len(data) - 127, bytearray((127,))
    while rest >= 128:
        head.append(rest % 128 + 128)
        rest //= 128
    head.append(rest)
    return bytes(head) + data


JOB = "hostile"
HELD_S = 1.0
"""How long connections are held that want to be in the way."""
HEALTH = "/grpc.health.v1.Health/"
FAR = (1 << 31, 1 << 47, 1 << 48, 1 << 61, (1 << 63) - 1, (1 << 64) - 1)
NICE = 10


class Enemy:
    """Where the server is, and what is known of it."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self.token = token
        self.answers: Counter[str] = Counter()
        self.draw = random.Random(0)
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(address, options=options)

    @property
    def fields(self) -> Mapping[str, str]:
        return {AUTHORIZATION: BEARER + self.token} if self.token else {}

    def call(self, path: str, *messages: bytes, wait: bool = True, timeout_s: float = 10.0) -> None:
        """Any method, as a stream; counts how it ends."""
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = self.channel.stream_stream(path)
        call = method(iter(messages), timeout=timeout_s, metadata=tuple(self.fields.items()))
        try:
            for _ in call:
                if not wait:
                    call.cancel()
            self.answers["OK"] += 1
        except grpc.RpcError as error:
            self.answers[code_of(error).name] += 1

    def log(
        self, method: str, *requests: "log_pb2.AppendRequest | bytes | object", wait: bool = True
    ) -> None:
        data = [
            request if isinstance(request, bytes) else request.SerializeToString()  # type: ignore[attr-defined]
            for request in requests
        ]
        self.call(f"/{SERVICE}/{method}", *data, wait=wait)

    def connect(self) -> Connection:
        """A window of 0: whatever the server sends stays with it."""
        return Connection(self.address)

    def begin(self, connection: Connection, method: str, *messages: bytes) -> int:
        stream = connection.begin(f"/{SERVICE}/{method}", self.fields)
        for message in messages:
            connection.message(stream, message)
        return stream


def opening(stream: str, acked: int = 0) -> bytes:
    opened = log_pb2.Open(job=JOB, stream=stream, generation=1, acked_sequence=acked)
    return log_pb2.AppendRequest(opens=[opened]).SerializeToString()


def records(stream: str, begin: int, count: int, step: int | None = None, body: bytes = b"x") -> bytes:
    """A message with so many of them."""
    frames = [
        frame_of(sequence, job=JOB, stream=stream, step=step, body=body)[1]
        for sequence in range(begin, begin + count)
    ]
    return log_pb2.AppendRequest(frames=b"".join(frames)).SerializeToString()


# -- attacks ------------------------------------------------------------------------------------------


def half_a_call(enemy: Enemy) -> None:
    """Calls whose requests never come."""
    with enemy.connect() as silent:
        for method in (HEALTH + "Check", *(f"/{SERVICE}/{name}" for name in ("Fence", "Inventory", "Read"))):
            for _ in range(30):
                silent.begin(method, enemy.fields)
        time.sleep(HELD_S)


def calls_that_are_reset(enemy: Enemy) -> None:
    with enemy.connect() as hasty:
        for _ in range(100):
            hasty.reset(enemy.begin(hasty, "Inventory"))


def large_requests(enemy: Enemy) -> None:
    """The largest that gRPC takes, and larger ones."""
    enemy.call(HEALTH + "Check", bytes(MESSAGE_BYTES_MAX - 16))
    enemy.log("Fence", bytes(32 << 20))


def numbers_without_end(enemy: Enemy) -> None:
    """What no run has acknowledged, trimmed, asked for."""
    far, stream = enemy.draw.choice(FAR), f"far{enemy.draw.randrange(20)}"
    enemy.log("Append", opening(stream), records(stream, 0, 1, step=1 << 40))
    enemy.log("Append", opening(stream, far), records(stream, min(far, (1 << 64) - 2), 1, step=0))
    enemy.log("Trim", log_pb2.TrimRequest(job=JOB, below_step=1))
    enemy.log("Read", log_pb2.ReadRequest(job=JOB, stream=stream, from_step=1))
    enemy.log("Read", log_pb2.ReadRequest(job=JOB, stream=stream, from_step=far, from_sequence=far))
    enemy.log("Digests", log_pb2.DigestsRequest(job=JOB, stream=stream, from_step=far))


def acknowledgements_unread(enemy: Enemy) -> None:
    """The same records again and again."""
    again = records("again", 0, 1000)
    with enemy.connect() as deaf:
        call = enemy.begin(deaf, "Append", opening("again"))
        for _ in range(10):
            deaf.message(call, again)


def records_unread(enemy: Enemy) -> None:
    """Readers that hold what they asked for, and inventories that nobody takes."""
    read = log_pb2.ReadRequest(job=JOB, stream="again", follow=True).SerializeToString()
    inventory = log_pb2.InventoryRequest(job=JOB).SerializeToString()
    with enemy.connect() as deaf:
        for _ in range(20):
            enemy.begin(deaf, "Read", read)
            enemy.begin(deaf, "Inventory", inventory)
        time.sleep(HELD_S)


def many_small_records(enemy: Enemy) -> None:
    """As many as the job may have, and more."""
    at = int(time.monotonic() * 1000)
    enemy.log("Append", opening("many", at), records("many", at, 2000))


def streams_without_end(enemy: Enemy) -> None:
    """New ones, of one record each: each is a file, and a line of the job's manifest."""
    names = [f"new{enemy.draw.randrange(1 << 40)}" for _ in range(20)]
    enemy.log("Append", *(opening(name) for name in names), *(records(name, 0, 1) for name in names))


def big_questions(enemy: Enemy) -> None:
    for _ in range(5):
        enemy.log("Inventory", log_pb2.InventoryRequest(job=JOB))
        enemy.log("Digests", log_pb2.DigestsRequest(job=JOB, stream="many"))
        enemy.log("Status", log_pb2.StatusRequest(job=JOB))


def trims_and_resets(enemy: Enemy) -> None:
    enemy.log("Trim", log_pb2.TrimRequest(job=JOB, below_step=enemy.draw.choice([1, 10, 500])))
    if enemy.draw.random() < 0.05:
        enemy.log("Reset", log_pb2.ResetRequest(job=JOB, generation=1, number=enemy.draw.randrange(1 << 31)))
    enemy.log("Fence", log_pb2.FenceRequest(job=JOB, generation=1))
    enemy.log("Fence", log_pb2.FenceRequest(job=JOB, generation=enemy.draw.choice(FAR[3:])))
    enemy.log("Drop", log_pb2.DropRequest(job="nobody"))


def writers_that_say_nothing(enemy: Enemy) -> None:
    with enemy.connect() as silent:
        for number in range(60):
            enemy.begin(silent, "Append", *([opening(f"idle{number}")] if number % 2 else []))
        time.sleep(HELD_S)


def nonsense(enemy: Enemy) -> None:
    """Bytes that are no request, names that are no names."""
    for method in ("Append", "Read", "Digests", "Inventory", "Fence", "Trim", "Reset", "Status", "Drop"):
        enemy.log(method, enemy.draw.randbytes(300))
        enemy.log(method, log_pb2.InventoryRequest(job="../" + "x" * 200_000))


ATTACKS: tuple[Callable[[Enemy], None], ...] = (
    half_a_call,
    calls_that_are_reset,
    large_requests,
    numbers_without_end,
    acknowledgements_unread,
    records_unread,
    many_small_records,
    streams_without_end,
    big_questions,
    trims_and_resets,
    writers_that_say_nothing,
    nonsense,
)


def rounds(attack: Callable[[Enemy], None], enemy: Enemy, until: float, pause_s: float) -> Iterator[bool]:
    """Whether each went through; a connection that the server ends is no reason to stop."""
    while time.monotonic() < until:
        try:
            attack(enemy)
            yield True
        except OSError:
            yield False
        time.sleep(pause_s)


def main() -> int:
    address, seconds, pause, token_file, names = sys.argv[1:]
    token = Path(token_file).read_text().strip() if token_file else ""
    attacks = [attack for attack in ATTACKS if not names or attack.__name__ in names.split(",")]
    os.nice(NICE)
    until = time.monotonic() + float(seconds)
    Enemy(address, token).log("Fence", log_pb2.FenceRequest(job=JOB, generation=1))
    enemies = {attack: Enemy(address, token) for attack in attacks}
    done: dict[str, list[bool]] = {}

    def go_on(attack: Callable[[Enemy], None]) -> None:
        done[attack.__name__] = list(rounds(attack, enemies[attack], until, float(pause)))

    threads = [threading.Thread(target=go_on, args=(attack,), name=attack.__name__) for attack in attacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    account = {
        attack.__name__: {
            "rounds": len(done.get(attack.__name__, [])),
            "cut_off": done.get(attack.__name__, []).count(False),
            "answers": dict(enemies[attack].answers),
        }
        for attack in attacks
    }
    print(json.dumps(account), flush=True)
    os._exit(0)  # without waiting for what still lies in connections


if __name__ == "__main__":
    sys.exit(main())
