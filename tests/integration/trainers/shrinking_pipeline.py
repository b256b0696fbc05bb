"""Replicas of a pipeline, of which some ranks are lost: `shrinking_pipeline.py session STEPS STAGES REPLICAS [HABIT]`
in a job, and beside it `shrinking_pipeline.py reference STEPS STAGES REPLICAS OUT [HABIT]`, plain torch in one process:
the mean over all origins in every step. HABIT: "sums" the loss over its pipeline before it updates, "evaluates" behind
its update, which nobody can do for a lost rank; "adds" has stages whose backward torch 2.13 cannot split; "counts" its
own forwards in a buffer and an attribute, and fails if there are others; "twice" calls the schedule so often in each
step; "scales" gradients before they are reduced; "counts first" sums over its pipeline before it calls the schedule;
"weighs" its loss by a number of its batch (loss_kwargs); "hides" that number in an object that its loss knows;
"remembers" its last forward, and adds a little of it; "ties" a weight of its first stage to one of its last;
"alternates" between two schedules, of which one has twice the microbatches, "ramps" to the larger one in step RAMP,
which is its first call; "applies" is "alternates" with wait-free updates, which allow no clipping; "clamps" gradients
by a hook as they are added up; "calm" does not clip, as its norms are small, and saves no checkpoint;
"calm:STAGE:STEP:FACTOR" multiplies the gradients of that stage and those before it in that step. Calm as well are
"reads", which looks at each norm, "logs", which writes it and its loss down, "saves" a checkpoint every four steps,
"stops" four steps early, and "checks" that its optimizer has never seen large gradients; "scaled" has a gradient
scaler, does not ask for norms, and skips a step in which a stage finds inf; so does "freezes", which freezes stage 1
and writes scales down, "unregistered", and "apart", whose scaler is enabled at the last stage only. Rank 0 of one that
"waits" waits in step LATE until a lost rank has come back; "returns" does so in step RETURNED, and is calm. "shuffles"
has torch's DataLoader by `session.loader`, in an order of each pipeline's own, which plain torch does not know.
"tallies" has a loss function that counts in a registered object. "asks" does none of it.

Both write a digest of each stage's weights and optimizer state for every step: `{step: digest}`.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from shrinking import Position, await_notices, bits
from torch import Tensor, nn

WIDTH, BATCH, MICROBATCHES, MAX_NORM = 16, 8, 4, 0.5
LATE, RETURNED, RAMP = 8, 18, 7
SCALED = ("scaled", "freezes", "unregistered", "apart")
CALM = ("calm", "reads", "logs", "saves", "stops", "checks", "returns", *SCALED)
SCALE, GROWS_AFTER = 256.0, 5
Made = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


class Adds(nn.Module):
    """Its weights are a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + self.b)


class Counts(nn.Sequential):
    """Its forwards."""

    seen: Tensor

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        out: Tensor = super().forward(x)
        return out


