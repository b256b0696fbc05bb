"""What one record of a device's tensor takes of the training thread, in µs of its CPU time: `python -m
tests.device.record_cost` prints the best and the median of 300 calls on the simulated device."""

import os
import statistics
import time

import torch

from swift_ft.log.record import RecordKey
from tests.device import simulated

CALLS, IN_FLIGHT = 300, 10


def main() -> None:
    torch.set_num_threads(1)
    simulated.load()
    from tests.device.test_capture import there, world

    seconds = []
    with world() as w:
        tensor = there()
        for call in range(CALLS):
            began = time.thread_time()
            w.capture.record("s0.F", RecordKey(call, 0, 0), tensor, now=False, keep=False)
            seconds.append(time.thread_time() - began)
            if call % IN_FLIGHT == IN_FLIGHT - 1:
                w.capture.finish()
    print(f"best {1e6 * min(seconds):.0f} µs, median {1e6 * statistics.median(seconds):.0f} µs", flush=True)
    os._exit(0)  # the device's threads are no reason to stay


if __name__ == "__main__":
    main()
