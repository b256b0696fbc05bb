"""The trainer of `swift-ft bench recovery` for torchft: one process for each replica group, over gloo.

Gradients are averaged by `Manager.allreduce`: torchft's DistributedDataParallel (0.2.0) does not survive a lost peer
over gloo, where the loss raises in `Work.wait`; its hook then ends the survivor with ``assert fut._fut``.
A spare is a replica of torchft's fixed world that trains along and contributes zero gradients. It takes the place, and
so the batches, of a lost replica.
"""

import os
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save
from torchft import Manager, ProcessGroupGloo
from torchft.manager import WorldSizeMode
from torchft.optim import OptimizerWrapper

from swift_ft.lab.bench.peers.trial import REPLICAS, SURVIVOR, Trial, make_model, make_optimizer


def main() -> None:
    trial = Trial.given()
    replica, least = int(os.environ["REPLICA_GROUP_ID"]), int(trial.settings["least"])
    timeout_s, spares = float(trial.settings.get("timeout_s", 10.0)), int(trial.settings.get("spares", 0))
    place: int | None = replica if replica < REPLICAS else None
    model = make_model()
    plain = make_optimizer(model)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=timeout_s / 2)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=least,
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=timeout_s),
        use_async_quorum=least
        == 1,  # where both are needed, a replica takes its state before the step, not in it
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if spares else WorldSizeMode.DYNAMIC,
    )
    optimizer = OptimizerWrapper(manager, plain)
    trial.mark("connected", place)
    trial.meet("connected", REPLICAS + spares)  # else the first one begins alone
    while manager.current_step() < trial.steps:
        optimizer.zero_grad()  # begins the step's quorum
        step = manager.current_step()
        if spares:
            place = manager.participating_rank()
        loss = trial.loss(model, place or 0, step)
        trial.maybe_die(replica, step, "forward")
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        trial.maybe_die(replica, step, "backward")
        optimizer.step()
        trial.maybe_die(replica, step, "update")
        if manager.current_step() <= step:
            trial.mark("broken", place, step)
            continue  # a replica was lost in the step: it is repeated
        if manager.is_participating():
            trial.mark("stepped", place, manager.current_step() - 1)
        if manager.current_step() % trial.every == 0 and replica == SURVIVOR:
            state = {"training": state_dict(), "torchft": manager.state_dict()}
            save(state, checkpoint_id=trial.checkpoints / str(manager.current_step()), no_dist=True)
    if place is not None:
        trial.end(place, model)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
