"""A strategy for `lightning.pytorch.Trainer`: data-parallel replicas of a session.

    trainer = Trainer(strategy=SwiftStrategy(checkpoint_every=100), devices=4, max_steps=1000)
    trainer.fit(model, loader)

Lightning's loop has no function that does one optimizer step. So its fit loop is cut: what it does in front of the
first batch and behind the last one of an epoch belongs to the step of that batch.
"""

import copy
from types import MethodType
from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call

from swift_ft import Session
from swift_ft.errors import UsageError


class SwiftStrategy(DDPStrategy):  # type: ignore[misc]
    """Trains replicas under a session, in place of `DDPStrategy`; `settings` are those of `Session.from_env`.

    The script is started by ``swift-ft run``. The session registers the model, its optimizer, schedulers and loaders,
    the loops' counters and what callbacks return by `state_dict`. It averages the gradients; the model is in no
    DistributedDataParallel. Raises UsageError for what a recovery could not take back: several optimizers, manual
    optimization, a loader without a length, and means over an epoch (``self.log(..., on_epoch=True)``).
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(process_group_backend="gloo")
        self._settings = settings
        self.session: Session
        """The session, once `fit` has begun."""

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self.session = Session.from_env(**{"replicas": self.world_size, **self._settings})

    def configure_ddp(self) -> None:
        self.model: Any = self.session.module(self.model)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1 or not self.lightning_module.automatic_optimization:
            raise UsageError("SwiftStrategy takes one optimizer, and automatic optimization")
        self.session.optimizer(self.optimizers[0])

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Is called as the module's forward, which the session sees."""
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(
                self.model, self.lightning_module, "training_step", *args, **kwargs
            )

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        # It asks rank 0 for a SIGTERM, and takes whatever error a collective has for none.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        trainer.fit_loop.run = MethodType(lambda _loop: _run(trainer, self.session), trainer.fit_loop)

    def teardown(self) -> None:
        self.session.close()
        super().teardown()


class _Loops:
    """What the loops know besides model, optimizer, schedulers and loaders."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.in_epoch = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "loops": self._trainer.fit_loop.state_dict(),
            "values": [{name: getattr(thing, name) for name in names} for thing, names in self._parts()],
            "callbacks": call._call_callbacks_state_dict(self._trainer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self._trainer.fit_loop.load_state_dict(state["loops"])
        _goes_on(self._trainer.fit_loop)
        for (thing, _), values in zip(self._parts(), state["values"], strict=True):
            vars(thing).update(values)
        call._call_callbacks_load_state_dict(self._trainer, state)

    def _parts(self) -> list[tuple[Any, tuple[str, ...]]]:
        trainer, fit = self._trainer, self._trainer.fit_loop
        places = [(fit._data_fetcher, ("fetched", "done")), (fit._combined_loader._iterator, ("_idx",))]
        return [(self, ("in_epoch",)), (trainer, ("should_stop",)), *places]


def _goes_on(loop: Any) -> None:
    """Lets the loop do the next batch. After a load it believes that it restarts, and would skip what it does first."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            _goes_on(inner)


def _run(trainer: Trainer, session: Session) -> None:
    """As `_FitLoop.run`, in steps."""
    fit = trainer.fit_loop
    fit.setup_data()
    if fit.skip:
        return
    fit.reset()
    fit.on_run_start()
    epoch, loops = fit.epoch_loop, _Loops(trainer)
    loaders = {f"loader{number}": each for number, each in enumerate(fit._combined_loader.flattened)}
    schedulers = {f"scheduler{n}": config.scheduler for n, config in enumerate(trainer.lr_scheduler_configs)}
    session.register(loops=loops, **loaders, **schedulers)
    fetcher = iter(fit._data_fetcher)  # that of `setup_data` was made before the loaders were registered
    if fetcher.length is None:
        raise UsageError("SwiftStrategy takes loaders with a length: Lightning draws ahead of others")

    def train_step(step: int) -> None:
        while trainer.global_step == step and not fit.done:
            if not loops.in_epoch:
                fit.on_advance_start()
                epoch.reset()
                epoch.on_run_start(fetcher)
                loops.in_epoch = True
            epoch.advance(fetcher)
            epoch.on_advance_end(fetcher)
            epoch.on_iteration_done()
            if any(result.meta.on_epoch for result in epoch._results.values()):
                raise UsageError(
                    "self.log(..., on_epoch=True) under SwiftStrategy: a mean over the batches of an epoch is not "
                    "captured; log each step (on_step=True, on_epoch=False)"
                )
            if epoch.done:
                fit.on_advance_end()
                fit.on_iteration_done()
                loops.in_epoch = False
        if trainer.should_stop or (fit.done and step + 1 < num_steps):
            session.stop("trainer.should_stop was set" if trainer.should_stop else "the last epoch has ended")

    updates = -(-fit.max_batches // trainer.accumulate_grad_batches)
    limits = (trainer.max_steps, trainer.max_epochs * updates)  # negative: none
    num_steps = min(limit for limit in limits if limit >= 0)
    session.run(train_step, num_steps)
    fit.on_run_end()
