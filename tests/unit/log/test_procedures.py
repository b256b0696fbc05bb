"""Fence, trim, reset and drop step by step: what is durable before what, and what a step that fails leaves."""

from pathlib import Path

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.directory import DROPPED, LIVES_S
from swift_ft.log.frame import Assembler
from swift_ft.log.manifest import JobMeta
from swift_ft.log.protocol import Reason
from swift_ft_services.logserver import procedures
from swift_ft_services.logserver.append_session import Appends, Commits
from swift_ft_services.logserver.core import JobState, Refused, StreamState
from swift_ft_services.logserver.procedures import Clean, Forget, Procedure, Save, Settle
from swift_ft_services.logserver.quotas import Notice
from swift_ft_services.logserver.state import AppendCall, EngineConfig, ServerState
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import RecoveredJob, Storage
from tests.sim.disk import ROOT, PowerCut, SimDisk
from tests.sim.kernel import Kernel
from tests.sim.server import Unlocked
from tests.unit.log.append_call import Replies, refusing
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.storages import fill


def carry_out(state: ServerState, procedure: Procedure[None]) -> list[str]:
    """The steps in their order, each done."""
    done = []
    for step in procedure:
        done.append(type(step).__name__)
        if isinstance(step, Save):
            state.storage.save(step.job, step.meta)
    return done


def append(state: ServerState, sequence: int) -> StreamState:
    stream = state.core.open(JOB, STREAM, 1, 0)
    assert isinstance(stream, StreamState)
    state.core.append(stream, 1, frame_of(sequence)[0])
    state.core.made_durable(stream, sequence + 1)
    return stream


def started(storage: Storage) -> ServerState:
    assert isinstance(storage, MemoryStorage)
    state = ServerState(storage, EngineConfig(), Unlocked())
    appends = Appends(state, Commits(state))
    for job, meta in storage.metas.items():
        appends.take_over(RecoveredJob(JobState(job), meta), 0.0)
    return state


def fenced() -> ServerState:
    """Generation 1 is granted."""
    state = started(MemoryStorage())
    carry_out(state, procedures.fence(state, JOB, 1, 0.0))
    return state


def test_a_fence_is_durable_before_it_is_answered() -> None:
    storage = MemoryStorage()
    fence = procedures.fence(started(storage), JOB, 3, 0.0)
    assert isinstance(next(fence), Settle)
    save = next(fence)
    assert isinstance(save, Save)
    assert save.meta.generation == 3
    assert isinstance(next(fence), Notice)


def test_a_trim_is_durable_before_anything_is_unlinked() -> None:
    state = fenced()
    for sequence in range(3):
        append(state, sequence)
    steps = list(procedures.trim(state, state.core.job(JOB), 2))
    assert [type(step) for step in steps] == [Save, Clean, Notice]


def test_a_reset_is_carried_out_once_however_late_it_comes_again() -> None:
    """A call that timed out and was repeated may arrive when the job runs again."""
    state = fenced()
    assert append(state, 0).by_sequence
    assert carry_out(state, procedures.reset(state, JOB, 1)) == ["Settle", "Save", "Clean", "Notice"]
    stream = append(state, 1)
    assert carry_out(state, procedures.reset(state, JOB, 1)) == []
    assert list(stream.by_sequence) == [1]
    assert carry_out(started(state.storage), procedures.reset(started(state.storage), JOB, 1)) == []
    carry_out(state, procedures.fence(state, JOB, 2, 0.0))
    carry_out(state, procedures.reset(state, JOB, 2))
    assert not stream.by_sequence


def test_the_second_reset_of_a_generation_drops_what_was_written_since_its_first() -> None:
    """A new server is emptied, ranks write to it while the job is planned, and the plan gives the log up."""
    state = fenced()
    carry_out(state, procedures.reset(state, JOB, 1))
    stream = append(state, 0)
    carry_out(state, procedures.reset(state, JOB, 1, number=1))
    assert not stream.by_sequence
    append(state, 1)
    for again in (0, 1):
        assert carry_out(state, procedures.reset(state, JOB, 1, again)) == []
        assert (
            carry_out(started(state.storage), procedures.reset(started(state.storage), JOB, 1, again)) == []
        )
    assert list(stream.by_sequence) == [1]
    carry_out(state, procedures.fence(state, JOB, 2, 0.0))
    carry_out(state, procedures.reset(state, JOB, 2))
    assert not stream.by_sequence


