"""A log server inside the test's process, over real gRPC, on a storage of the test's choice."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft._pb import log_pb2, log_pb2_grpc
from swift_ft.log.protocol import SERVICE, open_channel
from swift_ft_services.authorization import Gate
from swift_ft_services.logserver.engine import LogEngine
from swift_ft_services.logserver.service import make_server
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.logserver.storage_interface import RecoveredJob, Storage
from swift_ft_services.program import Protection, bind
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.log.frames import JOB, STREAM
from tests.unit.log.memory_storage import MemoryStorage


def impatient_about(writer: LogWriter, address: str, words: str) -> None:
    """From when its calls to that server end with these words on it has hardly any patience: what it is told by then
    is what it says, and not that it has heard nothing yet."""
    eventually(lambda: words in writer.sending.links[address].core.trouble)
    writer.sending.patience_s = 0.1


class InProcess:
    """Starts in the constructor, with generation 1 granted to `JOB` unless a generation is to come later. A context
    manager."""

    def __init__(
        self,
        storage: Storage | None = None,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        protection: Protection | None = None,
        gate: Gate | None = None,
        jobs: Sequence[RecoveredJob] = (),
        granted: bool = True,
    ) -> None:
        self.storage = storage if storage is not None else MemoryStorage()
        self.engine = LogEngine(self.storage, config or EngineConfig(), clock=clock)
        self.server, self.health = make_server(self.engine, gate)
        self.address = f"127.0.0.1:{bind(self.server, protection or Protection(listen='127.0.0.1:0'))}"
        self.engine.start(list(jobs))
        self.server.start()
        self.engine.state.on_health(self.engine.state.serves)
        if granted:
            self.engine.administration.fence(JOB, 1)

    @cached_property
    def channel(self) -> grpc.Channel:
        return open_channel(self.address)

    @cached_property
    def stub(self) -> log_pb2_grpc.LogStub:
        return log_pb2_grpc.LogStub(self.channel)

    def read(self, **fields: Any) -> bytes:
        """All frames of a stream that are there. ``fields``: of the request."""
        request = log_pb2.ReadRequest(**{"job": JOB, "stream": STREAM, **fields})
        return b"".join(reply.frames for reply in self.stub.Read(request, timeout=10))

    def health_status(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10).status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "channel" in vars(self):
            self.channel.close()
        self.engine.drain()
        self.server.stop(2).wait()
        self.engine.close()
