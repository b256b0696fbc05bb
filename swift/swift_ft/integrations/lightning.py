"""A strategy for `lightning.pytorch.Trainer`: ``Trainer(strategy=SwiftStrategy(checkpoint_every=100), ...)``.

Lightning's loop has no function that does one optimizer step. So its fit loop is cut: what it does in front of the
first batch and behind the last one of an epoch, and a validation, belong to the step of that batch.
"""

from functools import partial
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy

from swift_ft import Session, is_warming_up
from swift_ft.errors import UsageError
from swift_ft.integrations import Attributes


class SwiftLogger(Logger):  # type: ignore[misc]
    """Writes what `self.log` is given, and the validations' metrics, by `Session.log`: each line once."""

    name, version = "swift", 0
    session: Session

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.session.log(**metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


class SwiftStrategy(DDPStrategy):  # type: ignore[misc]
    """Trains replicas under a session, in place of `DDPStrategy`; `settings` are those of `Session.from_env`.

    The session registers the model, optimizer, schedulers, loaders, the loops' counters and callbacks' attributes. It
    averages the gradients, without DistributedDataParallel. Raises UsageError for what it could not take back.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(process_group_backend="gloo")
        self._settings, self._in_epoch = settings, False
        self.session: Session  # once `fit` has begun

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self.session = Session.from_env(**{"replicas": self.world_size, **self._settings})
        self._trainer: Any = self.lightning_module.trainer
        for logger in self._trainer.loggers:
            if not isinstance(logger, SwiftLogger):
                raise UsageError("a logger cannot take a line back: Trainer(logger=SwiftLogger()), or False")
            logger.session = self.session

    @property
    def is_global_zero(self) -> bool:
        return bool(super().is_global_zero) and not is_warming_up()  # a rehearsal writes no file

    def configure_ddp(self) -> None:
        self.model: Any = self.session.module(self.model)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if len(self.optimizers) != 1 or not self.model.automatic_optimization:
            raise UsageError("SwiftStrategy takes one optimizer, and automatic optimization")
        self.session.optimizer(self.optimizers[0])
        trainer.num_sanity_val_steps = 0  # a validation is part of a step
        for each in trainer.checkpoint_callbacks:
            each._enable_version_counter = False  # a step that is done again has the same file
        # It asks rank 0 for a SIGTERM, and takes whatever error a collective has for none.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        trainer.fit_loop.run = partial(self._run, trainer.fit_loop, trainer.fit_loop.epoch_loop)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():  # as the module's forward, which the session sees
            return self._forward_redirection(self.model, self.model, "training_step", *args, **kwargs)

    def teardown(self) -> None:
        self.session.close()
        super().teardown()

    def state_dict(self) -> dict[str, Any]:
        return {"loops": self._trainer.fit_loop.state_dict(), "in_epoch": self._in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.training = True  # a validation may have been cut short
        fit, self._in_epoch = self._trainer.fit_loop, state["in_epoch"]
        fit.load_state_dict(state["loops"])
        for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop, fit.epoch_loop.automatic_optimization):
            loop.on_iteration_done()  # else it believes that it restarts, and leaves out what it does first

    def _run(self, fit: Any, epoch: Any) -> None:
        """As `_FitLoop.run`, in steps."""
        trainer, session = self._trainer, self.session
        fit.setup_data()
        if fit.skip:
            return
        fit.reset()
        fit.on_run_start()
        if trainer.enable_validation:
            epoch.val_loop.setup_data()  # asks other ranks
        log = epoch.val_loop._results.log  # all replicas take its mean, as they have to agree
        epoch.val_loop._results.log = lambda *given, **how: log(*given, **{**how, "sync_dist": True})
        epoch._results.training = False  # its values are of one replica, and no callback's to monitor
        things: list[Any] = [partial(getattr, fit, "_data_fetcher"), lambda: fit._combined_loader._iterator]
        things += [lambda each=each: each for each in trainer.callbacks if not isinstance(each, ProgressBar)]
        session.register(
            loops=self,
            should_stop=Attributes(lambda: trainer, "should_stop"),
            told=Attributes(
                lambda: trainer._logger_connector, "_first_loop_iter", "_current_fx", "_callback_metrics"
            ),
            **{f"part{n}": Attributes(thing) for n, thing in enumerate(things)},
            **{f"loader{n}": each for n, each in enumerate(fit._combined_loader.flattened)},
            **{f"scheduler{n}": each.scheduler for n, each in enumerate(trainer.lr_scheduler_configs)},
        )
        fetcher = iter(fit._data_fetcher)  # that of `setup_data` was made before the loaders were registered
        moves = trainer.reload_dataloaders_every_n_epochs or trainer._val_check_time_interval
        if moves or fetcher.length is None:
            raise UsageError("SwiftStrategy: loaders have a length and stay, val_check_interval is no time")

        def train_step(step: int) -> None:
            epoch._results.reset()  # what was logged in an earlier step is not told again
            epoch.val_loop._results.reset()
            while trainer.global_step == step and not fit.done:
                if not self._in_epoch:
                    fit.on_advance_start()
                    epoch.reset()
                    epoch.on_run_start(fetcher)
                try:
                    epoch.advance(fetcher)
                    epoch.on_advance_end(fetcher)
                    self._in_epoch = not epoch.done
                except StopIteration:  # on_train_batch_start has returned -1
                    self._in_epoch = False
                epoch.on_iteration_done()
                loader = epoch.val_loop._combined_loader
                if loader is not None and loader._iterator is not None:
                    loader._iterator.reset()  # a validation leaves it open
                if any(result.meta.on_epoch for result in epoch._results.values()):
                    raise UsageError("log(on_epoch=True) in training, under SwiftStrategy: log each step")
                if not self._in_epoch:
                    fit.on_advance_end()
                    fit.on_iteration_done()
            if trainer.loggers or trainer.checkpoint_callbacks:
                self.barrier()  # a rank that dies before its lines and files are written does the step again
            if trainer.should_stop or (fit.done and step + 1 < num_steps):
                session.stop("Lightning's fit loop has ended")

        of_epochs = trainer.max_epochs * -(-fit.max_batches // trainer.accumulate_grad_batches)
        num_steps = min(limit for limit in (trainer.max_steps, of_epochs) if limit >= 0)  # negative: none
        session.run(train_step, num_steps)
        fit.on_run_end()
