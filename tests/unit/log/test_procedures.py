"""Fence, trim and reset step by step: what is durable before what."""

import pytest

from swift_ft.log.manifest import JobMeta
from swift_ft.log.protocol import Reason
from swift_ft_services.logserver import procedures
from swift_ft_services.logserver.append_session import Appends, Commits
from swift_ft_services.logserver.core import JobState, Refused, StreamState
from swift_ft_services.logserver.procedures import Clean, Procedure, Save, Settle
from swift_ft_services.logserver.quotas import Notice
from swift_ft_services.logserver.state import EngineConfig, ServerState
from swift_ft_services.logserver.storage_interface import RecoveredJob
from tests.sim.server import Unlocked
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage


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


def started(storage: MemoryStorage) -> ServerState:
    state = ServerState(storage, EngineConfig(), Unlocked())
    appends = Appends(state, Commits(state))
    for job, meta in storage.metas.items():
        appends.take_over(RecoveredJob(JobState(job), meta), 0.0)
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
    state = started(MemoryStorage())
    carry_out(state, procedures.fence(state, JOB, 1, 0.0))
    for sequence in range(3):
        append(state, sequence)
    steps = list(procedures.trim(state, state.core.job(JOB), 2))
    assert [type(step) for step in steps] == [Save, Clean, Notice]


def test_a_reset_is_carried_out_once_however_late_it_comes_again() -> None:
    """A call that timed out and was repeated may arrive when the job runs again."""
    storage = MemoryStorage()
    state = started(storage)
    carry_out(state, procedures.fence(state, JOB, 1, 0.0))
    assert append(state, 0).by_sequence
    assert carry_out(state, procedures.reset(state, JOB, 1)) == ["Settle", "Save", "Clean", "Notice"]
    stream = append(state, 1)
    assert carry_out(state, procedures.reset(state, JOB, 1)) == []
    assert list(stream.by_sequence) == [1]
    assert carry_out(started(storage), procedures.reset(started(storage), JOB, 1)) == []
    carry_out(state, procedures.fence(state, JOB, 2, 0.0))
    carry_out(state, procedures.reset(state, JOB, 2))
    assert not stream.by_sequence


def test_the_second_reset_of_a_generation_drops_what_was_written_since_its_first() -> None:
    """A new server is emptied, ranks write to it while the job is planned, and the plan gives the log up."""
    storage = MemoryStorage()
    state = started(storage)
    carry_out(state, procedures.fence(state, JOB, 1, 0.0))
    carry_out(state, procedures.reset(state, JOB, 1))
    stream = append(state, 0)
    carry_out(state, procedures.reset(state, JOB, 1, number=1))
    assert not stream.by_sequence
    append(state, 1)
    for again in (0, 1):
        assert carry_out(state, procedures.reset(state, JOB, 1, again)) == []
        assert carry_out(started(storage), procedures.reset(started(storage), JOB, 1, again)) == []
    assert list(stream.by_sequence) == [1]
    carry_out(state, procedures.fence(state, JOB, 2, 0.0))
    carry_out(state, procedures.reset(state, JOB, 2))
    assert not stream.by_sequence


def test_a_server_that_has_lost_a_job_neither_fences_nor_resets_it_as_one_that_it_knows() -> None:
    """Else nobody could tell any more that what it had is gone."""
    state = started(MemoryStorage())
    for procedure in (procedures.fence(state, JOB, 2, 0.0, held=True), procedures.reset(state, JOB, 2)):
        with pytest.raises(Refused) as refused:
            carry_out(state, procedure)
        assert refused.value.refusal.reason is Reason.UNKNOWN
        assert not state.core.jobs
    carry_out(state, procedures.fence(state, JOB, 2, 0.0))
    carry_out(state, procedures.fence(state, JOB, 3, 0.0, held=True))
    assert carry_out(state, procedures.reset(state, JOB, 3))
    assert state.core.generation_of(JOB) == 3


def test_behind_a_reset_steps_that_were_trimmed_may_come_again() -> None:
    """All ranks have gone back to a checkpoint before the one that the log was trimmed for."""
    storage = MemoryStorage()
    state = started(storage)
    carry_out(state, procedures.fence(state, JOB, 1, 0.0))
    for sequence in range(4):
        append(state, sequence)
    job = state.core.job(JOB)
    carry_out(state, procedures.trim(state, job, 3))
    with pytest.raises(Refused):
        state.core.check_readable(job, 1)
    carry_out(state, procedures.fence(state, JOB, 2, 0.0))
    carry_out(state, procedures.reset(state, JOB, 2))
    state.core.check_readable(job, 1)
    assert started(storage).core.job(JOB).trimmed_below_step == 0
    assert carry_out(state, procedures.trim(state, job, 2)), "it is trimmed anew"
    assert (job.trimmed_below_step, job.trim_recorded) == (2, 2)


def test_a_reset_that_was_not_recorded_is_carried_out_again() -> None:
    state = started(MemoryStorage())
    carry_out(state, procedures.fence(state, JOB, 1, 0.0))
    append(state, 0)
    broken = procedures.reset(state, JOB, 1)
    while not isinstance(next(broken), Save):
        pass
    broken.close()  # the disk was full
    assert carry_out(state, procedures.reset(state, JOB, 1)) == ["Settle", "Save", "Clean", "Notice"]


def test_a_trim_that_could_not_be_recorded_is_owed() -> None:
    state = started(MemoryStorage())
    carry_out(state, procedures.fence(state, JOB, 1, 0.0))
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
