"""`transformers.Trainer` under a session: data-parallel replicas.

    session = Session.from_env(replicas=2)  # before TrainingArguments, which ask for a device
    SwiftTrainer(model=model, args=TrainingArguments(...), train_dataset=data, session=session).train()

The Trainer's loop has no function that does one optimizer step. So each step is an epoch to it, with the batches of one
update; what belongs to an epoch is done at the first and the last step of it.
"""

import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from swift_ft import Session
from swift_ft.errors import UsageError
from swift_ft.integrations import Attributes

_LOGGED, _TIMES = ("_globalstep_last_logged", "_total_loss_scalar"), ("_runtime", "_per_second")
_COUNTS = ("epoch", "global_step", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step")


class SwiftTrainer(Trainer):  # type: ignore[misc]  # typed only where transformers is installed
    """Trains replicas under a session; the other arguments are those of `transformers.Trainer`.

    The session registers the model, its optimizer, the scheduler, the loader, the Trainer's own state, and callbacks
    that are an `ExportableState`. It averages the gradients; the model is in no DistributedDataParallel. Raises
    UsageError for what a recovery could not take back.
    """

    control: Any

    def __init__(self, *given: Any, session: Session, **options: Any) -> None:
        super().__init__(*given, **options)
        args, self.session = self.args, session
        refused = {
            "a dataset without a length": not hasattr(self.train_dataset, "__len__"),
            "checkpoints of the Trainer's own: set save_strategy='no'": args.save_strategy != "no",
            "fp16 (bf16 needs no scaler), or auto_find_batch_size": args.fp16 or args.auto_find_batch_size,
            "FSDP or DeepSpeed": self.is_fsdp_enabled or self.is_deepspeed_enabled,
            "several devices in one process": args.n_gpu > 1,
        }
        for what in (what for what, is_so in refused.items() if is_so):
            raise UsageError(f"SwiftTrainer does not take {what}")
        self._place = place = _Place(self)
        self.callback_handler.callbacks.insert(0, place)
        end = self.callback_handler.on_epoch_end
        self.callback_handler.on_epoch_end = lambda *now: end(*now) if place.ended else now[-1]
        # In evaluation mode accelerate wraps it in no DistributedDataParallel.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def get_train_dataloader(self) -> Any:
        """Returns torch's loader inside of accelerate's, which reads ahead."""
        loader = super().get_train_dataloader().base_dataloader
        if not hasattr(loader.batch_sampler, "sampler"):  # of a shard, where the session looks for an epoch
            loader.batch_sampler.sampler = loader.batch_sampler.batch_sampler.sampler
        return loader

    def _run_epoch(self, *, train_dataloader: Any, steps_in_epoch: int, **given: Any) -> None:
        """Is called for the first epoch, and does all of them."""
        if given["resume_from_checkpoint"]:
            raise UsageError("SwiftTrainer goes on from the session's checkpoint: no resume_from_checkpoint")
        session, place, accumulated = self.session, self._place, self.args.gradient_accumulation_steps
        place.batches_in_epoch = steps_in_epoch
        session.module(given["model"])
        session.optimizer(self.optimizer.optimizer)
        session.register(trainer=place, scheduler=self.lr_scheduler, loader=train_dataloader)
        sampler = train_dataloader.batch_sampler.sampler

        def train_step(step: int) -> None:
            if place.batches == 0:
                if place.epoch > 0:
                    self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(place.epoch)
            place.iterator = place.iterator or iter(train_dataloader)
            count = min(accumulated, steps_in_epoch - place.batches)
            one = given | {"epoch": place.epoch, "steps_in_epoch": count, "num_update_steps_per_epoch": 1}
            super(SwiftTrainer, self)._run_epoch(train_dataloader=islice(place.iterator, count), **one)
            if place.ended:
                place.epoch, place.batches, place.iterator = place.epoch + 1, 0, None
            if self.control.should_training_stop and self.state.global_step < self.state.max_steps:
                session.stop("the Trainer's control has should_training_stop")

        session.run(train_step, self.state.max_steps)
        self.control.should_training_stop = True

    def training_step(self, *given: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*given, **options)
        if self.accelerator.sync_gradients:
            self.session.reduce_gradients()  # before they are clipped
        return loss


class _Place(TrainerCallback):  # type: ignore[misc]
    """What the Trainer knows besides model, optimizer, scheduler and loader; the same on all replicas."""

    epoch = batches = batches_in_epoch = 0
    iterator: Any = None

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._history = trainer, ""
        self._sums = torch.zeros(trainer.session.dp_size, 2, dtype=torch.float64)
        """Each replica's loss since the last log, and its operations: a replacement goes on with the lost one's."""

    @property
    def ended(self) -> bool:
        stops = self._trainer.control.should_epoch_stop or self._trainer.control.should_training_stop
        return bool(stops or self.batches == self.batches_in_epoch)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        loss = self._trainer._tr_loss.double()
        own = torch.stack([loss, torch.full_like(loss, self._trainer.current_flos)])
        self._sums = self._trainer.accelerator.gather(own[None]).cpu()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.batches = min(self.batches + args.gradient_accumulation_steps, self.batches_in_epoch)
        state.epoch = self.epoch + self.batches / self.batches_in_epoch

    def state_dict(self) -> dict[str, Any]:
        trainer, log = self._trainer, self._trainer.state.log_history
        for entry in log[self._history.count("\n") :]:  # a text is copied at once, however long
            same = {name: told for name, told in entry.items() if not name.endswith(_TIMES)}
            self._history += json.dumps(same) + "\n"
        kept = trainer._globalstep_last_logged != trainer.state.global_step, trainer.current_flos != 0
        values, sums = [each.state_dict() for each in self._parts()], self._sums * torch.tensor(kept)
        return {"values": values, "sums": sums, "history": self._history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each, values in zip(self._parts(), state["values"], strict=True):
            each.load_state_dict(values)
        self.iterator = self.iterator if self.batches else None  # that of a dropped step began an epoch
        trainer, self._sums, self._history = self._trainer, state["sums"].clone(), state["history"]
        loss, trainer.current_flos = self._sums[trainer.session.dp_rank].tolist()
        trainer._tr_loss.fill_(loss)
        trainer.state.log_history[:] = [json.loads(line) for line in self._history.splitlines()]

    def _parts(self) -> Iterator[Attributes]:
        trainer = self._trainer
        for thing, names in ((self, ("epoch", "batches")), (trainer, _LOGGED), (trainer.state, _COUNTS)):
            yield Attributes(lambda thing=thing: thing, *names)  # type: ignore[misc]
        yield Attributes(lambda: trainer.control)
        for each in trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState):
                yield Attributes(lambda each=each: each, *each.state()["attributes"])  # type: ignore[misc]
