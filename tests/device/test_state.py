"""State of a device: copied out beside training, whose next update waits for the copies and whose host does not."""

import tempfile
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from swift_ft.comm.backend import REPLICA_CHUNK
from swift_ft.device import Accelerator, accelerator_in_use, accelerator_of, wait_for_copies
from swift_ft.errors import ReplayRefused, ReplicaDiffers
from swift_ft.log.record import Record, RecordKey
from swift_ft.state.carried_gradients import WholeModule
from swift_ft.state.checkpoint_file import Snapshot
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.digests import digest_there, read, sums
from swift_ft.state.tensors import byte_view, differ, digest, fill, in_place, to_tensor
from swift_ft.state.transfer import Transfer, receive_state, send_state
from swift_ft.state.tree import join
from swift_ft.train.config import SessionConfig
from swift_ft.train.profiling import FORWARD
from swift_ft.train.snapshots import SnapshotCopy
from swift_ft.train.stage import LoggedPipelineStage
from tests.device.simulated import engine_view, held, no_waits, waits
from tests.unit.runtime.test_updates import HalvingReducer
from tests.unit.runtime.wired import channel_of, updates_of

DEVICE = "simulated"
accelerator = torch.accelerator


class Holder:
    fenced = False
    entered = 0


def made() -> dict[str, torch.Tensor]:
    """A state with two forms of strides, holes and a tied weight; it is on the device already."""
    weight = torch.arange(12.0).view(3, 4).to(DEVICE)
    state = {
        "weight": weight,
        "tied": weight,
        "transposed": torch.arange(6.0).view(2, 3).to(DEVICE).T,
        "holes": torch.arange(6.0).view(2, 3).to(DEVICE)[:, :2],
        "statistics": torch.arange(5).to(DEVICE),
        "step": torch.tensor(3.0),
    }
    accelerator.synchronize()
    waits()
    return state


def copies() -> torch.Stream:
    device = accelerator_in_use()
    assert device is not None
    return device._copies


def equal(one: Snapshot, other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one.named()[f"state.{name}"], value) for name, value in other.items())


def passed(event: torch.Event) -> None:
    """Returns when the device has passed it, without a wait of the host's."""
    while not event.query():
        pass


@pytest.mark.parametrize(
    "mistake", ["", "no wait of the update", "changed by the forward, and said to be late"]
)
def test_a_snapshot_is_of_its_moment(mistake: str) -> None:
    state, wanted = made(), {name: tensor.cpu() for name, tensor in made().items()}
    late = {state["weight"].data_ptr()} if not mistake else {tensor.data_ptr() for tensor in state.values()}
    with held(copies()), no_waits():
        snapshot = Snapshot(state, late=late)
        if not mistake.startswith("no wait"):
            state["statistics"].add_(1)  # the next step's forward
            computed = accelerator.current_stream().record_event()
            wait_for_copies()
        state["weight"].mul_(2)  # its update
        if mistake:
            passed(accelerator.current_stream().record_event() if mistake.startswith("no wait") else computed)
    accelerator.synchronize()
    assert equal(snapshot, wanted) is not bool(mistake)


def test_memory_is_not_used_again_before_it_is_copied() -> None:
    """A forward may give a buffer another tensor while the copy of the old one is under way."""
    tensor = torch.arange(5.0).to(DEVICE)
    accelerator.synchronize()
    with held(copies()):
        snapshot = Snapshot({"cache": tensor}, late={tensor.data_ptr()})
        del tensor
        again = torch.zeros(5, device=DEVICE)
    assert torch.equal(snapshot.named()["state.cache"], torch.arange(5.0))
    assert again.eq(0).all()


