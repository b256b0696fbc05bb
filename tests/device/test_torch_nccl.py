"""NCCL's communicators by torch's own class (`swift_ft.comm.nccl.TorchNccl`), of which there is a stand-in here: it
refuses another order of the calls, other options, and an abort of one communicator after the other."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from swift_ft import comm
from swift_ft.comm import nccl
from swift_ft.comm.gloo import GlooBackend, Sockets
from swift_ft.comm.nccl import Communicator, NcclBackend, NcclFabric, TorchNccl
from swift_ft.device import current_accelerator
from swift_ft.errors import ServiceError
from tests.device.fake_nccl import GARBAGE, FakeCommunicator, FakeNccl, ProcessGroup
from tests.patience import eventually

TIMEOUT = timedelta(seconds=60)
PATIENCE_S = 20.0
LATE_S = 0.1


class _Keeping(Store):
    """Keeps what is set until its next call, as the coordinator's does."""

    def __init__(self, shared: HashStore) -> None:
        super().__init__()
        self._shared, self._kept = shared, dict[str, bytes]()

    def set(self, key: str, value: bytes | str) -> None:
        self._kept[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        self._tell()
        return bytes(self._shared.get(key))

    def check(self, keys: list[str]) -> bool:
        self._tell()
        return bool(self._shared.check(keys))

    def _tell(self) -> None:
        for key, value in self._kept.items():
            self._shared.set(key, value)
        self._kept.clear()


def connected(count: int) -> list[tuple[Communicator, Communicator]]:
    """Returns both ends of each communicator."""
    shared, library = HashStore(), FakeNccl()
    ends: dict[tuple[int, int], Communicator] = {}

    def connect(own: int) -> None:
        store = _Keeping(shared)
        for number in range(count):
            ends[number, own] = library.connect(PrefixStore(f"pair-{number}", store), own, TIMEOUT)

    second = threading.Thread(target=connect, args=(1,))
    second.start()
    connect(0)
    second.join()
    return [(ends[number, 0], ends[number, 1]) for number in range(count)]


def test_a_message_of_any_type_passes_by_a_store_that_keeps_what_is_set() -> None:
    ((source, target),) = connected(1)
    for values in (torch.randn(3, 5), torch.arange(7, dtype=torch.int16), torch.tensor(True)):
        room = torch.zeros_like(values).to("simulated")
        source.send(values.to("simulated"))
        target.recv(room).wait()
        assert torch.equal(room.cpu(), values)


def test_communicators_are_aborted_together_and_kept() -> None:
    ends = [end for pair in connected(3) for end in pair]
    for _, target in zip(ends[::2], ends[1::2], strict=True):
        target.recv(torch.zeros(3, device="simulated"))
    kept = len(TorchNccl._groups)
    aborting = threading.Thread(target=FakeNccl().abort, args=(ends,), daemon=True)
    aborting.start()
    aborting.join(PATIENCE_S)
    waits = aborting.is_alive()
    FakeCommunicator.abort([end.group._communicator for end in ends])  # type: ignore[attr-defined]
    assert not waits  # one after the other, the first would wait for the others
    del ends, aborting
    assert len(TorchNccl._groups) == kept >= 6


class _Interrupted(HashStore):
    def check(self, keys: list[str]) -> bool:
        raise DistNetworkError("connection of an ended generation")


def test_a_connection_that_is_interrupted_after_it_has_begun_is_aborted() -> None:
    with pytest.raises(DistNetworkError):
        FakeNccl().connect(_Interrupted(), 0, TIMEOUT)
    communicator = TorchNccl._groups[-1]._communicator
    eventually(lambda: communicator not in FakeCommunicator._all, "the abort")


def test_garbage_of_an_abort_is_not_sent_on_to_a_member_that_has_not_aborted() -> None:
    (_, received), (sent, next_members) = connected(2)
    room, further = torch.zeros(3, device="simulated"), torch.zeros(3, device="simulated")
    received.recv(room).wait()
    sent.send(room * 2)
    next_members.recv(further)
    plain = ProcessGroup.abort
    with pytest.MonkeyPatch.context() as patch:

        def abort(group: ProcessGroup) -> None:
            if group is sent.group:  # type: ignore[attr-defined]
                time.sleep(LATE_S)
            plain(group)

        patch.setattr(ProcessGroup, "abort", abort)
        patch.setattr(nccl, "_SENDS_FIRST_S", 20 * LATE_S)
        aborting = threading.Thread(target=FakeNccl().abort, args=([received, sent],), daemon=True)
        aborting.start()
        time.sleep(30 * LATE_S)
        FakeNccl().abort([next_members])
        aborting.join(PATIENCE_S)
        assert not aborting.is_alive()
    assert bytes(further.cpu().view(torch.uint8).tolist()) == bytes([GARBAGE]) * further.nbytes  # its own


def test_an_abort_that_does_not_end_ends_the_rank_and_frees_nothing() -> None:
    fabric = NcclFabric(Sockets(tuple), FakeNccl())
    ((_, target),) = connected(1)
    fabric._kept(target)
    room = torch.zeros(3, device="simulated")
    fabric.queue(target.recv, room)
    ended, errors = threading.Event(), list[BaseException]()

    def close() -> None:
        fabric.abort()
        try:
            fabric.close()
        except torch.AcceleratorError as error:
            errors.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "_ABORTED_WITHIN_S", 0.1)
        patch.setattr(ProcessGroup, "abort", lambda _: ended.wait())  # no limit of torch's ends it
        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        ended.set()
    (error,) = errors
    assert "an abort has not ended" in str(error)
    assert fabric._in_flight
    FakeNccl().abort([target])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_ENABLE_MONITORING", ""),
        ("NCCL_NVLS_ENABLE", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"),
    ],
)
def test_an_environment_in_which_torch_ends_the_process_is_told_by_name(name: str, value: str) -> None:
    library = FakeNccl()
    with pytest.MonkeyPatch.context() as patch:
        for each, needed in comm.NCCL_ENVIRONMENT.items():
            patch.setenv(each, needed)
        assert not library.obstacle()
        patch.setenv(name, value)
        assert name in library.obstacle()


def test_ranks_of_one_gpu_connect_where_nccl_lets_them() -> None:
    library, device = FakeNccl(), current_accelerator()
    assert library.identity(device) == library.identity(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        assert library.identity(device) != library.identity(device)


def test_cuda_has_nccl_without_a_package_that_offers_it() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        patch.setattr(torch.distributed, "ProcessGroupNCCL", ProcessGroup, raising=False)
        backend = comm.default_backend()
        assert isinstance(backend, NcclBackend)
        assert type(backend._library) is TorchNccl
        patch.delattr(ProcessGroup, "abort")
        with pytest.raises(ServiceError, match=r"ProcessGroupNCCL\.abort"):
            comm.default_backend()
        patch.setattr(torch.distributed, "is_nccl_available", lambda: False)
        assert type(comm.default_backend()) is GlooBackend