def test_a_server_that_has_lost_a_job_neither_fences_nor_resets_it_as_one_that_it_knows() -> None:
    """Else nobody could tell any more that what it had is gone."""
    state = started(MemoryStorage())
    for procedure in (procedures.fence(state, JOB, 2, 0.0, held=True), procedures.reset(state, JOB, 2)):
        with refusing(Reason.UNKNOWN):
            carry_out(state, procedure)
        assert not state.core.jobs
    carry_out(state, procedures.fence(state, JOB, 2, 0.0))
    carry_out(state, procedures.fence(state, JOB, 3, 0.0, held=True))
    assert carry_out(state, procedures.reset(state, JOB, 3))
    assert state.core.generation_of(JOB) == 3


def test_behind_a_reset_steps_that_were_trimmed_may_come_again() -> None:
    """All ranks have gone back to a checkpoint before the one that the log was trimmed for."""
    state = fenced()
    for sequence in range(4):
        append(state, sequence)
    job = state.core.job(JOB)
    carry_out(state, procedures.trim(state, job, 3))
    with pytest.raises(Refused):
        state.core.check_readable(job, 1)
    carry_out(state, procedures.fence(state, JOB, 2, 0.0))
    carry_out(state, procedures.reset(state, JOB, 2))
    state.core.check_readable(job, 1)
    assert started(state.storage).core.job(JOB).trimmed_below_step == 0
    assert carry_out(state, procedures.trim(state, job, 2)), "it is trimmed anew"
    assert (job.trimmed_below_step, job.trim_recorded) == (2, 2)


def test_a_trim_that_comes_late_drops_nothing_that_has_come_since_a_reset() -> None:
    """All ranks have gone back to an older checkpoint, because that of the trim could not be loaded."""
    state = fenced()
    append(state, 0)
    job = state.core.job(JOB)
    late = procedures.trim(state, job, 3, 1)  # it waits until nothing else changes the job
    carry_out(state, procedures.fence(state, JOB, 2, 0.0))
    carry_out(state, procedures.reset(state, JOB, 2))
    with refusing(Reason.STALE_GENERATION):
        carry_out(state, late)
    state.core.check_readable(job, 0)
    carry_out(state, procedures.trim(state, job, 1, 2))
    assert job.trimmed_below_step == 1


def test_a_reset_that_was_not_recorded_is_carried_out_again() -> None:
    state = fenced()
    append(state, 0)
    broken = procedures.reset(state, JOB, 1)
    while not isinstance(next(broken), Save):
        pass
    broken.close()  # the disk was full
    assert carry_out(state, procedures.reset(state, JOB, 1)) == ["Settle", "Save", "Clean", "Notice"]


def test_a_trim_that_could_not_be_recorded_is_owed() -> None:
    state = fenced()
    for sequence in range(3):
        stream = append(state, sequence)
    job = state.core.job(JOB)
    refused = procedures.trim(state, job, 2)
    assert isinstance(next(refused), Save)
    with pytest.raises(Refused):
        refused.throw(Refused(Reason.FULL, "no space left"))
    save, clean, said = procedures.trim(state, job, 2)
    assert isinstance(save, Save)
    assert (save.meta.trimmed_below_step, save.meta.streams[STREAM].first) == (2, 2)
    assert clean == Clean([stream])
    assert said == Notice("trimmed", {"job": JOB, "below_step": 2})
    assert list(procedures.trim(state, job, 2)) == []


def test_a_trim_of_before_the_start_is_not_owed() -> None:
    storage = MemoryStorage()
    storage.metas[JOB] = JobMeta(generation=1, trimmed_below_step=2)
    state = started(storage)
    assert list(procedures.trim(state, state.core.job(JOB), 2)) == []


# -- drop ----------------------------------------------------------------------------------------------


SEGMENT_BYTES = 600


@pytest.fixture
def state() -> ServerState:
    """One record in the log; last spoken for at 0."""
    state = fenced()
    append(state, 0)
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
    with refusing(Reason.LIVES):
        next(procedures.drop(state, JOB, LIVES_S - 1, force=False, why=""))
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


def started_on(disk: SimDisk) -> tuple[DirectoryStorage, dict[str, int]]:
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
        storage, _ = started_on(disk)
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
        _, found = started_on(disk)
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
