"""Recovery for PyTorch training with pipeline and data parallelism.

In a trainer::

    import swift_ft

    with swift_ft.Session.from_env() as session:
        stage = session.pipeline_stage(module, stage_index, num_stages, device)
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        optimizer = session.optimizer(torch.optim.AdamW(module.parameters()))
        session.register(schedule=schedule, scheduler=lr_scheduler, loader=loader)
        session.run(train_step, num_steps=1000)

`import swift_ft` is light, and changes nothing in the process: torch is imported at the first access to
`swift_ft.Session`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_ft.reinitialization import Reinitialize as Reinitialize
    from swift_ft.reinitialization import reinit as reinit
    from swift_ft.state.export import load_dcp as load_dcp
    from swift_ft.train.communicator import Communicator as Communicator
    from swift_ft.train.config import SessionConfig as SessionConfig
    from swift_ft.train.session import Session as Session
    from swift_ft.warm_up import is_warming_up as is_warming_up


__all__ = ["Communicator", "Reinitialize", "Session", "SessionConfig", "is_warming_up", "load_dcp", "reinit"]
__version__ = "0.1.0"
_MODULE_OF = {
    "Communicator": "train.communicator",
    "Reinitialize": "reinitialization",
    "Session": "train.session",
    "SessionConfig": "train.config",
    "is_warming_up": "warm_up",
    "load_dcp": "state.export",
    "reinit": "reinitialization",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'swift_ft' has no attribute {name!r}")
    return getattr(import_module(f"swift_ft.{_MODULE_OF[name]}"), name)
