"""A client of gRPC that no library would be: it opens calls with a window of 0, sends half a request, reads nothing.

Just enough of HTTP/2 (RFC 9113) for that, and no header compression: every field is sent as it is.
"""

import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress

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
