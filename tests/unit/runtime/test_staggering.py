"""What a rank keeps of a step that has gone on without its vote, and what it offers if it is cut short."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.comm.backend import Misspeculated
from swift_ft.device import Readings
from swift_ft.errors import UsageError
from swift_ft.planner import Assignment
from swift_ft.train.config import SessionConfig
from swift_ft.train.pipeline_collectives import clips, norm_of
from swift_ft.train.staggering import CALM_STEPS, Later, Norm, Staggering
from swift_ft.train.updates import Standing, Updates, ballot
from tests.unit.runtime.wired import site_of, step_of, updates_of


class Task:
    """Something under way that the test ends."""

    def __init__(self, *, done: bool = False) -> None:
        self.done, self.error = done, cast(Exception | None, None)
        self.asked = 0

    def wait(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error
        assert self.done, "the test would wait for ever"


class World:
    """The group of all ranks, of which this one is the only one."""

    present = (0, 1)

    def __init__(self) -> None:
        self.task = Task(done=True)
        self.others = torch.tensor(9.0)

    def gathering(self, part: torch.Tensor) -> tuple[Task, list[torch.Tensor]]:
        return self.task, [part.clone(), self.others]


class State:
    """One number."""

    def __init__(self, updates: Updates) -> None:
        self.updates, self.version, self.present = updates, 0, True
        self.value = torch.zeros(4)

    def changed_by_updates(self) -> set[int]:
        return set()

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self.value = state["version"], state["value"]

    def done(self) -> None:
        self.value += 1
        self.version += 1


class Rank:
    """One that does steps without anybody."""

    def __init__(self, *, last: int = 1000) -> None:
        self.updates = updates_of(SessionConfig(replicas=2))
        self.state, self.world = State(self.updates), World()
        self.member = SimpleNamespace(version=0)
        self.witness = SimpleNamespace(forgot=0)
        self.witness.forget = lambda: setattr(self.witness, "forgot", self.witness.forgot + 1)
        self.phases: list[tuple[str, int]] = []
        """In which it could be killed: the phase, and of which step or version."""
        self.channel = SimpleNamespace(
            unsettled=False,
            faults=SimpleNamespace(at=lambda phase, step: self.phases.append((phase, step))),
            readings=Readings(),
        )
        site = site_of(
            member=self.member,
            channel=self.channel,
            state=self.state,
            world=self.world,
            witness=self.witness,
        )
        self.staggering = Staggering(site, lambda: Assignment.grid(2))
        self.updates.reduced = self.staggering.wait_vote
        self.staggering.lasts = lambda version: version >= last
        self.updates.hold_next = False
        self.staggering.agreed(waits_next=False)

    def step(self, *, norm: float | None = None, waits_next: bool = False) -> Task:
        """One that goes on without its vote, which is under way then."""
        self.staggering.begin_step(step_of())
        self.staggering.wait_vote()
        assert self.updates.ahead
        if norm is not None:
            self.staggering.norm(torch.tensor(norm**2 - 9.0), 2.0, 10.0)
        said, task = ballot(holds=False, lines=False, waits=waits_next, steps=1, group=0, groups=1), Task()
        self.staggering.voted(said, cast(Any, task))
        self.state.done()
        self.member.version = self.staggering.committed(self.state.version)
        return task


def test_a_step_is_settled_in_the_next_one() -> None:
    rank = Rank()
    first = rank.step()
    assert (rank.state.version, rank.member.version) == (1, 0), "nobody else has it yet, as far as is known"
    rank.staggering.begin_step(step_of())
    assert not first.asked, "the next step does not wait at its begin"
    first.done = True
    rank.staggering.wait_vote()
    assert rank.phases == [("settle", 0)]
    assert rank.member.version == 1
    assert rank.updates.ahead
    assert rank.staggering.offer(Standing(version=1)) == Standing(version=1)
    # Its update is under way: only the copy is left.
    cut = rank.staggering.offer(Standing(version=None))
    assert (cut.version, cut.undo_to, cut.undo_exact) == (None, 1, True)


def test_until_then_it_can_be_either_version() -> None:
    rank = Rank()
    task = rank.step()
    rank.staggering.begin_step(step_of())
    rank.updates.lines = True
    wanted = Standing(version=None, undo_to=0, undo_exact=True, forward_to=1, forward_by_all=True)
    assert rank.staggering.offer(Standing(version=1)) == wanted
    task.error = RuntimeError("a rank is lost")
    with pytest.raises(RuntimeError, match="a rank is lost"):
        rank.staggering.wait_vote()
    assert rank.staggering.offer(Standing(version=1)) == wanted
    assert rank.staggering.take_back(0)
    assert rank.phases[-1] == ("take_back", 0)
    assert (rank.state.version, rank.state.value.tolist(), rank.state.present) == (0, [0.0] * 4, True)
    assert rank.staggering.offer(Standing(version=0)) == Standing(version=0), "it is there"
    rank.state.done()
    assert rank.staggering.take_back(0), "what it trains on is not the copy"
    assert rank.state.value.tolist() == [0.0] * 4
    rank.staggering.resume(at_start=False)
    assert not rank.staggering.take_back(0)
    rank.staggering.begin_step(step_of())
    assert not rank.updates.ahead, "the first step of a generation waits"


@pytest.mark.parametrize("norm", [11.0, float("inf"), float("nan")])
def test_a_step_that_had_to_be_clipped_is_no_version_to_stay_at(norm: float) -> None:
    rank = Rank()
    rank.step(norm=norm).done = True
    rank.staggering.begin_step(step_of())
    assert rank.channel.unsettled, "what may be taken back is not logged"
    offered = rank.staggering.offer(Standing(version=1))
    assert (offered.version, offered.undo_to, offered.forward_to) == (None, 0, None)
    with pytest.raises(Misspeculated, match="step 0 is done again: the norm of its gradients is"):
        rank.staggering.wait_vote()
    assert rank.staggering.take_back(0)
    assert rank.witness.forgot, "step 1 has been seen with weights that never were"


def test_a_norm_that_is_not_known_is_not_trusted() -> None:
    rank = Rank()
    rank.world.task.done = False
    rank.step(norm=5.0)
    rank.staggering.begin_step(step_of())
    assert rank.staggering.offer(Standing(version=1)).forward_to is None
    rank.world.task.done = True
    assert rank.staggering.offer(Standing(version=1)).forward_to == 1


def test_an_error_behind_a_bad_step_is_that_steps() -> None:
    rank, own = Rank(), ValueError("the loss is nan")
    rank.step(norm=11.0)
    rank.staggering.begin_step(step_of())
    blamed = rank.staggering.blamed(own)
    assert isinstance(blamed, Misspeculated)
    assert blamed.__cause__ is own
    good = Rank()
    good.step(norm=5.0)
    assert good.staggering.blamed(own) is own
    lost = Rank()
    lost.world.task.error = RuntimeError("a rank is lost")
    lost.step(norm=11.0)
    assert lost.staggering.blamed(own) is own
    assert Rank().staggering.blamed(own) is own


def test_it_waits_until_norms_are_calm() -> None:
    rank = Rank()
    assert not rank.staggering.waits(), "a trainer that does not clip"
    rank.staggering.clipped(torch.tensor(11.0), 10.0)
    for _ in range(CALM_STEPS):
        assert rank.staggering.waits()
        rank.staggering.clipped(torch.tensor(5.0), 10.0)
    assert not rank.staggering.waits()
    rank.step(norm=11.0).done = True
    with pytest.raises(Misspeculated):
        rank.staggering.wait_vote()
    for _ in range(2 * CALM_STEPS):
        assert rank.staggering.waits()
        rank.staggering.clipped(torch.tensor(5.0), 10.0)
    assert not rank.staggering.waits(), "twice as many"


def test_it_waits_where_a_version_must_last() -> None:
    rank = Rank(last=5)
    rank.state.version = 2
    assert not rank.staggering.waits(), "the next step leads to 4"
    rank.state.version = 3
    assert rank.staggering.waits()


def test_what_all_have_agreed_holds_for_the_step_under_way() -> None:
    rank = Rank()
    rank.step(waits_next=True).done = True
    rank.staggering.begin_step(step_of())
    assert rank.updates.ahead, "as far as is known"
    rank.staggering.wait_vote()
    assert not rank.updates.ahead
    assert rank.staggering.offer(Standing(version=1)) == Standing(version=1)
    assert not rank.staggering.take_back(1), "nobody goes back to it"


def test_there_are_two_copies_at_most_and_they_use_the_memory_of_earlier_ones() -> None:
    rank = Rank()
    seen: set[int] = set()
    for _ in range(6):
        task = rank.step(norm=5.0)
        task.done = True
        copies = rank.staggering._copies
        assert len(copies) <= 2
        seen |= {tensor.data_ptr() for copy in copies.values() for tensor in copy.tensors.values()}
    assert len(seen) == 2


def test_replicas_that_do_not_step_alike_are_told_so() -> None:
    rank = Rank()
    rank.step()
    pending = rank.staggering._pending
    assert pending is not None
    pending.task.done = True  # type: ignore[attr-defined]
    pending.ballot[4] = -2.0
    rank.staggering.begin_step(step_of())
    with pytest.raises(UsageError, match="in step 0 optimizers have stepped"):
        rank.staggering.wait_vote()


def test_a_norm_that_was_kept_from_a_step_that_is_gone_ends_no_job() -> None:
    rank = Rank()
    rank.world.task.error = RuntimeError("a rank is lost")
    rank.staggering.begin_step(step_of())
    kept = rank.staggering.norm(torch.tensor(1.0), 2.0, 10.0)
    with pytest.raises(RuntimeError, match="a rank is lost"):
        float(kept)
    rank.staggering.resume(at_start=False)
    assert bool(torch.isnan(kept))


# --- norms ---


@given(
    st.lists(st.floats(0, 100, width=32), min_size=1, max_size=5),
    st.sampled_from([1.0, 2.0, 3.0, float("inf")]),
)
def test_a_norm_has_the_bits_of_one_that_is_waited_for(shares: list[float], kind: float) -> None:
    parts = [torch.tensor(share) for share in shares]
    later = Norm(cast(Any, Task(done=True)), parts, list(range(len(parts))), kind, 1.0)
    assert torch.equal(later.value(), norm_of(parts, kind))


@given(st.floats(width=32, allow_nan=True), st.floats(0.0625, 1e6, width=32))
def test_it_clips_where_torch_changes_gradients(norm: float, max_norm: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    parameter.grad = torch.linspace(0.1, 7.0, 8)
    before = parameter.grad.clone()
    torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, torch.tensor(norm))
    changed = not torch.equal(parameter.grad, before)
    assert clips(torch.tensor(norm), max_norm) or not changed


class Generation:
    """Messages of a device. (`swift_ft.device.Arrivals`)"""

    aborted = False

    def check_arrived(self) -> None:
        if self.aborted:
            raise RuntimeError("an abort")


def test_a_norm_whose_messages_an_abort_may_have_ended_is_not_known() -> None:
    generation = Generation()
    norm, heard = (
        Norm(cast(Any, Task(done=True)), [torch.tensor(0.5)], [0], 2.0, 1.0, arrivals=cast(Any, generation))
        for _ in range(2)
    )
    assert heard.known_not_to_clip
    generation.aborted = True
    assert heard.known_not_to_clip  # an abort after that is none of its messages'
    with pytest.raises(RuntimeError, match="an abort"):
        norm.clips()
    assert not norm.known_not_to_clip


def test_a_number_that_comes_later_is_that_number_to_torch() -> None:
    asked: list[int] = []

    def value() -> torch.Tensor:
        asked.append(1)
        return torch.tensor(3.0)

    later = Later.of(torch.tensor(0.0), value)
    assert isinstance(later, torch.Tensor)
    assert not asked, "nobody has used it"
    assert float(later) == later.item() == 3.0
    assert later > 2
    assert bool(torch.isfinite(later))
    assert torch.equal(torch.stack([later, later * 2]), torch.tensor([3.0, 6.0]))
    assert f"{later:.1f}" == "3.0"
    assert repr(later) == "tensor(3.)"
    assert later.detach().numpy() == 3.0
    assert (later.shape, later.dtype) == (torch.Size([]), torch.float32)
