"""The journal: the same bits as the plain step, and the truth about what is applied."""

from collections import deque
from typing import Any

import pytest
import torch
from torch.optim import optimizer as hooks

from swift_ft.errors import ServiceError, UsageError
from swift_ft.state.journal import Journal, make_buckets
from swift_ft.torch_private import bare_step
from tests.unit.optim import models

SMALL = 64  # bytes: several buckets out of a handful of parameters


def pair(
    name: str, implementation: str, dtype: torch.dtype, *, groups: bool = False
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    parameters = models.parameters(dtype)
    return parameters, models.make(name, implementation, models.grouped(parameters) if groups else parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "implementation"), list(models.cases()))
def test_same_bits_as_the_plain_step(name: str, implementation: str, dtype: torch.dtype) -> None:
    if not models.repeats(name, implementation, dtype):
        pytest.skip("torch's own step is not repeatable here")
    groups = "weight_decay" in models.HYPER[name][1]
    ours, optimizer = pair(name, implementation, dtype, groups=groups)
    theirs, plain = pair(name, implementation, dtype, groups=groups)
    journal = Journal(optimizer, bucket_bytes=SMALL)
    assert len(journal.buckets) >= 3
    for step in range(4):
        models.give_gradients(ours, step)
        models.give_gradients(theirs, step)
        journal.begin(step)
        journal.apply(len(journal.buckets) // 2)
        journal.apply(0)
        journal.apply_rest()
        plain.step()
        assert models.image(optimizer) == models.image(plain)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert held == [id(p) for p in ours]


@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
def test_a_rate_may_be_a_tensor(implementation: str) -> None:
    made = []
    for _ in range(2):
        parameters = models.parameters(torch.float32)
        flags: dict[str, Any] = {"fused": True} if implementation == "fused" else {"foreach": False}
        made.append((parameters, torch.optim.AdamW(parameters, lr=torch.tensor(0.01), **flags)))
    (ours, optimizer), (theirs, plain) = made
    journal = Journal(optimizer, bucket_bytes=SMALL)
    for step in range(3):
        models.give_gradients(theirs, step)
        models.step_on(journal, ours, step)
        plain.step()
    assert models.image(optimizer) == models.image(plain)


def test_what_is_applied() -> None:
    parameters, optimizer = pair("adamw", "default", torch.float32)
    journal = Journal(optimizer, bucket_bytes=SMALL)
    models.give_gradients(parameters, 0)
    journal.begin(7)
    assert (journal.step, journal.applied, journal.partial, journal.complete) == (7, (), False, False)
    journal.apply(2)
    journal.apply(1)
    assert (journal.applied, journal.partial, journal.complete) == ((2, 1), True, False)
    with pytest.raises(AssertionError, match="bucket 2 of step 7"):
        journal.apply(2)
    journal.apply_rest()
    assert (journal.partial, journal.complete) == (False, True)
    with pytest.raises(UsageError, match="twice"):
        journal.apply_rest()
    journal.begin(8)
    assert (journal.applied, journal.complete) == ((), False)


def test_a_bucket_holds_what_is_applied_and_nothing_else() -> None:
    parameters, optimizer = pair("adamw", "default", torch.float32)
    journal = Journal(optimizer, bucket_bytes=SMALL)
    models.give_gradients(parameters, 0)
    before = [models.bits(p) for p in parameters]
    journal.begin(0)
    journal.apply(1)
    changed = {i for i, p in enumerate(parameters) if models.bits(p) != before[i]}
    expected = {i for i, p in enumerate(parameters) if any(p is q for q in journal.buckets[1]) and p.numel()}
    assert changed == expected != set()


def test_between_is_called_between_and_may_leave() -> None:
    class Abort(Exception):
        pass

    parameters, optimizer = pair("adamw", "foreach", torch.float32)
    theirs, plain = pair("adamw", "foreach", torch.float32)
    journal = Journal(optimizer, bucket_bytes=SMALL)
    models.give_gradients(parameters, 0)
    models.give_gradients(theirs, 0)
    seen: list[int] = []

    def between(applied: int) -> None:
        seen.append(applied)
        if applied == 2:
            raise Abort

    journal.begin(0)
    with pytest.raises(Abort):
        journal.apply_rest(between)
    assert journal.partial
    assert [len(g["params"]) for g in optimizer.param_groups] == [len(parameters)]
    journal.apply_rest(seen.append)
    assert seen == [1, 2, *range(3, len(journal.buckets))]
    plain.step()
    assert models.image(optimizer) == models.image(plain)


def test_hooks_are_called_once_around_the_step() -> None:
    parameters, optimizer = pair("sgd", "default", torch.float32)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("pre"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append("post"))
    first = hooks.register_optimizer_step_pre_hook(lambda o, a, k: seen.append("all pre"))
    last = hooks.register_optimizer_step_post_hook(lambda o, a, k: seen.append("all post"))
    try:
        models.give_gradients(parameters, 0)
        optimizer.step()
        plain, seen[:] = list(seen), []
        journal = Journal(optimizer, bucket_bytes=SMALL)
        journal.begin(0)
        journal.apply_rest(lambda n: seen.append("bucket") if n == 1 else None)
    finally:
        first.remove()
        last.remove()
    assert plain == ["all pre", "pre", "post", "all post"]
    assert seen == ["all pre", "pre", "bucket", "post", "all post"]


def test_a_step_pre_hook_forbids_early_buckets() -> None:
    parameters, optimizer = pair("sgd", "default", torch.float32)
    journal = Journal(optimizer, bucket_bytes=SMALL)
    models.give_gradients(parameters, 0)
    assert journal.early
    optimizer.register_step_pre_hook(lambda o, args, kwargs: None)
    assert not journal.early
    journal.begin(0)
    with pytest.raises(UsageError, match="pre-hook"):
        journal.apply(0)
    assert journal.applied == ()


def test_a_post_hook_sees_early_buckets_too() -> None:
    parameters, optimizer = pair("sgd", "default", torch.float32)
    seen: list[bool] = []
    journal = Journal(optimizer, bucket_bytes=SMALL)
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(journal.complete))
    models.give_gradients(parameters, 0)
    journal.begin(0)
    for bucket in range(len(journal.buckets)):
        journal.apply(bucket)
    assert seen == []
    journal.apply_rest()
    assert seen == [True]


