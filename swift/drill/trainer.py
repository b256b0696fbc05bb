"""The trainer of a drill: pipeline stages of a transformer under any schedule of torch.

Run by the launcher: ``python -m swift.launch … -m swift.drill.trainer --stages 4 --schedule 1f1b …``
"""

import argparse
import os
import sys
from typing import Any

import torch
from torch.distributed.pipelining import schedules
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import swift
from swift import events
from swift.drill.model import MODELS, ByteLoader, loss_fn, make_stage, standard_library

# How each schedule places its stages: on rank r of P, and how many stages there are.
SINGLE = {"1f1b": schedules.Schedule1F1B, "gpipe": schedules.ScheduleGPipe}
LOOPED = {
    "interleaved1f1b": schedules.ScheduleInterleaved1F1B,
    "interleavedzerobubble": schedules.ScheduleInterleavedZeroBubble,
}
V_SHAPED = {"zbv": schedules.ScheduleZBVZeroBubble, "dualpipev": schedules.ScheduleDualPipeV}


def stages_of(schedule: str, rank: int, ranks: int) -> tuple[list[int], int]:
    """(stage indices of `rank`, number of stages): one stage a rank, or two in a loop or a V."""
    if schedule in SINGLE:
        return [rank], ranks
    if schedule in LOOPED:
        return [rank, rank + ranks], 2 * ranks
    return [rank, 2 * ranks - 1 - rank], 2 * ranks


def make_schedule(name: str, stages: list[Any], microbatches: int) -> Any:
    if name in SINGLE:
        return SINGLE[name](stages[0], microbatches, loss_fn=loss_fn)
    return (LOOPED | V_SHAPED)[name](stages, microbatches, loss_fn=loss_fn)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the drill's transformer; started by swift-ft drill.")
    parser.add_argument("--stages", type=int, default=4, help="pipeline ranks")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--schedule", default="1f1b", choices=[*SINGLE, *LOOPED, *V_SHAPED])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="default", choices=list(MODELS))
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--codec", default="none", choices=["none", "lz4"])
    parser.add_argument("--strategy", default="auto")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    config = MODELS[args.model]
    with swift.Session.from_env(
        seed=args.seed,
        checkpoint_every=args.checkpoint_every,
        codec=args.codec,
        strategy=args.strategy,
    ) as session:
        indices, num_stages = stages_of(args.schedule, session.rank, args.stages)
        modules = [make_stage(config, index, num_stages, args.seed) for index in indices]
        stages = [
            session.pipeline_stage(module, index, num_stages)
            for module, index in zip(modules, indices, strict=True)
        ]
        schedule = make_schedule(args.schedule, stages, args.microbatches)
        parameters = [p for module in modules for p in module.parameters()]
        optimizer = session.optimizer(torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1))
        warm_up = max(1, args.steps // 10)
        scheduler = SequentialLR(
            optimizer,
            [
                LinearLR(optimizer, 0.1, 1.0, warm_up),
                CosineAnnealingLR(optimizer, max(1, args.steps - warm_up)),
            ],
            [warm_up],
        )
        batch = args.microbatches * config.microbatch
        loader = ByteLoader(standard_library(), batch, config.sequence, args.seed)
        session.register(schedule=schedule, scheduler=scheduler, loader=loader)
        first, last = 0 in indices, num_stages - 1 in indices

        def train_step(step: int) -> None:
            inputs, targets = next(loader)
            losses: list[torch.Tensor] = []
            optimizer.zero_grad()
            schedule.step(
                *([inputs] if first else []),
                **({"target": targets, "losses": losses} if last else {}),
                return_outputs=False,
            )
            session.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            scheduler.step()
            if last and not session.replaying:
                events.emit("loss", step=step, loss=float(torch.stack(losses).detach().mean()))

        session.run(train_step, num_steps=args.steps)


if __name__ == "__main__":
    main()
    # Taking an interpreter with torch apart takes a second, on a machine where all ranks do it at once.
    sys.stdout.flush()
    os._exit(0)
