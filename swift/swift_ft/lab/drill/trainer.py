"""The trainer of a drill: pipeline stages of a transformer under any schedule of torch.

Run by the launcher: ``python -m swift_ft.launch … -m swift_ft.lab.drill.trainer --stages 4 --replicas 2 …``
"""

import argparse
import os
import sys
import time
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import swift_ft
from swift_ft import events
from swift_ft.lab.drill import options, shrinking
from swift_ft.lab.drill.config import OPTIONS
from swift_ft.lab.drill.model import ByteLoader, loss_fn, make_optimizer, make_stage, standard_library
from swift_ft.lab.drill.options import Reach
from swift_ft.lab.drill.topology import MODELS, Topology
from swift_ft.log.codec import NAMES as CODECS


def make_schedule(name: str, stages: list[Any], microbatches: int) -> Any:
    kind = schedules.get_schedule_class("ZBVZeroBubble" if name == "zbv" else name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, microbatches, loss_fn=loss_fn)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains the drill's transformer; started by swift-ft drill.")
    for option in OPTIONS:
        if option.reach in (Reach.RUN, Reach.BOTH):
            option.add_to(parser)
    parser.add_argument("--codec", default="none", choices=CODECS)
    parser.add_argument("--rest-s", type=float, default=0.0, help="before the last step")
    return parser


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> SequentialLR:
    """Returns a linear warm-up over a tenth of the steps, followed by a cosine."""
    warm_up = max(1, steps // 10)
    parts = [LinearLR(optimizer, 0.1, 1.0, warm_up), CosineAnnealingLR(optimizer, max(1, steps - warm_up))]
    return SequentialLR(optimizer, parts, [warm_up])


def divide(module: Any, session: swift_ft.Session) -> None:
    """Splits the MLPs of a stage over the tensor-parallel ranks, and shards its blocks and the rest."""
    if session.tp_size > 1:
        for block in module.blocks:
            parallelize_module(
                block, session.mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
    if session.dp_size > session.replicas:
        names = ("replicate", "shard") if session.replicas > 1 else ("shard",)
        for part in (*module.blocks, module):
            fully_shard(part, mesh=session.mesh[names])


LOG_QUEUE_BYTES = 32 << 20
"""Capacity of the log queue: many times the bytes that a step of these models logs. The default is for larger models,
and every rank's queue takes memory."""


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    config = MODELS[args.model]
    topology = Topology(**options.values_of(args, Topology))
    if args.grow:
        shrinking.await_growth()
    if args.device != "cpu":  # a rank has one, and several may share it
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    torch.use_deterministic_algorithms(torch.device(args.device).type == "cuda")
    with swift_ft.Session.from_env(
        seed=args.seed,
        checkpoint_every=args.checkpoint_every,
        codec=args.codec,
        checkpoint_mode=args.checkpoint_mode,
        strategy=args.strategy,
        lost_shard=args.lost_shard,
        exact_gradients=args.exact_gradients == "on",
        split_backward=args.split_backward == "on",
        adaptive_memory=args.adaptive_memory,
        staggered=args.staggered == "on",
        allow_inexact=args.allow_inexact,
        snapshot_every=args.snapshot_every,
        groups=str(args.groups),
        replicas=args.replicas,
        shards=args.shards,
        tensor_parallel=args.tensor_parallel,
        updates=args.updates,
        undo=args.undo,
        reduction=args.reduction,
        bucket_bytes=config.bucket_bytes,
        log_queue_bytes=LOG_QUEUE_BYTES,
        helpers=args.helpers,
        last_checkpoint=False,  # no later run resumes from it
    ) as session:
        indices, num_stages = topology.stages_of(session.rank), topology.stages
        modules: list[torch.nn.Module] = [
            make_stage(config, i, num_stages, args.seed).to(args.device) for i in indices
        ]
        for module in modules:
            divide(module, session)
        parameters = [p for module in modules for p in module.parameters()]
        if args.data_parallel == "ddp":
            modules = [session.ddp(module) for module in modules]
        stages = [
            session.pipeline_stage(module, index, num_stages, args.device)
            for module, index in zip(modules, indices, strict=True)
        ]
        schedule = make_schedule(args.schedule, stages, args.microbatches)
        optimizer = session.optimizer(make_optimizer(args.optimizer, parameters))
        scheduler = make_scheduler(optimizer, args.steps)
        batch = args.microbatches * config.microbatch
        text = standard_library()
        loader = session.loader(lambda dp_rank: ByteLoader(text, batch, config.sequence, args.seed, dp_rank))
        session.register(schedule=schedule, scheduler=scheduler)
        session.help_replay(lambda index: make_stage(config, index, num_stages, args.seed).to(args.device))
        first, last = 0 in indices, num_stages - 1 in indices

        def train_step(step: int) -> None:
            if step == args.steps - 1 and not session.replaying:
                time.sleep(args.rest_s)
            inputs, targets = (part.to(args.device) for part in next(loader))
            losses: list[torch.Tensor] = []
            optimizer.zero_grad()
            schedule.step(
                *([inputs] if first else []),
                **({"target": targets, "losses": losses} if last else {}),
                return_outputs=False,
            )
            if last and not session.replaying:
                # Before the update, so that a rank that dies in the update has reported its step's loss.
                loss = float(torch.stack(losses).detach().mean())
                events.emit("loss", rank=session.rank, dp_rank=session.dp_rank, step=step, loss=loss)
            if (
                args.updates == "after_backward"
            ):  # with wait-free updates the norm is unknown when the first bucket is applied
                session.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            scheduler.step()

        session.run(train_step, num_steps=args.steps)


if __name__ == "__main__":
    main()
    # Finalizing an interpreter with torch takes a second on a machine where all ranks do it at once.
    sys.stdout.flush()
    os._exit(0)
