"""torchtitan's trainer under a session: ``SwiftTrainer(config).train()`` in the place of ``config.build().train()``.

torchtitan's parallelism becomes the session's: a pipeline rank is a stage, ``dp_replicate`` are replicas, ``fsdp``
(``dp_shard`` × ``cp``) are shards, ``tp`` computes one batch together. Ranks are numbered alike.

torchtitan's own checkpoints are off (``--checkpoint.no-enable``): the session saves what they save. The data must not
end before the last step.
"""

import os
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from swift_ft import Session, torch_private
from swift_ft.errors import UsageError


class SwiftTrainer(Trainer):  # type: ignore[misc]  # typed only where torchtitan is installed
    """torchtitan's trainer, whose job survives the loss of ranks."""

    def __init__(self, config: Any, **settings: Any) -> None:
        """`config`: torchtitan's. `settings`: see `swift_ft.Session.from_env`."""
        if config.checkpoint.enable:
            raise UsageError("torchtitan's own checkpoints are off under a session: --checkpoint.no-enable")
        self._settings = settings
        super().__init__(config)
        session, schedule = self.session, getattr(self, "pp_schedule", None)
        if schedule is None:
            for part in self.model_parts:
                session.module(part)
        else:
            for stage in torch_private.schedule_stages(schedule):
                session.adopt(stage)
            session.register(schedule=schedule)
            torch_private.take_microbatches(schedule)
        head = getattr(self.loss_fn, "lm_head", None)  # of a loss in chunks
        if isinstance(head, FSDPModule):
            head.set_reshard_after_forward(True)  # as a step leaves it: a new process would begin without
        for optimizer in self.optimizers:  # the container is an optimizer as well, of the same parameters
            session.optimizer(optimizer)
        session.register(loader=self.dataloader, trainer=self, lr_schedulers=self.lr_schedulers)
        self._batches = self.batch_generator(self.dataloader)
        self._told, self.metrics_processor.log = self.metrics_processor.log, self._log

    def init_distributed(self) -> ParallelDims:
        """(torchtitan, first of all) Makes the session, and with it the default group."""
        dims = ParallelDims.from_config(self.config.parallelism, int(os.environ["WORLD_SIZE"]))
        self.session = Session.from_env(
            seed=self.config.debug.seed or 0,
            replicas=dims.dp_replicate,
            shards=dims.dp_shard * dims.cp,
            tensor_parallel=dims.tp,
            **self._settings,
        )
        return super().init_distributed()

    def train(self) -> None:
        self.session.run(self._train_step, num_steps=self.config.training.steps)

    def _train_step(self, step: int) -> None:
        self.step = step + 1
        self.gc_handler.run(self.step)
        self.train_step(self._batches)
        if self.config.validator.enable and self.validator.should_validate(self.step):
            self.validator.validate(self.model_parts, self.step)

    def _log(self, step: int, loss: float, highest: float, norm: float, **more: Any) -> None:
        self.session.log(loss=loss, grad_norm=norm)
        self._told(step, loss, highest, norm, **more)

    def close(self) -> None:
        super().close()
        self.session.close()