@pytest.mark.parametrize("updates", ["after_backward", "wait_free"])
def test_an_update_waits_for_the_copies(updates: str) -> None:
    model = torch.nn.Linear(4, 1, bias=False).to(DEVICE)
    before = model.weight.detach().cpu()
    session = updates_of(SessionConfig(replicas=2, updates=updates), HalvingReducer())
    if session.wait_free:
        session.awaited.add(WholeModule(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session.add(optimizer)
    session.begin_step(0)
    with held(copies()):
        snapshot = Snapshot({"weight": model.weight}, late={model.weight.data_ptr()})
        model(torch.ones(4, device=DEVICE)).backward()
        optimizer.step()
    assert torch.equal(snapshot.named()["state.weight"], before)
    assert torch.equal(model.weight.detach().cpu(), before - 0.5)


def test_computation_goes_on_until_the_update() -> None:
    state = made()
    late = {tensor.data_ptr() for tensor in state.values()}
    with held(copies()), no_waits():
        snapshot = Snapshot(state, late=late)
        result = state["weight"] * 2
        done = torch.accelerator.current_stream().record_event()
        wait_for_copies()
        state["weight"].zero_()
        passed(done)
        assert not torch.accelerator.current_stream().query()
    assert torch.equal(snapshot.tensors["state.weight"] * 2, result.cpu())


def test_a_checkpoint_is_written_without_a_wait() -> None:
    state, wanted = made(), {name: tensor.cpu() for name, tensor in made().items()}
    written = threading.Event()
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(directory, 0, Holder())
        with no_waits():
            for version in (1, 2):
                written.clear()
                with held(copies()) if version == 2 else nullcontext():
                    store.save(
                        version,
                        state,
                        lambda _version: written.set(),
                        lambda unsaved: pytest.fail(unsaved.reason),
                        late={state["weight"].data_ptr()},
                    )
                    wait_for_copies()
                    state["weight"].add_(1)
                    assert version == 1 or not written.wait(0.1)
                assert written.wait(20)
        for version in (1, 2):
            loaded = store.load(version)
            assert torch.equal(loaded["weight"].cpu(), wanted["weight"] + version - 1)
            assert torch.equal(loaded["holes"].cpu(), wanted["holes"])
            assert loaded["tied"] is loaded["weight"] or loaded["tied"].equal(loaded["weight"])
            assert loaded["transposed"].stride() == state["transposed"].stride()


def test_older_memory_is_used_again() -> None:
    state = made()
    older = Snapshot(state)
    addresses = {name: tensor.data_ptr() for name, tensor in older.tensors.items()}
    with no_waits():
        newer = Snapshot(state, into=older.named())
        assert all(tensor.is_pinned() for name, tensor in newer.tensors.items() if name != "state.step")
    assert {name: tensor.data_ptr() for name, tensor in newer.tensors.items()} == addresses


def test_a_restored_state_goes_to_the_device_without_a_wait() -> None:
    state = made()
    snapshot = Snapshot(state)
    loaded = Snapshot({name: tensor.cpu() for name, tensor in state.items()})
    with held(), no_waits():
        restored = join(snapshot.skeleton, loaded.named())
    assert restored["step"].device.type == "cpu"
    for name in ("weight", "tied", "transposed", "holes", "statistics"):
        assert restored[name].device.type == DEVICE
        assert torch.equal(restored[name].cpu(), state[name].cpu())
    assert restored["transposed"].stride() == state["transposed"].stride()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_record_goes_to_the_device_without_a_wait(dtype: str) -> None:
    wanted = torch.arange(6, dtype=getattr(torch, dtype)).view(2, 3)
    record = record_of(wanted)
    buffer = torch.zeros(2, 3, dtype=wanted.dtype, device=DEVICE)
    with held(), no_waits():
        fill(buffer, record, "a buffer")
        made_anew = to_tensor(record, buffer.device)
    assert torch.equal(buffer.cpu(), wanted)
    assert torch.equal(made_anew.cpu(), wanted)


def record_of(wanted: torch.Tensor) -> Record:
    return Record(
        key=RecordKey(0, 0, 0),
        dtype=str(wanted.dtype).removeprefix("torch."),
        shape=tuple(wanted.shape),
        body=memoryview(byte_view(wanted).tobytes()),
        digest=b"",
        generation=1,
        sequence=0,
    )


def test_a_replay_copies_records_in_while_earlier_microbatches_compute() -> None:
    buffer, wanted = torch.zeros(6, device=DEVICE), torch.arange(6.0)
    device = accelerator_of(buffer.device)
    reusable = device.mark()
    accelerator.synchronize()
    with held(), no_waits():
        fill(buffer, record_of(wanted), "a buffer", reusable)
        passed(device._incoming.record_event())
        assert torch.equal(engine_view(buffer), wanted)


def make_mistake(device: Accelerator, mistake: str) -> None:
    if mistake:
        device.hold = lambda *_: None  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", ["", "no wait"])
def test_a_microbatch_waits_for_the_copy_of_its_record(mistake: str) -> None:
    buffer, wanted = torch.zeros(6, device=DEVICE), torch.arange(6.0)
    device = accelerator_of(buffer.device)
    reusable = device.mark()
    accelerator.synchronize()
    make_mistake(device, mistake)
    with held(device._incoming), no_waits():  # the copy engine is late
        earlier = accelerator.current_stream().record_event()
        fill(buffer, record_of(wanted), "a buffer", reusable)
        result = buffer * 2
        computed = accelerator.current_stream().record_event()
        passed(computed if mistake else earlier)
        assert computed.query() is bool(mistake)
    assert torch.equal(result.cpu(), wanted * 2) is not bool(mistake)


@pytest.mark.parametrize("mistake", ["", "no wait"])
def test_a_replay_copies_no_record_into_memory_that_is_in_use(mistake: str) -> None:
    buffer = torch.ones(6, device=DEVICE)
    device = accelerator_of(buffer.device)
    accelerator.synchronize()
    make_mistake(device, mistake)
    with held():
        used = buffer * 2  # the step before
        fill(buffer, record_of(torch.arange(6.0)), "a buffer", device.mark())
        if mistake:
            passed(device._incoming.record_event())
    assert bool(used.cpu().eq(2).all()) is not bool(mistake)


@pytest.mark.parametrize("kept", [True, False])
def test_a_buffer_that_is_made_in_a_call_is_filled_behind_its_work(kept: bool) -> None:
    channel = channel_of(2, store=HashStore)
    channel._read = lambda *_, **__: record_of(torch.arange(6.0))  # type: ignore[method-assign]
    of_one_receive = {} if kept else {"take_buffer": lambda: None}  # as torch makes it from 2.15 on

    def receive(microbatch: int, buffer: torch.Tensor) -> None:
        info = SimpleNamespace(source=1, buffer=buffer, **of_one_receive)
        stage = SimpleNamespace(stage_index=2, _channel=channel, _microbatch=int, _by_slot=enumerate)
        LoggedPipelineStage._fill(stage, (info,), FORWARD, microbatch)  # type: ignore[arg-type]

    memory = torch.ones(6, device=DEVICE)
    device = accelerator_of(memory.device)
    receive(0, torch.zeros(6, device=DEVICE))
    accelerator.synchronize()
    with held():
        used = memory * 2  # by a microbatch before, which has given the memory back
        receive(1, memory)
        passed(device._incoming.record_event())
    assert bool(used.cpu().eq(2).all()) is not kept
    assert torch.equal(memory.cpu(), torch.arange(6.0))


class Memory:
    """A wire within one thread: what is sent lies there until it is received."""

    def __init__(self) -> None:
        self.sent: dict[int, torch.Tensor] = {}

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> "Memory":
        self.sent[tag] = tensors[0].clone()
        return self

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> "Memory":
        assert tensors[0].device == self.sent[tag].device
        tensors[0].copy_(self.sent[tag])
        return self

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("into", ["nothing", "a state"])
def test_a_replica_goes_from_device_to_device(into: str) -> None:
    state = made() | {"large": torch.arange(3e5).to(DEVICE)}
    there = {f"state.{name}": torch.zeros_like(tensor) for name, tensor in state.items() if name != "tied"}
    there["state.tied"] = there["state.weight"]
    accelerator.synchronize()
    waits()
    wire, transfer = Memory(), Transfer(joiner=1, sources=(0,), version=7)
    sent = send_state(transfer, 0, state, lambda: None, wire=wire)
    chunks = [tensor for tag, tensor in wire.sent.items() if tag >= REPLICA_CHUNK]
    assert len(chunks) > 3
    assert sum(chunk.nbytes for chunk in chunks if chunk.device.type == "cpu") == state["step"].nbytes
    assert sum(waits().values()) == 1  # for the digests
    received = receive_state(transfer, 1, there if into == "a state" else {}, lambda: None, wire=wire)
    assert sum(waits().values()) == 1
    assert received.digest == sent.digest
    for name, tensor in state.items():
        assert received.state[name].device == tensor.device
        assert torch.equal(received.state[name].cpu(), tensor.cpu())
        if into == "a state" and name != "holes":  # it has other strides there
            assert received.state[name] is there[f"state.{name}"]


def test_a_replica_with_other_strides_takes_the_room_of_one_tensor_more() -> None:
    state = {f"w{number}": torch.ones(512, 256, device=DEVICE).T for number in range(8)}
    there = {f"state.{name}": torch.zeros(256, 512, device=DEVICE) for name in state}
    wire, transfer = Memory(), Transfer(joiner=1, sources=(0,), version=7)
    send_state(transfer, 0, state, lambda: None, wire=wire)
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    received = receive_state(transfer, 1, there, lambda: None, wire=wire)
    assert accelerator.max_memory_allocated() - before < (len(state) + 2) * state["w0"].nbytes
    assert all(received.state[name].stride() == tensor.stride() for name, tensor in state.items())
    assert all(torch.equal(received.state[name].cpu(), tensor.cpu()) for name, tensor in state.items())


def test_a_device_without_room_for_a_replica_refuses_it() -> None:
    state = {"w": torch.ones(512, 256, device=DEVICE).T}
    wire, transfer = Memory(), Transfer(joiner=1, sources=(0,), version=7)
    send_state(transfer, 0, state, lambda: None, wire=wire)
    step = 1 << 32
    kept = []
    while step >= state["w"].nbytes:
        try:
            kept.append(torch.empty(step, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            step //= 2
    with pytest.raises(ReplayRefused, match="the device has no room for a replica's state"):
        receive_state(transfer, 1, {}, lambda: None, wire=wire)


def test_a_bit_that_is_lost_on_the_way_is_noticed() -> None:
    state = {"large": torch.arange(3e5).to(DEVICE)}
    wire, transfer = Memory(), Transfer(joiner=1, sources=(0,), version=7)
    send_state(transfer, 0, state, lambda: None, wire=wire)
    wire.sent[REPLICA_CHUNK + 2][77] ^= 1
    with pytest.raises(ReplicaDiffers, match=r"received from rank 0 .* at state\.large"):
        receive_state(transfer, 1, {}, lambda: None, wire=wire)


def test_a_snapshot_that_is_passed_on_stays_in_host_memory() -> None:
    state, wire, transfer = made(), Memory(), Transfer(joiner=1, sources=(0,), version=7)
    before = accelerator.memory_allocated()
    snapshot = Snapshot(state)
    own = {"version": 7, "skeleton": snapshot.skeleton, "tensors": snapshot.named()}
    with no_waits():
        sent = send_state(transfer, 0, own, lambda: None, wire=wire)
        received = receive_state(transfer, 1, {}, lambda: None, wire=wire)
    kept = SnapshotCopy(state=received.state, digest=received.digest, bytes=received.bytes)
    assert accelerator.memory_allocated() == before
    assert kept.digest == sent.digest
    again = kept.apart()
    assert {name: tensor.device for name, tensor in again.items()} == {
        name: tensor.device for name, tensor in state.items()
    }
    assert all(torch.equal(again[name].cpu(), tensor.cpu()) for name, tensor in state.items())


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int8", "bool", "complex64"])
def test_a_digest_is_the_same_on_every_device_and_one_copy_brings_it(dtype: str) -> None:
    numbers = torch.arange(3 * 4096 + 5).to(getattr(torch, dtype))
    tensors = [numbers, numbers[1:], numbers[:3], numbers[::2], numbers[:12].view(3, 4).T, numbers[:0]]
    there = [tensor.to(DEVICE) for tensor in [numbers]]
    there += [there[0][1:], there[0][:3], there[0][::2], there[0][:12].view(3, 4).T, there[0][:0]]
    accelerator.synchronize()
    waits()
    with held(), no_waits():
        found = [digest_there(tensor) for tensor in there]
    waits()
    told = read(found)
    assert [what for what, _ in waits()] == ["Event.synchronize"]
    assert told == [byte_view(sums(in_place(tensor))).tobytes() for tensor in tensors]


def test_bits_are_compared_where_they_are() -> None:
    one = torch.tensor([0.0, float("nan")], device=DEVICE)
    other = one.clone()
    negative = torch.tensor([-0.0, float("nan")], device=DEVICE)
    accelerator.synchronize()
    waits()
    assert differ([(one, other), (one, negative), (one.cpu(), other.cpu()), (one, negative.cpu())]) == [
        False,
        True,
        False,
        True,
    ]
    assert not any("pageable" in what and not what.endswith(" 8 bytes") for what, _ in waits())


def test_a_digest_waits_once_and_is_the_same_as_on_the_cpu() -> None:
    state = made()
    found = digest(state)
    assert sum(waits().values()) == 1
    assert found == digest({name: tensor.cpu() for name, tensor in state.items()})
