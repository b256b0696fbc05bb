"""A crash before every operation of a storage on its disk: nothing that was acknowledged is ever lost.

The workload commits, rolls segments, makes some ahead, trims and removes. Before each operation that changes the disk
the process is gone; all that it wrote is left, or, after a power cut, what was synced and a part of the rest. A storage
that starts there must find every acknowledged record, and the newest manifest that was acknowledged. A write that a
power cut has torn may be a hole, of records that nobody was told of.
"""

import itertools
from dataclasses import dataclass

import pytest

from swift_ft.log.manifest import JobMeta, StreamMeta
from swift_ft.log.segment import SEGMENT_HEADER_BYTES
from swift_ft_services.logserver.storage import DirectoryStorage
from tests.sim.disk import ROOT, PowerCut, SimDisk
from tests.sim.kernel import Kernel
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.storages import FRAME, frame_in, write

THREE_A_SEGMENT = SEGMENT_HEADER_BYTES + 3 * FRAME


@dataclass
class Told:
    """What whoever uses the storage knows."""

    durable: int = -1
    generation: int = 0
    first: int = 0
    """What the manifest that is being written may drop."""


def workload(storage: DirectoryStorage, told: Told) -> None:
    storage.save(JOB, JobMeta(1))
    told.generation = 1
    sequence = 0
    for generation in (2, 3):
        for size in (1, 2, 3, 1):
            if size > 1:
                storage.make_file(JOB, STREAM, sequence)
            storage.commit([write(sequence + index) for index in range(size)], True)
            sequence += size
            told.durable = sequence - 1
        told.first = sequence - 2
        storage.save(JOB, JobMeta(generation, sequence - 2, {STREAM: StreamMeta(sequence - 2, sequence, "")}))
        told.generation = generation
        storage.remove(JOB, STREAM, sequence - 2)
    told.first = sequence
    storage.save(JOB, JobMeta(4, sequence, {STREAM: StreamMeta(sequence, sequence, "")}))
    told.generation = 4
    storage.remove(JOB, STREAM, sequence)
    storage.close()


def check(disk: SimDisk, told: Told, power_cut: bool) -> None:
    again = DirectoryStorage(ROOT, THREE_A_SEGMENT, disk)
    jobs = again.recover()
    if not jobs:
        assert told.generation == 0
        return
    (job,) = jobs
    assert not job.apart
    assert job.meta.generation >= told.generation
    assert job.streams or told.durable < 0
    for stream in job.streams:
        lost = {n for hole in stream.holes for n in range(hole.sequence, hole.end_sequence)}
        assert not lost or (power_cut and min(lost) > told.durable)
        assert stream.appended > told.durable
        assert stream.first <= told.first
        assert stream.by_sequence.keys() | lost == set(range(stream.first, stream.appended))
        for sequence in stream.by_sequence.keys() - lost:
            assert frame_in(again, STREAM, sequence) == frame_of(sequence)[1]
        again.commit([write(stream.appended)], True)  # and it goes on from there


@pytest.mark.parametrize(("power_cut", "seed"), [(False, 0), *((True, seed) for seed in range(8))])
def test_fault_25_a_crash_before_every_operation(power_cut: bool, seed: int) -> None:
    for crash_in in itertools.count():
        disk, told = SimDisk(Kernel(100 * seed + crash_in), "disk"), Told()
        storage = DirectoryStorage(ROOT, THREE_A_SEGMENT, disk)
        storage.recover()
        disk.crash_in = crash_in
        try:
            workload(storage, told)
        except PowerCut:
            if power_cut:
                disk.power_cut()
        else:
            break
        disk.crash_in = -1
        try:
            check(disk, told, power_cut)
        except AssertionError as error:
            error.add_note(f"crash before operation {crash_in}")
            raise
    assert crash_in > 60
