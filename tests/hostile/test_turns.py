"""Whose records are written next, while a job has far more of them than another one."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.frame import Assembler
from swift_ft.log.manifest import MANIFEST, JobMeta
from swift_ft_services.logserver.append_session import AMONG_OTHERS, Appends, Commits
from swift_ft_services.logserver.disk import RealDisk
from swift_ft_services.logserver.reading import Reading
from swift_ft_services.logserver.segments import StorageFailed, StorageFull
from swift_ft_services.logserver.state import AppendCall, EngineConfig, ServerState
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import Write
from tests.hostile.world import BOUND_S, frame
from tests.sim.server import Unlocked
from tests.unit.log.append_call import Replies
from tests.unit.log.memory_storage import MemoryStorage


class World:
    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.state = ServerState(self.storage, EngineConfig(), Unlocked())
        self.commits = Commits(self.state)
        self.appends = Appends(self.state, self.commits)

    def writer(self, job: str) -> AppendCall:
        self.state.core.fence(job, 1)
        session = AppendCall(Replies(), Assembler(2 << 20))
        self.appends.attach(session)
        return session

    def put(
        self, session: AppendCall, job: str, stream: str, sequences: range, body: bytes = b"x", acked: int = 0
    ) -> None:
        opened = log_pb2.Open(job=job, stream=stream, generation=1, acked_sequence=acked)
        self.appends.open(session, opened, 0.0)
        for sequence in sequences:
            one = frame(job, sequence, sequence, stream=stream, body=body)
            self.appends.accept(session, self.appends.parse(session, memoryview(one)))

    def taken_file(self) -> Write:
        write = self.commits.take_file()
        assert write is not None
        return write

    def make_file(self) -> None:
        write = self.taken_file()
        with suppress(StorageFailed):
            self.storage.make_file(write.job, write.stream, write.sequence)
        self.commits.file_made(write)

    def commit(self, meanwhile: Callable[[], None] = lambda: None) -> list[Write]:
        """One turn; where nothing else is to be done, a file is made before it."""
        if not self.commits.work_to_do:
            self.make_file()
        batch = self.commits.next_batch()
        meanwhile()
        writes = [queued.write for queued in batch]
        sync = self.commits.sync_due(batch, 0.0)
        self.storage.commit(writes, sync)
        self.commits.committed(batch, sync, 0.0)
        return writes


def beside_a_neighbour() -> tuple[World, AppendCall, AppendCall]:
    """Two jobs' writers; the neighbour has a record in a file."""
    world = World()
    neighbour, enemy = world.writer("neighbour"), world.writer("enemy")
    world.put(neighbour, "neighbour", "s0", range(1))
    world.commit()
    return world, neighbour, enemy


def jobs(writes: list[Write]) -> set[str]:
    return {write.job for write in writes}


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param([(f"s{number}", range(1), b"x") for number in range(300)], id="of streams"),
        pytest.param([("s0", range(3000), b"x")], id="of records"),
        pytest.param([("s0", range(40), bytes(1 << 20))], id="of bytes"),
    ],
)
def test_a_flood_is_written_in_short_turns_and_nobody_waits_for_more_than_one(
    flood: list[tuple[str, range, bytes]],
) -> None:
    world, neighbour, enemy = beside_a_neighbour()
    for stream, sequences, body in flood:
        world.put(enemy, "enemy", stream, sequences, body)
    world.appends.detach(enemy)  # its call is over; what it has brought is not
    assert world.commits.unsettled == sum(len(sequences) for _, sequences, _ in flood)
    for step in range(1, 5):
        first = world.commit(partial(world.put, neighbour, "neighbour", "s0", range(step, step + 1)))
        assert jobs(first) == {"enemy"}
        assert len(first) <= AMONG_OTHERS.records
        assert len({write.stream for write in first}) <= AMONG_OTHERS.streams
        assert sum(write.size for write in first[:-1]) < AMONG_OTHERS.bytes
        target = world.commits.ask_to_settle("neighbour")
        assert jobs(world.commit()) == {"neighbour"}
        assert world.commits.is_settled(target), "what another job has waiting is not waited for"
    everything = world.commits.ask_to_settle()
    assert not world.commits.is_settled(everything)
    while not world.commits.empty:
        world.commit()
    assert world.commits.is_settled(everything)
    assert world.commits.unsettled == 0


