"""A log server inside the test's process, over real gRPC, on a storage of the test's choice."""

import time
from collections.abc import Callable

import grpc

from swift_ft._pb import log_pb2_grpc
from swift_ft.log.protocol import open_channel
from swift_ft_services.logserver.engine import LogEngine
from swift_ft_services.logserver.service import make_server
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.logserver.storage_interface import Storage
from tests.log_client import LogWriter
from tests.unit.log.memory_storage import MemoryStorage

JOB = "job"


def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Waits for something that another thread or process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def impatient_about(writer: LogWriter, address: str, words: str) -> None:
    """From when its calls to that server end with these words on it has hardly any patience: what it is told by then
    is what it says, and not that it has heard nothing yet."""
    eventually(lambda: words in writer.delivery.links[address].trouble)
    writer.delivery.patience_s = 0.1


class InProcess:
    """Starts in the constructor, generation 1 granted. A context manager."""

    def __init__(
        self,
        storage: Storage | None = None,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.storage = storage if storage is not None else MemoryStorage()
        self.engine = LogEngine(self.storage, config or EngineConfig(), clock=clock)
        self.server, _ = make_server(self.engine)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.engine.start([])
        self.server.start()
        self.engine.state.on_health(True)
        self.engine.administration.fence(JOB, 1)
        self.channel: grpc.Channel = open_channel(self.address)
        self.stub: log_pb2_grpc.LogStub = log_pb2_grpc.LogStub(self.channel)

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.engine.drain()
        self.server.stop(2).wait()
        self.engine.close()
