"""What a dropped step takes back, and what a trainer is told when it forgot something."""

import copy
import json
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import ReplicaDiffers, ServiceError, UsageError
from swift_ft.state.carried_gradients import WholeModule
from swift_ft.state.digests import DIGEST_BYTES, digest_of
from swift_ft.train.training_state import TrainerState
from swift_ft.train.updates import Standing
from swift_ft.train.verification import Audit
from tests.unit.runtime.wired import state_of, updates_of


class Stage:
    """As much of a logged stage as the state looks at."""

    def __init__(self, module: nn.Module, index: int = 0) -> None:
        self.submod, self.stage_index, self.num_stages = module, index, 1
        self.cleared = 0
        self.bwd_cache: dict[int, Any] = {0: None}
        self.args_recv_info: dict[int, Any] = {}
        self.grad_recv_info: dict[int, Any] = {}
        self.backward_state: dict[int, Any] = {0: None}
        self.dw_runner: dict[int, Any] = {0: None}

    def begin_step(self) -> None:
        pass

    def clear_runtime_states(self) -> None:
        self.cleared += 1


class Schedule:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._internal_losses = [torch.ones(1)]
        self.fwd_recv_ops = {(0, 0): [object()]}
        self.bwd_recv_ops = {(0, 0): [object()]}


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def make() -> tuple[TrainerState, Stage, torch.optim.Optimizer, Counter]:
    torch.manual_seed(0)
    state, stage, counter = state_of(1, updates_of()), Stage(Model()), Counter()
    optimizer = torch.optim.AdamW(stage.submod.parameters())
    state.stages.append(stage)
    state.schedules.append(Schedule(stage))
    state.updates.add(optimizer)
    state.add_object("loader", counter)
    return state, stage, optimizer, counter


def half_a_step(state: TrainerState, stage: Stage, counter: Counter) -> None:
    state.begin_step()
    counter.n += 1
    stage.submod(torch.randn(4, 3)).sum().backward()


def test_a_dropped_step_leaves_no_trace() -> None:
    state, stage, _, counter = make()
    before = state.digests()
    half_a_step(state, stage, counter)
    assert state.digests() != before  # running statistics and the counter have moved
    assert state.updates.standing(0) == Standing(version=0)
    state.drop_step()
    assert state.digests() == before
    assert all(p.grad is None for p in stage.submod.parameters())
    schedule = state.schedules[0]
    assert not schedule._internal_losses
    assert not schedule.fwd_recv_ops
    assert not schedule.bwd_recv_ops
    assert not stage.bwd_cache
    assert not stage.backward_state
    assert not stage.dw_runner
    assert stage.cleared == 1