def test_streams_that_are_there_share_a_turn_and_gaps_begin_files_as_new_streams_do() -> None:
    world = World()
    other, writer = world.writer("other"), world.writer("job")
    world.put(other, "other", "s0", range(1))
    for number in range(AMONG_OTHERS.streams):
        world.put(writer, "job", f"s{number}", range(1))
    while not world.commits.empty:
        assert len(world.commit()) == 1, "each begins a file"
    for sequence in (1, 2):
        for number in range(AMONG_OTHERS.streams):
            world.put(writer, "job", f"s{number}", range(sequence, sequence + 1))
    assert len(world.commit()) == 2 * AMONG_OTHERS.streams
    for number in range(AMONG_OTHERS.streams):
        world.put(writer, "job", f"s{number}", range(10, 11), acked=10)
    while not world.commits.empty:
        assert len(world.commit()) == 1


def test_files_are_made_beside_the_commits_of_others() -> None:
    world, neighbour, enemy = beside_a_neighbour()
    world.put(enemy, "enemy", "s0", range(3))
    making = world.taken_file()
    assert (making.job, making.stream, making.sequence) == ("enemy", "s0", 0)
    assert world.commits.file_wanted is None, "one at a time"
    assert world.commits.take_file() is None
    assert not world.commits.work_to_do
    enemys = world.commits.ask_to_settle("enemy")
    assert not world.commits.work_to_do, "no sync settles what is not written yet"
    for sequence in range(1, 5):
        world.put(neighbour, "neighbour", "s0", range(sequence, sequence + 1))
        target = world.commits.ask_to_settle("neighbour")
        assert jobs(world.commit()) == {"neighbour"}
        assert world.commits.is_settled(target)
    world.commits.file_made(making)
    assert not world.commits.is_settled(enemys)
    assert [write.sequence for write in world.commit()] == [0, 1, 2]
    assert world.commits.is_settled(enemys)


def test_a_job_whose_file_is_made_is_not_taken_when_the_others_go() -> None:
    world, neighbour, enemy = beside_a_neighbour()
    world.put(enemy, "enemy", "s0", range(1))
    making = world.taken_file()
    world.appends.detach(neighbour)
    assert world.commits.next_batch() == []
    world.commits.file_made(making)
    assert jobs(world.commit()) == {"enemy"}


def test_nothing_is_settled_while_a_file_of_the_job_is_made() -> None:
    world, _neighbour, enemy = beside_a_neighbour()
    world.put(enemy, "enemy", "s0", range(1))
    making = world.taken_file()
    world.commits.gave_up(StorageFull("made up"), [], 0.0)  # and who settles now may drop the job
    targets = [world.commits.ask_to_settle(job) for job in ("enemy", None)]
    world.commits.committed([], True, 0.0)
    assert [world.commits.is_settled(target) for target in targets] == [False, False]
    assert world.commits.is_settled(world.commits.ask_to_settle("neighbour"))
    world.commits.file_made(making)
    assert [world.commits.is_settled(target) for target in targets] == [True, True]


def test_a_file_that_cannot_be_made_ahead_is_left_to_the_commit() -> None:
    world, _neighbour, enemy = beside_a_neighbour()
    for stream in ("s0", "s1"):
        world.put(enemy, "enemy", stream, range(1))
    world.storage.failing = "made up"
    world.make_file()
    world.storage.failing = ""
    assert [(write.job, write.stream) for write in world.commit()] == [("enemy", "s0")]
    assert [(write.job, write.stream) for write in world.commit()] == [("enemy", "s1")]


