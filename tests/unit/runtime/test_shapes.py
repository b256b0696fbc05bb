"""Which shapes hold in a call of a schedule, for processes that infer them there and for one that comes later."""

from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from swift_ft.train import boundary_log
from swift_ft.train.boundary_log import POINTS_MAX, Shapes
from swift_ft.train.stage import Inference, inferred_whole
from swift_ft.train.training_state import as_registered


class Waits(Exception):
    """Nobody has said it yet."""


def wait() -> None:
    raise Waits


def of(store: HashStore, dp_rank: int = 0) -> Shapes:
    """A process's."""
    return Shapes(lambda: store, dp_rank, wait)


def calls(first: Shapes, second: Shapes, *inferences: tuple[int, int, bool, str]) -> None:
    """Both infer there, and the first one tells the other its shape."""
    for step, call, training, shape in inferences:
        first.infer(step, call, training=training, first=True)
        first.put("F", 0, 1, shape)
        second.infer(step, call, training=training, first=False)
        assert second.get("F", 0, 1) == shape


EVALUATED = (
    (0, 0, True, "16"),
    (3, 0, False, "8"),
    (3, 1, True, "16"),
    (5, 1, False, "4"),
    (6, 0, True, "16"),
)


def test_each_evaluation_has_shapes_of_its_own() -> None:
    store = HashStore()
    calls(of(store), of(store), *EVALUATED)


@pytest.mark.parametrize(
    ("step", "call", "training", "shape"),
    [(2, 0, True, "16"), (3, 0, False, "8"), (3, 1, True, "16"), (5, 0, True, "16"), (5, 1, False, "4")],
)
def test_a_process_that_comes_later_takes_what_holds_there(
    step: int, call: int, training: bool, shape: str
) -> None:
    """Nobody else infers then: it must not wait for that."""
    store = HashStore()
    calls(of(store), of(store), *EVALUATED)
    late = of(store)
    late.infer(step, call, training=training, first=False)
    assert late.get("F", 0, 1) == shape
    again = of(store)  # of the first stage: it says what was said
    again.infer(step, call, training=training, first=True)
    again.put("F", 0, 1, shape)
    assert late.get("F", 0, 1) == shape


def test_a_stage_waits_until_the_first_one_has_turned() -> None:
    store = HashStore()
    first, second = of(store), of(store)
    with pytest.raises(Waits):
        second.infer(0, 0, training=True, first=False)
    calls(first, second, (0, 0, True, "16"))
    with pytest.raises(Waits):  # not the shapes of training
        second.infer(3, 0, training=False, first=False)
    first.infer(3, 0, training=False, first=True)
    second.infer(3, 0, training=False, first=False)
    with pytest.raises(Waits):  # nor what is there from before
        second.get("F", 0, 1)


def test_dp_ranks_and_schedules_are_apart() -> None:
    store = HashStore()
    calls(of(store, 0), of(store, 0), (0, 0, True, "16"))
    with pytest.raises(Waits):
        of(store, 1).infer(0, 0, training=True, first=False)
    other = of(store, 0)
    other.schedule = 1
    with pytest.raises(Waits):
        other.infer(4, 0, training=False, first=False)


def test_while_ranks_are_missing_all_pipelines_infer_together() -> None:
    """The first stage of pipeline 0 and the second one of pipeline 1 are missing, and no shapes are known."""
    store = HashStore()
    first, second = of(store, 1), of(store, 0)
    first.together = second.together = True
    with pytest.raises(Waits):
        second.infer(7, 0, training=True, first=False)
    calls(first, second, (7, 0, True, "16"))
    late = of(store, 0)  # the world is full again
    late.infer(9, 0, training=True, first=False)
    assert late.get("F", 0, 1) == "16"


