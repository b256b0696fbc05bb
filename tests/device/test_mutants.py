"""Mistakes in the order of streams that a device forgives most of the time, each put in once: a test fails for it.

A mutant replaces a method of the product, or of the device object, in the test's own process.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import PrefixStore

from swift_ft.comm import nccl, staging
from swift_ft.device import Accelerator, Event, Readings, current_accelerator, surely
from swift_ft.state import rng
from swift_ft.train.boundary_log import DeviceCapture
from tests.device import (
    machine,
    test_accelerator,
    test_capture,
    test_nccl_wire,
    test_staging,
    test_torch_nccl,
)
from tests.device.machine import here


class Mutant(NamedTuple):
    owner: Any
    name: str
    instead: Callable[..., Any]
    caught_by: Callable[[], None]


# --- copies out ---


def _copy(to: torch.Tensor, tensor: torch.Tensor, stream: torch.Stream) -> None:
    with stream:
        to.copy_(tensor, non_blocking=True)


def _no_wait_for_the_stream(
    device: Accelerator, to: torch.Tensor, tensor: torch.Tensor, stream: torch.Stream
) -> Event:
    _copy(to, tensor, stream)
    tensor.record_stream(stream)
    return device.mark()


def _no_record_on_the_stream(
    device: Accelerator, to: torch.Tensor, tensor: torch.Tensor, stream: torch.Stream
) -> Event:
    device.hold(device.mark(), stream)
    _copy(to, tensor, stream)
    return device.mark()


def _copy_on_the_training_stream(
    device: Accelerator, to: torch.Tensor, tensor: torch.Tensor, _: torch.Stream
) -> Event:
    to.copy_(tensor, non_blocking=True)
    return device.mark()


def _mark_of_the_training_stream(device: Accelerator, _: torch.Stream | None = None) -> Any:
    event = torch.Event(device=device.torch)
    event.record(torch.accelerator.current_stream(device.torch))
    return event


def _published_without_a_look(capture: DeviceCapture) -> None:
    while capture._under_way:
        capture._producer.complete(capture._under_way.popleft().end)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_hold = Accelerator.hold


def _no_hold_of_training(device: Accelerator, event: Any, stream: torch.Stream | None = None) -> None:
    if stream is not None:
        _hold(device, event, stream)


# --- runners ---


def _device_alone(device: Accelerator, _: torch.Stream) -> None:
    torch.accelerator.set_device_index(device.torch.index)


def _stream_of_another_device(_: Accelerator, __: torch.Stream) -> None:
    torch.accelerator.set_stream(torch.Stream(device=here(0)))


# --- communicators ---


def _read_without_a_check(readings: Readings) -> None:
    device = current_accelerator()
    device.wait(device.mark())
    for use in readings._waiting:
        use()


def _read_with_a_check_before_the_wait(readings: Readings) -> None:
    readings.check_arrived()
    _read_without_a_check(readings)


def _always_whole(_: Readings) -> Callable[[], bool]:
    return surely


def _aborted_one_by_one(_: nccl.TorchNccl, communicators: Sequence[Any]) -> None:
    for each in communicators:
        each.group.abort()


def _communicators_for_all_tags(wire: Any, tensor: torch.Tensor, place: int, tag: int) -> Any:
    messages, collectives = wire._lanes
    return (collectives if tag >= wire._tags else messages).get(wire._places[place])


class _BothWays(nccl._TwoRanks):
    def send(self, tensor: torch.Tensor) -> Any:
        return self.group.send([tensor], 1 - self.own, 0)

    def recv(self, tensor: torch.Tensor) -> Any:
        return self.group.recv([tensor], 1 - self.own, 0)


def _one_stream_for_both_directions(
    fabric: nccl.NcclFabric, store: Any, own: int, others: Sequence[int], timeout: Any
) -> Any:
    made: dict[int, Any] = {}

    def connect() -> None:
        for other in others:
            group: Any = fabric._library.connect(
                PrefixStore(str({own, other}), store), int(own > other), timeout
            )
            made[other] = nccl._Pair(*[fabric._kept(_BothWays(group.group, group.own))] * 2)

    fabric.build(connect)
    return made


def _not_kept(message: Any, queued: Any, tensor: torch.Tensor, in_flight: Any) -> None:
    message._queued, message._tensor, message._in_flight = queued, tensor, in_flight


# --- generators ---


def _seeded_when_the_stream_gets_there(seed: int) -> None:
    reached = torch.accelerator.current_stream().record_event()

    def late() -> None:
        while not reached.query():
            time.sleep(0.001)
        torch.get_device_module().default_generators[0].manual_seed(seed)

    threading.Thread(target=late, daemon=True).start()


def _nothing(*_: object) -> None:
    pass


MUTANTS = {
    "no wait for the stream": Mutant(
        Accelerator,
        "copy_out",
        _no_wait_for_the_stream,
        lambda: test_capture.test_what_the_device_has_yet_to_compute_arrives("float32"),
    ),
    "no wait for the stream, staged": Mutant(
        Accelerator,
        "copy_out",
        _no_wait_for_the_stream,
        test_staging.test_a_message_leaves_when_the_device_has_its_bytes_and_not_before,
    ),
    "no record on the stream": Mutant(
        Accelerator,
        "copy_out",
        _no_record_on_the_stream,
        test_accelerator.test_a_copy_is_beside_training_and_keeps_its_memory,
    ),
    "no record on the stream, staged": Mutant(
        Accelerator,
        "copy_out",
        _no_record_on_the_stream,
        test_staging.test_what_is_sent_may_be_freed_and_overwritten,
    ),
    "no event before the host reads": Mutant(
        DeviceCapture,
        "_publish",
        _published_without_a_look,
        lambda: test_capture.test_the_host_is_not_held_up_and_nothing_is_seen_before_it_is_there("native"),
    ),
    "no event before the host reads, staged": Mutant(
        staging,
        "until_over",
        _nothing,
        test_staging.test_a_message_leaves_when_the_device_has_its_bytes_and_not_before,
    ),
    "published early": Mutant(
        Accelerator,
        "mark",
        _mark_of_the_training_stream,
        lambda: test_capture.test_the_host_is_not_held_up_and_nothing_is_seen_before_it_is_there("native"),
    ),
    "copy on the training stream": Mutant(
        Accelerator,
        "copy_out",
        _copy_on_the_training_stream,
        test_accelerator.test_a_copy_is_beside_training_and_keeps_its_memory,
    ),
    "overwritten while lent": Mutant(
        Accelerator,
        "hold",
        _no_hold_of_training,
        test_capture.test_what_follows_the_settling_may_overwrite_it,
    ),
    "overwritten at once": Mutant(
        DeviceCapture,
        "_own",
        staticmethod(_itself),
        test_capture.test_what_may_change_after_the_call_may_change_at_once,
    ),
    "a sum beside its caller's stream": Mutant(
        Accelerator,
        "hold",
        _no_hold_of_training,
        test_staging.test_a_sum_is_behind_what_its_caller_has_queued_and_before_what_it_queues,
    ),
    "wrong current stream of a runner": Mutant(
        Accelerator,
        "adopt",
        _device_alone,
        test_staging.test_a_runner_works_on_the_device_of_its_caller_and_on_a_stream_of_its_own,
    ),
    "wrong current device of a runner": Mutant(
        Accelerator,
        "adopt",
        _stream_of_another_device,
        test_staging.test_a_runner_works_on_the_device_of_its_caller_and_on_a_stream_of_its_own,
    ),
    "freed before its generation is over": Mutant(
        Accelerator,
        "wait",
        _nothing,
        test_staging.test_what_an_aborted_collective_still_writes_to_is_nobody_elses,
    ),
    "generator drawn at run time": Mutant(
        rng,
        "seed_generators",
        _seeded_when_the_stream_gets_there,
        test_accelerator.test_a_microbatch_draws_its_own_numbers_however_far_the_host_is_ahead,
    ),
    "no check before the update": Mutant(
        Readings,
        "read",
        _read_without_a_check,
        test_nccl_wire.test_a_step_that_computes_with_garbage_is_not_applied,
    ),
    "check before the event": Mutant(
        Readings,
        "read",
        _read_with_a_check_before_the_wait,
        test_nccl_wire.test_a_step_that_computes_with_garbage_is_not_applied,
    ),
    "garbage in the log": Mutant(
        Readings,
        "wholeness",
        _always_whole,
        lambda: test_capture.test_what_an_abort_has_left_is_not_logged_and_what_was_checked_before_is(
            "native"
        ),
    ),
    "aborted one by one": Mutant(
        nccl.TorchNccl,
        "abort",
        _aborted_one_by_one,
        test_torch_nccl.test_communicators_are_aborted_together_and_kept,
    ),
    "receive posted ahead": Mutant(
        nccl._Wire,
        "_pair",
        _communicators_for_all_tags,
        test_nccl_wire.test_a_receive_that_is_posted_ahead_holds_no_other_message_up,
    ),
    "tag relied on": Mutant(
        nccl._Wire,
        "_pair",
        _communicators_for_all_tags,
        test_nccl_wire.test_messages_with_tags_are_told_apart_whatever_their_order,
    ),
    "mixed batch in one stream": Mutant(
        nccl.NcclFabric,
        "lane",
        _one_stream_for_both_directions,
        test_nccl_wire.test_a_batch_of_sends_and_receives_does_not_wait_for_itself,
    ),
    "freed before its abort has returned": Mutant(
        nccl._Message,
        "__init__",
        _not_kept,
        test_nccl_wire.test_what_an_aborted_message_still_writes_to_is_nobody_elses,
    ),
    "readings read before the event": Mutant(
        Accelerator,
        "wait",
        _nothing,
        test_accelerator.test_readings_are_of_the_moment_they_are_asked_for_and_there_at_the_wait,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "LOOK_S", 10.0)  # what must not happen has time to
        patch.setattr(machine, "BUSY_S", 2.0)
        for module in (test_staging, test_nccl_wire, test_torch_nccl):
            patch.setattr(module, "PATIENCE_S", 2.0)
        patch.setattr(mutant.owner, mutant.name, mutant.instead)
        with pytest.raises(AssertionError):
            mutant.caught_by()
