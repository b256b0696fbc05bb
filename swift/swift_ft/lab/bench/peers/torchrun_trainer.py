"""The trainer of `swift-ft bench recovery` for torchrun: DistributedDataParallel, and torch.distributed.checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from swift_ft.lab.bench.peers.trial import Trial, make_model, make_optimizer


class Training(Stateful):
    """The content of a checkpoint: model, optimizer and step."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model, self.optimizer, self.step = model, make_optimizer(model), 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.step = state["step"]


def train(trial: Trial, rank: int, training: Training, save_to: Callable[[Path], None]) -> None:
    """Trains from the newest checkpoint, or from the start, to the last step."""
    newest = trial.newest_checkpoint()
    if newest is not None:
        load({"training": training}, checkpoint_id=newest)
    while training.step < trial.steps:
        step = training.step
        training.optimizer.zero_grad()
        loss = trial.loss(training.model, rank, step)
        trial.maybe_die(rank, step, "forward")
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError:
            trial.mark("broken", rank, step)
            raise
        trial.maybe_die(rank, step, "backward")
        training.optimizer.step()
        trial.maybe_die(rank, step, "update")
        trial.mark("stepped", rank, step)
        training.step += 1
        if training.step % trial.every == 0:
            save_to(trial.checkpoints / str(training.step))


def main() -> None:
    trial = Trial.given()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trial.mark("connected", rank)
    training = Training(DistributedDataParallel(make_model()))
    state = {"training": training}
    if trial.settings.get("asynchronous"):
        # A thread saves: in the training's group, its collectives and those of the steps would wait for each other.
        group = dist.new_group()
        saving: list[Any] = []

        def save_behind(where: Path) -> None:
            for last in saving:
                last.result()
            saving[:] = [async_save(state, checkpoint_id=where, process_group=group)]

        train(trial, rank, training, save_behind)
        for last in saving:
            last.result()
    else:
        train(trial, rank, training, lambda where: save(state, checkpoint_id=where))
    trial.end(rank, training.model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
