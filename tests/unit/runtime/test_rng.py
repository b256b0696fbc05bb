import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from swift_ft.state import rng
from swift_ft.state.carried_gradients import WholeModule
from swift_ft.state.rng import Randomness, digest_of_states, kept, seed_for

GOLDEN = (1195769770526638388, 6442797892194084694)

coordinate = st.tuples(
    st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 2**20), st.integers(0, 2**20)
)


@given(coordinate, coordinate)
def test_every_coordinate_has_its_own_seed(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    assert (seed_for(*a) == seed_for(*b)) == (a == b)


@given(coordinate)
def test_seeds_fit_a_generator(a: tuple[int, ...]) -> None:
    assert 0 <= seed_for(*a) < 2**63


def test_seeds_never_change_between_versions() -> None:
    # A replay after an upgrade draws the same bits only if these stay.
    assert seed_for(0, 0, 0, 0) == GOLDEN[0]
    assert seed_for(7, 17, 2, 3) == GOLDEN[1]


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_every_default_generator_follows_from_the_counter() -> None:
    mine, again = Randomness(7, 1), Randomness(7, 1)
    settings = {
        "step": lambda r: r.begin_step(4),
        "next step": lambda r: r.begin_step(5),
        "outside": lambda r: r.outside(),
        "forward": lambda r: r.forward(0, 3),
        "backward": lambda r: r.backward(0, 3),
        "weights": lambda r: r.weights(0, 3),
        "whole": lambda r: r.whole(0, 3),
        "other stage": lambda r: r.forward(1, 3),
        "other microbatch": lambda r: r.forward(0, 4),
    }
    found = {}
    with kept():
        for name, setting in settings.items():
            setting(mine)
            found[name] = drawn()
            drawn()
            setting(again)
            assert drawn() == found[name]
        Randomness(7, 0).begin_step(4)
        found["other dp_rank"] = drawn()
        Randomness(8, 1).begin_step(4)
        found["other seed"] = drawn()
    for values in zip(*found.values(), strict=True):
        assert len(set(values)) == len(found)


def test_what_is_kept_comes_back() -> None:
    before = digest_of_states()
    with kept():
        drawn()
        assert digest_of_states() != before
    assert digest_of_states() == before


@pytest.mark.parametrize("broken", ["torch", "random", "numpy"])
def test_the_digest_sees_each_generator(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the seeding of one of them broken it depends on what was drawn before: it can fail."""
    randomness = Randomness(7, 0)
    before = randomness.digest(3)
    drawn()
    assert randomness.digest(3) == before != randomness.digest(4)
    owner, name = {
        "torch": (rng, "seed_generators"),
        "random": (random, "seed"),
        "numpy": (np.random, "seed"),
    }[broken]
    monkeypatch.setattr(owner, name, lambda *_: None)
    one = randomness.digest(3)
    drawn()
    assert randomness.digest(3) != one


def test_a_whole_module_draws_the_same_whatever_was_drawn_before() -> None:
    module = torch.nn.Dropout(0.5)
    whole, x = WholeModule(module), torch.ones(64)
    randomness = Randomness(7, 0)
    whole.seeded_by(randomness, 1)

    def masks(before: int) -> list[torch.Tensor]:
        randomness.begin_step(2)
        whole.begin_step()
        torch.rand(before)
        return [module(x) for _ in range(3)]

    with kept():
        one, other = masks(0), masks(5)
        twin = copy.deepcopy(module)
        randomness.begin_step(2)
        whole.begin_step()
        twin(x)
        assert torch.equal(module(x), one[0])  # a copy's forward (an average of weights, say) is not counted
    assert all(map(torch.equal, one, other))
    assert not torch.equal(one[0], one[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_module_that_is_computed_again_in_backward_draws_what_it_drew(reentrant: bool) -> None:
    """`torch.utils.checkpoint` of the module that the session was given: dropout's mask is the same one again."""

    def gradients(again: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 8))
        whole, randomness = WholeModule(module), Randomness(7, 0)
        whole.seeded_by(randomness, 0)
        found = []
        for step in range(2):
            randomness.begin_step(step)
            whole.begin_step()
            module.zero_grad()
            x = torch.ones(4, 8, requires_grad=True)
            for _ in range(2):
                x = checkpoint(module, x, use_reentrant=reentrant) if again else module(x)
            (x * torch.rand(4, 8)).sum().backward()  # type: ignore[no-untyped-call]
            found += [torch.rand(2), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        return found

    assert all(map(torch.equal, gradients(True), gradients(False)))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(torch.ones(64)),
    "vmap": lambda model: torch.vmap(model, randomness="same")(torch.ones(2, 64))[0],
    "jvp": lambda model: torch.func.jvp(model, (torch.ones(64),), (torch.ones(64),))[1],
    "make_fx": lambda model: make_fx(model)(torch.ones(64))(torch.ones(64)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_whole_module_under_a_transform_draws_the_same_whatever_was_drawn_before(transform: str) -> None:
    """The generator's state is a tensor as well, that torch.func and tracers would put a placeholder around."""
    module = torch.nn.Dropout(0.5)
    whole, randomness = WholeModule(module), Randomness(7, 0)
    whole.seeded_by(randomness, 1)

    def drawn(before: int) -> torch.Tensor:
        randomness.begin_step(2)
        whole.begin_step()
        torch.rand(before)
        return TRANSFORMS[transform](module)

    with kept():
        assert torch.equal(drawn(0), drawn(5))


def test_a_whole_module_takes_a_forward_without_numbers() -> None:
    """As in a count of what a forward would need, before it is run."""
    module = torch.nn.Dropout(0.5)
    WholeModule(module).seeded_by(Randomness(7, 0), 1)
    with kept(), FakeTensorMode():
        assert module(torch.ones(64)).shape == (64,)