def test_what_one_pipeline_has_begun_to_infer_does_not_count_then() -> None:
    """Its first stage is gone, and has told nobody of its shapes."""
    store = HashStore()
    of(store, 1).infer(7, 0, training=True, first=True)
    first, second = of(store, 0), of(store, 1)
    first.together = second.together = True
    with pytest.raises(Waits):
        second.infer(7, 0, training=True, first=False)
    calls(first, second, (7, 0, True, "16"))


def test_a_helper_trains_whatever_the_step_began_with() -> None:
    store = HashStore()
    calls(of(store), of(store), *EVALUATED)
    helper = of(store).for_helper()
    helper.infer(3, 0, training=True, first=True)
    assert helper.get("F", 0, 1) == "16"


def test_what_is_told_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_log, "POINTS_MAX", 8)
    store = HashStore()
    first, second = of(store), of(store)
    calls(first, second, *[(step, 0, step % 2 == 0, str(step)) for step in range(50)])
    assert store.num_keys() <= 9 < POINTS_MAX


class Cut:
    """A stage that has begun to learn its shapes, or not."""

    def __init__(self, inferring: bool) -> None:
        self.inferring = inferring
        self.given_up = 0

    def give_up_inference(self) -> bool:
        self.given_up += 1
        return self.inferring


@pytest.mark.parametrize("inferring", [False, True])
@pytest.mark.parametrize("name", ["stage", "stages"])
def test_a_call_that_is_cut_short_while_it_learns_shapes_learns_them_again(
    name: str, inferring: bool
) -> None:
    """torch's schedule says of the last call whose shapes are known whole: it was an evaluation."""
    stages = [Cut(False), Cut(inferring)] if name == "stages" else [Cut(inferring)]
    flags = {f"_{name}_forward_initialized": True, f"_{name}_backward_initialized": False}
    held = {"_stages": stages} if name == "stages" else {"_stage": stages[0]}
    schedule = SimpleNamespace(**flags, **held)
    with inferred_whole(schedule):
        pass
    assert [stage.given_up for stage in stages] == [0] * len(stages)
    with pytest.raises(Waits), inferred_whole(schedule):
        wait()
    assert [stage.given_up for stage in stages] == [1] * len(stages)
    assert [getattr(schedule, flag) for flag in flags] == [not inferring, False]


class Warm(torch.nn.Module):
    """A loss function with a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.log = 0, [0.0]

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.calls += 1
        self.log.append(1.0)
        return (output - target).square().mean() * self.seen


class Scale:
    """Registered, with what it keeps behind slots: only its state tells."""

    __slots__ = ("loads", "value")

    def __init__(self) -> None:
        self.value, self.loads = 1.0, 0

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.value *= 2
        return (output - target).square().mean() * self.value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.loads = state["value"], self.loads + 1


class Data(Scale):
    __slots__ = ()

    def __next__(self) -> None: ...

    def state_dict(self) -> dict[str, float]:
        raise AssertionError("a loader may make an iterator to tell its state")


def test_a_loss_that_is_called_once_more_for_shapes_is_as_before() -> None:
    loss = Warm()
    inference = Inference(torch.nn.Linear(1, 1), [loss])
    loss(torch.ones(1), torch.zeros(1))
    assert loss.seen.item() == 1
    inference.end()
    assert (loss.seen.item(), loss.calls, loss.log) == (0, 0, [0.0])


def test_registered_objects_are_as_before_and_only_what_changed_is_loaded() -> None:
    scale, other, history, noise = Scale(), Scale(), [1.0], torch.Generator().manual_seed(3)
    given = {"scale": scale, "other": other, "history": history, "noise": noise, "loader": Data()}
    state = noise.get_state()
    inference = Inference(
        torch.nn.Linear(1, 1), [scale.loss], {n: as_registered(v) for n, v in given.items()}
    )
    scale.loss(torch.ones(1), torch.zeros(1))
    history.append(2.0)
    torch.rand(1, generator=noise)
    inference.end()
    assert (scale.value, scale.loads, other.loads, history) == (1.0, 1, 0, [1.0])
    assert torch.equal(noise.get_state(), state)