class Remembers(nn.Sequential):
    """What its last forward has given, on average."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.last = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        before, self.last = self.last, float(out.detach().mean())
        return out * (1 + before)


class Gains(nn.Sequential):
    """Its gradients are larger or smaller, and what it gives is the same."""

    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + (out - out.detach()) * (self.gain - 1)


def gain_of(habit: str, stage: int, step: int) -> float:
    _, *told = habit.split(":")
    return float(told[2]) if told and (int(told[0]), int(told[1])) == (stage, step) else 1.0


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e3, 1e3)


def max_norm_of(habit: str) -> float:
    return 1e3 if habit.split(":")[0] in (*CALM, "applies") else MAX_NORM


def tied(module: nn.Module, stage: int) -> nn.Parameter:
    """The weight that the first and the last stage share."""
    assert isinstance(module, nn.Sequential)
    weight = module[0 if stage == 0 else 2].weight
    assert isinstance(weight, nn.Parameter)
    return weight


def made(stage: int, stages: int, habit: str) -> Made:
    torch.manual_seed(5 + stage)
    if habit == "adds":
        module: nn.Module = Adds()
    else:
        kinds: dict[str, type[nn.Sequential]] = {
            "counts": Counts,
            "remembers": Remembers,
            **dict.fromkeys(CALM, Gains),
        }
        whole = kinds.get(habit.split(":")[0], nn.Sequential)
        module = whole(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    return module, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def is_larger(habit: str, step: int) -> bool:
    """Than usual are the batches of this step: they have twice the microbatches."""
    return (habit in ("alternates", "applies") and step % 2 == 1) or (habit == "ramps" and step >= RAMP)


def batch_of(step: int, origin: int, habit: str) -> Tensor:
    size = BATCH * (1 + is_larger(habit, step))
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step * 1000 + origin))


def loss_of(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return (output - target).square().mean() * weight


def weight_of(batch: Tensor) -> float:
    return float(batch.abs().max())


def in_a_job(steps: int, stages: int, replicas: int, habit: str) -> None:
    from shuffled import Shuffled
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    import swift_ft

    with swift_ft.Session.from_env(
        seed=1,
        checkpoint_every=4 if habit == "saves" or max_norm_of(habit) == MAX_NORM else 1000,
        replicas=replicas,
        bucket_bytes=1024,
        reduction="ordered",
        updates="wait_free" if habit == "applies" else "after_backward",
    ) as session:
        number = session.pipeline_rank
        module, plain, scheduler = made(number, stages, habit)
        if habit == "ties" and number in (0, stages - 1):
            session.tie(tied(module, number), (0, stages - 1))
        stage = session.pipeline_stage(module, number, stages, torch.device("cpu"))
        hidden, seen = {"weight": 1.0}, Position()
        scaled = habit.split(":")[0] in SCALED
        enabled = habit != "apart" or number == stages - 1
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWS_AFTER, enabled=enabled)
        if habit == "freezes" and number == 1:
            module.requires_grad_(False)

        def loss_fn(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
            seen.step += habit == "tallies"
            loss = loss_of(output, target, weight) * hidden["weight"]
            return scaler.scale(loss) if scaled else loss

        schedules: list[Any] = [Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_fn)]
        if habit in ("alternates", "applies", "ramps"):
            schedules.append(ScheduleGPipe(stage, n_microbatches=2 * MICROBATCHES, loss_fn=loss_fn))
        if habit == "clamps":
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(clamp)  # type: ignore[no-untyped-call]
        optimizer = session.optimizer(plain)
        position = Position()
        for each in schedules:
            session.register(schedule=each)
        files: Any = None
        if habit == "shuffles":
            files = session.loader(lambda dp_rank: Shuffled(WIDTH))
        else:
            session.register(loader=position)
        session.register(scheduler=scheduler)
        if habit == "tallies":
            session.register(seen=seen)
        if scaled and habit != "unregistered":
            session.register(scaler=scaler)
        found: dict[int, str] = {}
        told: list[float] = []

        def train_step(step: int) -> None:
            optimizer.zero_grad()
            if habit.startswith("checks"):
                assert all(float(state["exp_avg_sq"].max()) < 1e12 for state in optimizer.state.values())
            batch = next(files) if files is not None else batch_of(position.step, session.dp_rank, habit)
            schedule = schedules[is_larger(habit, position.step)]
            position.step += files is None
            if isinstance(module, Gains):
                module.gain = gain_of(habit, number, step)
            losses: list[Tensor] = []
            inputs = (batch,) if number == 0 else ()
            last: dict[str, Any] = {}
            if number == stages - 1:
                last = {"target": batch.roll(1, 0), "losses": losses}
                if habit == "weighs":
                    last["loss_kwargs"] = {"weight": weight_of(batch)}
            if habit == "hides":
                hidden["weight"] = weight_of(batch)
            if habit == "counts first":
                told.append(float(session.all_reduce(torch.ones(()), "number")))
            if session.rank == 0 and (habit, step) in (("waits", LATE), ("returns", RETURNED)):
                await_notices(2)
            for _ in range(2 if habit == "twice" else 1):
                schedule.step(*inputs, **last)
            if habit == "scales":
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(0.5)
            if habit == "sums":
                loss = torch.stack(losses).mean() if losses else torch.zeros(())
                told.append(float(session.all_reduce(loss, "loss")))
            if scaled:
                session.unscale_(scaler, optimizer)
            elif habit != "applies":
                norm = session.clip_grad_norm_(module.parameters(), max_norm_of(habit))
            if habit == "reads":
                told.append(float(norm))
                assert torch.isfinite(norm)
                assert 0 < norm.item() < 1e3
            if habit == "logs":
                session.log(norm=norm, loss=float(torch.stack(losses).mean()) if losses else 0.0)
            if habit == "stops" and step == steps - 5:
                session.stop("enough")
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            scheduler.step()
            if habit == "evaluates" and step == 2:
                schedule.eval(*inputs, **last)
            found[step] = bits(module, optimizer)
            if habit == "freezes":
                found[step] = f"{scaler.get_scale():g}"
            if isinstance(module, Counts):
                assert int(module.seen) == module.calls == (step + 1) * MICROBATCHES, (
                    "forwards of others count"
                )

        session.run(train_step, num_steps=steps)
        Path(os.environ["SWIFT_DIGESTS"], f"bits-{session.rank}.json").write_text(json.dumps(found))


def gradients(modules: list[nn.Module], batch: Tensor, weight: float) -> list[list[Tensor]]:
    """Of each stage: what a pipeline has accumulated when all microbatches are through it."""
    for module in modules:
        module.zero_grad()
    count = len(batch) * MICROBATCHES // BATCH
    for part, target in zip(batch.chunk(count), batch.roll(1, 0).chunk(count), strict=True):
        passed: list[tuple[Tensor, Tensor]] = []
        entered = part
        for module in modules:
            output = module(entered)
            passed.append((entered, output))
            entered = output.detach().requires_grad_()
        loss_of(passed[-1][1], target, weight).backward()
        for (_, output), (later, _) in reversed(list(itertools.pairwise(passed))):
            output.backward(later.grad)
    return [[p.grad / count for p in module.parameters()] for module in modules]  # type: ignore[operator]


def reference(steps: int, stages: int, replicas: int, habit: str) -> dict[str, dict[int, str]]:
    """Stage -> step -> digest."""
    torch.set_num_threads(1)
    parts = [made(stage, stages, habit) for stage in range(stages)]
    modules = [module for module, _, _ in parts]
    shared = [tied(modules[stage], stage) for stage in (0, stages - 1)] if habit == "ties" else []
    if shared:
        shared[1].data.copy_(shared[0].data)
    found: dict[str, dict[int, str]] = {str(stage): {} for stage in range(stages)}
    scaled, scale, calm = habit.split(":")[0] == "scaled", SCALE, 0
    for step in range(steps):
        for number, module in enumerate(modules):
            if isinstance(module, Gains):
                module.gain = gain_of(habit, number, step)
        sums: Any = None
        for origin in range(replicas):
            batch = batch_of(step, origin, habit)
            weight = scale if scaled else weight_of(batch) if habit == "weighs" else 1.0
            each = [torch.cat([g.reshape(-1) for g in of]) for of in gradients(modules, batch, weight)]
            sums = each if sums is None else [total + mine for total, mine in zip(sums, each, strict=True)]
        for module, total in zip(modules, sums, strict=True):
            sizes = [p.numel() for p in module.parameters()]
            for parameter, mean in zip(module.parameters(), (total / replicas).split(sizes), strict=True):
                parameter.grad = mean.view_as(parameter).clone()
        if shared:
            first, last = (parameter.grad for parameter in shared)
            assert first is not None
            assert last is not None
            first.add_(last)
            last.copy_(first)
        counted = [
            [p for p in m.parameters() if not any(p is other for other in shared[1:])] for m in modules
        ]
        squares = [
            torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in mine])) ** 2
            for mine in counted
        ]
        whole = squares[0].clone()
        for square in squares[1:]:
            whole += square
        finite = True
        if scaled:
            grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
            finite = all(bool(grad.isfinite().all()) for grad in grads)
            for grad in grads:
                grad.mul_(1 / scale)
            calm = calm + 1 if finite else 0
            grows = calm == GROWS_AFTER
            scale, calm = scale * (2.0 if grows else 1.0 if finite else 0.5), 0 if grows else calm
        for number, (module, optimizer, scheduler) in enumerate(parts):
            if not scaled:
                torch.nn.utils.clip_grads_with_norm_(
                    list(module.parameters()), max_norm_of(habit), whole ** (1.0 / 2.0)
                )
            if finite:
                optimizer.step()
            scheduler.step()
            found[str(number)][step] = bits(module, optimizer)
    return found


if __name__ == "__main__":
    steps, stages, replicas = map(int, sys.argv[2:5])
    if sys.argv[1] == "session":
        in_a_job(steps, stages, replicas, (sys.argv[5:] or ["asks"])[0])
    else:
        Path(sys.argv[5]).write_text(
            json.dumps(reference(steps, stages, replicas, (sys.argv[6:] or ["asks"])[0]))
        )