def test_a_scheduler_that_patches_step_is_content() -> None:
    parameters, optimizer = pair("sgd", "default", torch.float32)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    journal = Journal(optimizer, bucket_bytes=SMALL)
    for step in range(3):
        models.give_gradients(parameters, step)
        journal.begin(step)
        before = parameters[0].detach().clone()
        journal.apply_rest()
        assert parameters[0].grad is not None
        assert torch.equal(parameters[0], before.add(parameters[0].grad, alpha=-0.1 * 0.5**step))
        optimizer._opt_called = True  # type: ignore[attr-defined]
        scheduler.step()


def test_found_inf_of_a_scaler_reaches_a_fused_step() -> None:
    made = [pair("adamw", "fused", torch.float32) for _ in range(2)]
    for infinite in (0.0, 1.0):
        for parameters, optimizer in made:
            models.give_gradients(parameters, 0, scale=64.0)
            optimizer.grad_scale = torch.tensor(64.0)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(infinite)  # type: ignore[attr-defined]
        journal = Journal(made[0][1], bucket_bytes=SMALL)
        journal.begin(0)
        journal.apply_rest()
        made[1][1].step()
        assert models.image(made[0][1]) == models.image(made[1][1])
    assert all(s["step"] == 1 for s in made[0][1].state.values())


def test_groups_that_are_added_later_are_buckets_of_the_next_step() -> None:
    parameters, optimizer = pair("adamw", "default", torch.float32)
    journal = Journal(optimizer, bucket_bytes=SMALL)
    more = torch.nn.Parameter(torch.ones(9))
    optimizer.add_param_group({"params": [more]})
    more.grad = torch.ones(9)
    models.give_gradients(parameters, 0)
    journal.begin(1)
    journal.apply_rest()
    assert more in optimizer.state


def test_an_optimizer_that_fails_half_way_is_not_called_applied() -> None:
    parameters, optimizer = pair("adamw", "for-loop", torch.float32)
    journal = Journal(optimizer, undo="preimage", bucket_bytes=SMALL)
    models.give_gradients(parameters, 0)
    journal.begin(0)
    journal.apply(0)
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        journal.apply(1)
    assert journal.applied == (0,)
    assert journal.partial
    with pytest.raises(AssertionError, match="half-way"):
        journal.apply(2)


# --- buckets ---


def test_buckets_are_cut_in_reverse_order_by_bytes() -> None:
    sizes = [10, 20, 30, 40, 5]
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
    found = make_buckets([{"params": parameters}], 200)
    assert [[p.numel() for p in bucket] for _, bucket in found] == [[5, 40, 30], [20, 10]]


def test_a_bucket_has_one_group_and_one_dtype() -> None:
    single = [torch.nn.Parameter(torch.zeros(4)) for _ in range(4)]
    half = [torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)) for _ in range(4)]
    groups = [{"params": [single[0], half[0], single[1], half[1]]}, {"params": [*single[2:], *half[2:]]}]
    found = make_buckets(groups, 1 << 20)
    assert [(g, {p.dtype for p in bucket}) for g, bucket in found] == [
        (1, {torch.bfloat16}),
        (1, {torch.float32}),
        (0, {torch.bfloat16}),
        (0, {torch.float32}),
    ]
    together = [id(p) for _, bucket in found for p in bucket]
    assert sorted(together) == sorted(map(id, single + half))


# --- optimizers that nobody knows ---