def test_gradients_that_a_step_leaves_outlive_a_failure_between_two_steps() -> None:
    """A rank that meets its lost peer behind its step (comparing replicas, saving) drops no step."""
    state, stage, _, counter = make()
    for _ in range(2):
        half_a_step(state, stage, counter)  # gradients are added to
        state.end_step()
    left = [p.grad.clone() for p in stage.submod.parameters() if p.grad is not None]
    assert left
    state.drop_step()
    assert state.state_dict()["gradients"]["of"]
    for parameter, gradient in zip(stage.submod.parameters(), left, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.equal(gradient)


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.average = nn.Linear(160, 160), nn.Linear(160, 160).requires_grad_(False)

    def move(self) -> None:
        """As many averages of weights do: torch's version counters say nothing of it."""
        for slow, fast in zip(self.average.parameters(), self.linear.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


@pytest.mark.parametrize("begins", [0, 8])
def test_frozen_weights_that_are_written_by_data_are_not_left_half_a_step_ahead(begins: int) -> None:
    """Where steps have always done so they are put back; where a step does so for the first time, the state is given
    up."""
    state, model = state_of(), Averaged()
    state.stages.append(Stage(model))
    state.updates.add(torch.optim.SGD(model.linear.parameters(), lr=0.1))
    state.present = True
    for step in range(12):
        before = state.digests()
        state.begin_step()
        if step >= begins:
            model.move()
        known = step != begins
        assert (state.standing().version is not None) is known
        state.drop_step()
        assert state.present is known
        if known:
            assert state.digests() == before
        state.present = True  # a checkpoint is loaded
        state.begin_step()
        if step >= begins:
            model.move()
        state.end_step()


def test_a_validation_that_is_cut_short_leaves_every_module_as_it_was() -> None:
    """Also one that the trainer has set apart, and does not train."""
    state, stage, _, _ = make()
    stage.submod.norm.eval()
    state.begin_step()
    stage.submod.eval()
    state.drop_step()
    assert stage.submod.training
    assert stage.submod.linear.training
    assert not stage.submod.norm.training


def test_what_a_step_binds_anew_goes_with_it() -> None:
    """Ranks are cut off at different places: what each has left behind would tell replicas apart."""
    state, stage, optimizer, _ = make()
    norm = stage.submod.norm
    state.begin_step()
    norm.running_mean = 0.9 * norm.running_mean + 1  # type: ignore[operator, assignment]
    norm.register_buffer("cache", torch.ones(2))
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[0]["warm"] = True
    state.drop_step()
    untouched, *_ = make()
    assert state.digests() == untouched.digests()
    assert not norm.running_mean.any()
    state.begin_step()
    optimizer.param_groups[0]["lr"] = 0.5
    stage.submod(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state.end_step()
    state.drop_step()
    assert optimizer.param_groups[0]["lr"] == 0.5  # that step is done


def test_a_step_whose_update_has_begun_is_not_intact() -> None:
    state, stage, optimizer, counter = make()
    half_a_step(state, stage, counter)
    optimizer.step()
    assert state.updates.standing(0) == Standing(version=None)
    state.end_step()
    assert state.updates.standing(1) == Standing(version=1)
    assert state.version == 1


def test_a_copy_knows_which_attributes_are_each_replicas_own() -> None:
    """It is without them until its first step, and is the same replica all the same."""
    (state, stage, *_), (other, others_stage, *_) = make(), make()
    for each in (state, other):
        each.modules.remember({"0": each.stages[0].submod})
    stage.submod.last_loss = 0.5
    state.apart = list(state.state_dict()["modules"]["values"])
    assert state.apart == ["0.last_loss"]
    other.load_state_dict(state.shared_dict())
    assert not hasattr(others_stage.submod, "last_loss")
    assert other.digests() == state.digests()
    others_stage.submod.last_loss = 0.25  # its own batch's
    assert other.shared_dict()["modules"]["values"] == {}
    stage.submod.calls = 1
    assert other.digests() != state.digests()


def test_every_part_of_the_state_is_in_its_own_digest() -> None:
    state, stage, optimizer, counter = make()
    base = state.digests()
    assert set(base) == {"parameters", "optimizer", "data", "rng"}

    def changed() -> set[str]:
        return {name for name, value in state.digests().items() if value != base[name]}

    counter.n = 1
    assert changed() == {"data"}
    counter.n = 0
    with torch.no_grad():
        stage.submod.linear.weight[0, 0] += 1  # type: ignore[union-attr, index, operator]
    assert changed() == {"parameters"}
    optimizer.param_groups[0]["lr"] = 0.5
    assert changed() == {"parameters", "optimizer"}
    state.version = 1
    assert changed() == {"parameters", "optimizer", "rng"}


def test_a_checkpoint_of_another_trainer_is_refused() -> None:
    state, *_ = make()
    saved = state.state_dict()
    with pytest.raises(ServiceError, match="this trainer made stages"):
        make()[0].load_state_dict({**saved, "stages": {"7": {}}})
    with pytest.raises(ServiceError, match="registered"):
        make()[0].load_state_dict({**saved, "objects": {}})


def test_a_rank_that_cannot_take_its_step_back_gives_up_its_state_and_not_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The worker of a DataLoader, made anew after a failure, had died: a survivor ended, and the job with it."""
    state, stage, _, counter = make()

    class Breaks:
        def state_dict(self) -> dict[str, int]:
            return {"place": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ConnectionResetError("reset by peer")

    state.add_object("batches", Breaks())
    half_a_step(state, stage, counter)
    stage.submod.eval()
    state.drop_step()
    assert not state.present
    assert stage.submod.training
    assert counter.n == 0
    assert "register(batches=...) cannot load its state: ConnectionResetError" in capsys.readouterr().err


def test_an_optimizer_that_has_other_groups_is_named() -> None:
    state, *_ = make()
    saved = copy.deepcopy(state.state_dict())
    saved["optimizers"][0]["param_groups"] *= 2
    with pytest.raises(ServiceError, match=r"optimizer 0 \(\w+\)"):
        state.load_state_dict(saved)


def test_what_a_trainer_forgot_is_named() -> None:
    state, stage, _, _ = make()
    state.check_complete()
    state.schedules.clear()
    with pytest.raises(UsageError, match=r"session\.register\(schedule=schedule"):
        state.check_complete()
    state.optimizers.clear()
    with pytest.raises(UsageError, match=r"session\.optimizer"):
        state.check_complete()
    state.stages.clear()
    with pytest.raises(UsageError, match="pipeline_stage"):
        state.check_complete()
    state, stage, _, _ = make()
    stage.submod.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(UsageError, match="have no optimizer"):
        state.check_complete()
    state, stage, _, _ = make()
    state.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(UsageError, match="in no stage"):
        state.check_complete()


def test_an_object_that_cannot_be_taken_back_is_refused() -> None:
    state, *_ = make()
    with pytest.raises(UsageError, match="without state_dict"):
        state.add_object("data", iter([1]))
    with pytest.raises(UsageError, match="twice"):
        state.add_object("loader", Counter())


def make_several() -> tuple[TrainerState, list[nn.Module]]:
    """A GAN's: two whole modules, an optimizer each."""
    torch.manual_seed(0)
    state, modules = state_of(1, updates_of()), [nn.Linear(2, 3), Model()]
    for module in modules:
        state.add_stage(WholeModule(module))
        state.updates.add(torch.optim.Adam(module.parameters()))
    return state, modules


def test_several_whole_modules_are_all_in_the_state() -> None:
    state, modules = make_several()
    state.check_complete()
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter += 1
    other, others = make_several()
    other.load_state_dict(copy.deepcopy(state.state_dict()))
    assert other.digests() == state.digests()
    for module, loaded in zip(modules, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), loaded.parameters(), strict=True))
    assert state.gradient_bytes() == {0: sum(p.nbytes for m in modules for p in m.parameters())}
    for place, module in enumerate(modules):
        before = state.digests()["parameters"], digest_of(state.parts()["parameters"])
        with torch.no_grad():
            next(module.parameters())[0, 0] += 1
        assert state.digests()["parameters"] != before[0], place
        assert digest_of(state.parts()["parameters"]) != before[1], place


def test_the_same_stage_twice_is_refused_in_one_line() -> None:
    state, modules = make_several()
    with pytest.raises(UsageError, match="given to the session twice"):
        state.add_stage(WholeModule(modules[0]))
    state, *_ = make()
    with pytest.raises(UsageError, match="two stages 0 on one rank"):
        state.add_stage(Stage(nn.Linear(1, 1)))
    state.add_stage(Stage(nn.Linear(1, 1), index=1))
    state.add_stage(WholeModule(nn.Linear(1, 1)))
    assert list(state.keyed()) == ["0", "1", "module0"]


@pytest.mark.filterwarnings("ignore:Sparse")  # torch calls them a prototype
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_is_a_constant_or_refused(
    layout: torch.layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, module = state_of(), nn.Linear(2, 2)
    module.register_buffer("graph", torch.eye(2).to_sparse(layout=layout))
    with pytest.raises(UsageError, match=f"graph of a module is sparse .{layout}.*persistent=False"):
        state.add_stage(WholeModule(module))
    module.register_buffer("graph", module.graph, persistent=False)
    state.add_stage(WholeModule(module))
    given: list[torch.Tensor] = []
    monkeypatch.setattr(state.updates, "broadcast", given.extend)
    monkeypatch.setattr(state.updates.ties, "align", lambda: None)
    state.align()
    assert {tensor.layout for tensor in given} == {torch.strided}


def test_what_the_session_is_told_of_in_a_step_is_refused() -> None:
    state, stage, _, counter = make()
    state.remember()
    half_a_step(state, stage, counter)
    for late in (
        lambda: state.add_stage(Stage(Model())),
        lambda: state.add_optimizer(torch.optim.SGD(stage.submod.parameters(), lr=0.1)),
        lambda: state.add_object("late", Counter()),
    ):
        with pytest.raises(
            UsageError, match="in train_step: a process that replaces a lost rank begins without it"
        ):
            late()


def test_parameters_that_a_step_makes_or_removes_are_refused() -> None:
    for change in (
        lambda module: module.append(nn.Linear(2, 2)),
        lambda module: prune.l1_unstructured(module[0], "weight", 0.5),
    ):
        state = state_of(1, updates_of())
        stage = Stage(nn.Sequential(nn.Linear(2, 2)))
        state.stages.append(stage)
        state.remember()
        state.begin_step()
        state.end_step()
        state.begin_step()
        change(stage.submod)
        with pytest.raises(UsageError, match="has made or removed parameters"):
            state.end_step()


def test_other_parameters_of_the_same_names_are_the_trainer_s() -> None:
    state, stage, optimizer, _ = make()
    state.remember()
    state.begin_step()
    stage.submod.load_state_dict(stage.submod.state_dict(), assign=True)
    optimizer.param_groups[0]["params"][:] = stage.submod.parameters()
    state.end_step()
    assert state.version == 1


def test_a_step_that_gives_its_optimizer_what_is_in_no_stage_is_refused() -> None:
    state, _, optimizer, _ = make()
    state.remember()
    state.begin_step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(UsageError, match="parameters that are in no stage"):
        state.end_step()


class Others:
    """A group of two replicas, of which the other one says what it is told to."""

    ranks = present = (0, 1)

    def __init__(self, change: Any) -> None:
        self._change = change

    def gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        return [own, self._change(own.clone())]

    gathered_texts = ReconfigurableGroup.gathered_texts


class Position:
    def state_dict(self) -> dict[str, Any]:
        return {"dl": [{"main": {"seed": 3, "at": 4}}], "epoch": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_what_differs_in_an_object_is_named_by_its_path() -> None:
    state, _, _, _ = make()
    state.add_object("position", Position())
    begin = list(state.parts()).index("register(position=...)") * DIGEST_BYTES

    def differs(other: torch.Tensor) -> torch.Tensor:
        text = bytes(other.numpy())
        if text.startswith(b"{"):  # the words of all paths
            told = json.loads(text)
            told["register(position=...).dl.0.main.seed"] = "another"
            return torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
        other[begin if len(text) > begin else 0] ^= 1
        return other

    audit = Audit(cast(Any, Others(differs)), state)
    with pytest.raises(
        UsageError, match=r"^register\(position=...\) .* as on rank 1 \(dl\.0\.main\.seed\), so"
    ):
        audit.compare()


def test_replicas_whose_parameters_differ_are_told_what_helps() -> None:
    """Those that no optimizer of the session has updated differ again after any recovery."""
    state, _, _, _ = make()

    def differs(other: torch.Tensor) -> torch.Tensor:
        other[DIGEST_BYTES] += 1  # of the parameters
        return other

    audit = Audit(cast(Any, Others(differs)), state)
    with pytest.raises(UsageError, match=r"pass the optimizer that steps to session\.optimizer"):
        audit.compare()
    state.updated = True
    with pytest.raises(ReplicaDiffers):
        audit.compare()
    # All have gone back, and computed the same steps again: that is no damage.
    with pytest.raises(UsageError, match=r"differ from those of rank 1, a replica, again: .* set replicas=1"):
        audit.compare()
    state.version += 1  # it comes further, and is damaged there
    with pytest.raises(ReplicaDiffers):
        audit.compare()