def test_a_job_alone_shares_its_syncs() -> None:
    world = World()
    writer = world.writer("job")
    for number in range(20):
        world.put(writer, "job", f"s{number}", range(10))
    assert len(world.commit()) == 200


def test_records_of_a_stream_keep_their_order_over_turns() -> None:
    world = World()
    one, other = world.writer("one"), world.writer("other")
    for begin in range(0, 400, 100):
        for session, job in ((one, "one"), (other, "other")):
            world.put(session, job, "s0", range(begin, begin + 100))
    written: dict[str, list[int]] = {"one": [], "other": []}
    while not world.commits.empty:
        for write in world.commit():
            written[write.job].append(write.sequence)
    assert written == {"one": list(range(400)), "other": list(range(400))}


class SlowName(RealDisk):
    """A manifest of one job takes for ever to get its name."""

    def __init__(self, directory: Path, job: str) -> None:
        super().__init__(directory)
        self._job = job
        self.reached, self.go_on = threading.Event(), threading.Event()

    def rename(self, path: Path, target: Path) -> None:
        if target.name == MANIFEST and target.parent.name == self._job:
            self.reached.set()
            assert self.go_on.wait(BOUND_S)
        super().rename(path, target)


def test_a_file_that_is_made_ahead_holds_up_no_other_jobs_records(tmp_path: Path) -> None:
    disk = SlowName(tmp_path, "enemy")
    storage = DirectoryStorage(tmp_path, 1 << 20, disk)
    storage.recover()
    storage.save("neighbour", JobMeta(generation=1))
    disk.go_on.set()
    storage.save("enemy", JobMeta(generation=1))
    disk.go_on.clear()
    disk.reached.clear()
    assert not storage.has_file("enemy", "s0", 0)
    making = threading.Thread(target=storage.make_file, args=("enemy", "s0", 0))
    making.start()
    assert disk.reached.wait(BOUND_S)
    for sequence in range(2):
        one = Write("neighbour", "s0", sequence, [frame("neighbour", sequence, 0)])
        storage.commit([one], True)
        assert storage.has_file("neighbour", "s0", sequence + 1)
    disk.go_on.set()
    making.join()
    assert storage.has_file("enemy", "s0", 0)
    disk.reached.clear()
    storage.commit([Write("enemy", "s0", 0, [frame("enemy", 0, 0)])], True)
    assert not disk.reached.is_set(), "its manifest names the file already"
    storage.close()


def test_a_manifest_that_is_saved_holds_up_no_other_jobs_records(tmp_path: Path) -> None:
    disk = SlowName(tmp_path, "enemy")
    storage = DirectoryStorage(tmp_path, 1 << 20, disk)
    storage.recover()
    storage.save("neighbour", JobMeta(generation=1))
    saving = threading.Thread(target=storage.save, args=("enemy", JobMeta(generation=1)))
    saving.start()
    assert disk.reached.wait(BOUND_S)
    one = [Write("neighbour", "s0", sequence, [frame("neighbour", sequence, 0)]) for sequence in range(2)]
    storage.commit(one[:1], True)  # its first file
    disk.go_on.set()
    saving.join()
    storage.commit(one[1:], True)
    storage.close()


def test_questions_of_one_job_take_turns_and_another_jobs_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ServerState(MemoryStorage(), EngineConfig(), threading.Condition())
    reading = Reading(state, None, lambda: 0.0)  # type: ignore[arg-type]  # only readers need it
    order: list[str] = []
    going = threading.Event()

    def answer(job: str) -> log_pb2.InventoryReply:
        if job == "asks":
            order.append("in")
            assert going.wait(BOUND_S)
            order.append("out")
        return log_pb2.InventoryReply()

    monkeypatch.setattr(reading, "_inventory", answer)
    threads = [threading.Thread(target=reading.inventory, args=("asks",)) for _ in range(5)]
    for thread in threads:
        thread.start()
    reading.inventory("other")
    going.set()
    for thread in threads:
        thread.join()
    assert order == ["in", "out"] * 5
    assert not reading._inventories
