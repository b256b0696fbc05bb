"""Drop, step by step: what is gone, what comes back where a step fails, and what a crash leaves of it."""

from pathlib import Path

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.directory import DROPPED, LIVES_S
from swift_ft.log.frame import Assembler
from swift_ft.log.manifest import JobMeta
from swift_ft.log.protocol import Reason
from swift_ft_services.logserver import procedures
from swift_ft_services.logserver.append_session import Appends, Commits
from swift_ft_services.logserver.core import Refused, StreamState
from swift_ft_services.logserver.procedures import Clean, Forget, Save, Settle
from swift_ft_services.logserver.quotas import Notice, SpaceConfig
from swift_ft_services.logserver.state import AppendCall, EngineConfig, ServerState
from swift_ft_services.logserver.storage import DirectoryStorage
from tests.sim.disk import ROOT, PowerCut, SimDisk
from tests.sim.kernel import Kernel
from tests.sim.server import Unlocked
from tests.unit.log.append_call import Replies
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.test_storage import fill

SEGMENT_BYTES = 600


@pytest.fixture
def state() -> ServerState:
    """One record in the log; last spoken for at 0."""
    state = ServerState(MemoryStorage(), EngineConfig(space=SpaceConfig()), Unlocked())
    list(procedures.fence(state, JOB, 1, 0.0))
    stream = state.core.open(JOB, STREAM, 1, 0)
    assert isinstance(stream, StreamState)
    state.core.append(stream, 1, frame_of(0)[0])
    state.core.made_durable(stream, 1)
    state.space.recount(state.core)
    return state


def test_a_job_is_no_more_before_its_files_are_forgotten(state: ServerState) -> None:
    size = state.space.server.used_bytes
    assert size > 0
    drop = procedures.drop(state, JOB, LIVES_S, force=False, why="asked for")
    assert isinstance(next(drop), Settle)
    assert JOB in state.core.jobs
    assert isinstance(next(drop), Forget)
    assert JOB not in state.core.jobs
    step = next(drop)
    assert isinstance(step, Notice)
    assert step.fields == {"job": JOB, "records": 1, "bytes": size, "reason": "asked for"}
    with pytest.raises(StopIteration) as done:
        next(drop)
    assert done.value.value == (1, size)
    assert state.space.server.used_bytes == 0
    assert state.touched == {}


def test_it_lives_until_nobody_has_spoken_for_it_for_a_while(state: ServerState) -> None:
    with pytest.raises(Refused) as refused:
        next(procedures.drop(state, JOB, LIVES_S - 1, force=False, why=""))
    assert refused.value.refusal.reason is Reason.LIVES
    next(procedures.drop(state, JOB, LIVES_S - 1, force=True, why=""))


def test_where_the_disk_refuses_the_job_is_back(state: ServerState) -> None:
    job, size = state.core.job(JOB), state.space.server.used_bytes
    drop = procedures.drop(state, JOB, LIVES_S, force=False, why="")
    while not isinstance(next(drop), Forget):
        pass
    with pytest.raises(Refused):
        drop.throw(Refused(Reason.CLOSED, "made up"))
    assert state.core.jobs == {JOB: job}
    assert state.space.server.used_bytes == size
    assert JOB in state.touched


def test_a_trim_that_comes_after_it_saves_and_removes_nothing(state: ServerState) -> None:
    job = state.core.job(JOB)
    list(procedures.drop(state, JOB, LIVES_S, force=False, why=""))
    assert [step for step in procedures.trim(state, job, 1) if isinstance(step, (Save, Clean))] == []
    assert JOB not in state.core.jobs


def started(disk: SimDisk) -> tuple[DirectoryStorage, dict[str, int]]:
    storage = DirectoryStorage(ROOT, SEGMENT_BYTES, disk)
    jobs = storage.recover()
    return storage, {job.name: sum(len(found.by_sequence) for found in job.streams) for job in jobs}


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_after_a_crash_all_of_the_job_is_there_or_nothing(power_cut: bool, seed: int) -> None:
    """Before each operation of the disk in turn; and what was answered stays so."""
    seen = set()
    for crash_in in range(40):
        disk = SimDisk(Kernel(seed), "disk")
        storage, _ = started(disk)
        storage.save(JOB, JobMeta(generation=1))
        fill(storage, 0, 8)
        disk.crash_in = crash_in
        forgotten = False
        try:
            remove_files = storage.drop(JOB)
            forgotten = True
            remove_files()
        except PowerCut:
            if power_cut:
                disk.power_cut()
        disk.crash_in = -1
        _, found = started(disk)
        assert found in ({JOB: 8}, {})
        assert not (forgotten and found)
        assert not [name for name, _ in disk.names(Path(ROOT)) if name.startswith(DROPPED)]
        seen.add((forgotten, bool(found)))
    assert {(False, True), (True, False)} <= seen


def test_nobody_comes_back_while_writers_are_cut_off(state: ServerState) -> None:
    """Else one that is quick is there again before all of it is durable, for ever."""
    appends = Appends(state, Commits(state))
    session = AppendCall(Replies(), Assembler(1 << 20))
    appends.attach(session)
    opening = log_pb2.Open(job=JOB, stream=STREAM, generation=1)
    drop = procedures.drop(state, JOB, 0.0, force=True, why="")
    assert isinstance(next(drop), Settle)
    with pytest.raises(Refused, match="was dropped"):
        appends.open(session, opening, 0.0)
    with pytest.raises(Refused):
        drop.throw(Refused(Reason.CLOSED, "made up"))
    appends.open(session, opening, 0.0)  # it was not dropped
    reset = procedures.reset(state, JOB, 1)
    assert isinstance(next(reset), Settle)
    assert session.refusal is not None
    again = AppendCall(Replies(), Assembler(1 << 20))
    appends.attach(again)
    with pytest.raises(Refused, match="was reset"):
        appends.open(again, opening, 0.0)
    assert isinstance(next(reset), Save)  # having settled once
    with pytest.raises(Refused, match="was reset"):
        appends.open(again, opening, 0.0)
    next(reset)
    appends.open(again, opening, 0.0)