class Counting(torch.optim.Optimizer):
    """Has a counter in its group and one outside: a step bucket by bucket would count too often."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1, "k": 0})
        self.calls = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        self.calls[0] += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["seen"] = self.state[p].get("seen", torch.zeros(())) + 1
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])
        return loss


class Tuned(torch.optim.AdamW):
    """A class of one's own with the stock step."""


def test_an_unknown_class_is_one_bucket_called_as_it_is() -> None:
    parameters = models.parameters(torch.float32)
    optimizer = Counting([{"params": parameters[:3]}, {"params": parameters[3:]}])
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("pre"))
    journal = Journal(optimizer, bucket_bytes=SMALL)
    assert journal.whole
    assert len(journal.buckets) == 1
    models.give_gradients(parameters, 0)
    journal.begin(0)
    assert journal.apply_whole(lambda: 5) == 5
    assert optimizer.calls == [1]
    assert seen == ["pre"]
    assert journal.complete
    journal.begin(1)
    journal.apply_rest()
    assert [g["k"] for g in optimizer.param_groups] == [2, 2]


def test_an_unknown_class_is_taken_back_whole() -> None:
    parameters = models.parameters(torch.float32)
    optimizer = Counting(parameters)
    journal = Journal(optimizer, undo="exact", bucket_bytes=SMALL)
    assert journal.mode == "preimage"
    assert "Counting" in journal.why
    for step in range(2):
        before = (models.image(optimizer), optimizer.param_groups[0]["k"], list(optimizer.calls))
        models.give_gradients(parameters, step)
        journal.begin(step)
        journal.apply(0)
        result = journal.undo()
        assert (result.mode, result.exact, result.buckets) == ("preimage", True, 1)
        assert (models.image(optimizer), optimizer.param_groups[0]["k"], optimizer.calls) == before
        models.give_gradients(parameters, step)
        journal.apply_rest()


class Lazy(torch.optim.Optimizer):
    """Makes what it needs in its first step, wherever it likes, and decays parameters that have no gradient."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})
        self.norms: deque[float] = deque([0.0], maxlen=2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        everything = self.state["everything"]
        everything["scale"] = everything.get("scale", torch.ones(())) * 0.5
        self.norms.append(float(everything["scale"]))
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1  # as apex has it
            for p in group["params"]:
                p.mul_(0.9).add_(torch.zeros_like(p) if p.grad is None else p.grad, alpha=-group["lr"])


def test_what_an_unknown_class_makes_in_its_step_goes_with_it() -> None:
    parameters = models.parameters(torch.float32)
    optimizer = Lazy(parameters)
    journal = Journal(optimizer, undo="exact", bucket_bytes=SMALL)

    def all_of_it() -> Any:
        own = {
            name: list(v) if name == "norms" else v for name, v in vars(optimizer).items() if name != "state"
        }
        state = models.bits(optimizer.state_dict())
        return (
            models.image(optimizer),
            list(state["state"].items()),
            state["param_groups"],
            list(own),
            own["norms"],
        )

    for step in range(3):
        before = all_of_it()
        models.give_gradients(parameters, step)
        journal.begin(step)
        journal.apply(0)
        assert all_of_it() != before
        journal.undo()
        assert all_of_it() == before
        journal.apply_rest()
    assert optimizer.calls == 3


def test_a_subclass_with_the_stock_step_is_known() -> None:
    assert not Journal(Tuned(models.parameters(torch.float32))).whole


def test_a_subclass_that_was_made_before_its_base_is_known_too() -> None:
    """torch puts its wrapper around the step of whichever class it meets first."""

    class First(torch.optim.AdamW):
        step = torch.optim.Optimizer.profile_hook_step(bare_step(torch.optim.AdamW))

    assert not Journal(First(models.parameters(torch.float32))).whole


def test_lbfgs_works_as_it_is_and_cannot_be_taken_back() -> None:
    parameter = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = torch.optim.LBFGS([parameter])
    for undo in ("exact", "arithmetic", "preimage"):
        with pytest.raises(UsageError, match="LBFGS calls a closure"):
            Journal(optimizer, undo=undo)
    journal = Journal(optimizer)
    journal.begin(0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert journal.apply_whole(closure).item() == 9.0
    assert abs(parameter.item()) < 1.0


def test_an_unknown_mode() -> None:
    with pytest.raises(UsageError, match="there are: none, exact"):
        Journal(torch.optim.SGD(models.parameters(torch.float32), lr=0.1), undo="magic")


def test_nothing_is_taken_back_without_undo() -> None:
    parameters, optimizer = pair("sgd", "default", torch.float32)
    journal = Journal(optimizer, bucket_bytes=SMALL)
    journal.begin(0)
    assert journal.undo().buckets == 0
    models.give_gradients(parameters, 0)
    journal.apply(0)
    with pytest.raises(ServiceError, match="undo='none'"):
        journal.undo()
