"""What examples/torchtitan/train.py does; its trainer notes each step's loss, gradients' norm, weights and optimizer.
Without a session it is torchtitan's own, with torchtitan's checkpoints."""

import os
import sys
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from swift_ft import torch_private
from tests.trainers import probe

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "torchtitan"))
import on_cpu  # type: ignore[import-not-found]

LLAMA = "--module llama3 --config llama3_debugmodel"


class Noting:
    """Of a trainer of torchtitan's."""

    def __init__(self: Any, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        told = self.metrics_processor.log

        def log(step: int, loss: float, highest: float, norm: float, **more: Any) -> None:
            self.said = (loss, norm)
            told(step, loss, highest, norm, **more)

        self.metrics_processor.log = log

    def train_step(self: Any, batches: Any) -> None:
        super().train_step(batches)  # type: ignore[misc]
        probe.note(self.step - 1, *self.said, self._local())

    def _local(self: Any) -> dict[str, list[Any]]:
        """This rank's parts of all tensors: the whole ones would be gathered from other ranks."""
        weights = [each for part in self.model_parts for each in part.state_dict().values()]
        states = [each for one in self.optimizers for kept in one.state.values() for each in kept.values()]
        return {
            name: [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
            for name, tensors in {"model": weights, "optimizer": states}.items()
        }

    def close(self: Any) -> None:
        session = getattr(self, "session", None)
        probe.end(session, **self._local(), trainer=self.state_dict(), schedulers=self.lr_schedulers)
        super().close()  # type: ignore[misc]


def main(model: str = LLAMA, **degrees: int) -> None:
    """`degrees`: of torchtitan's parallelism, by its names for them."""
    place = Path(os.environ[probe.ENV_DIRECTORY])
    os.environ |= {"HF_HOME": str(place / "hf"), "HF_HUB_OFFLINE": "1"}
    assets = place / f"assets{os.environ['RANK']}"
    on_cpu.make_assets(assets)
    on_cpu.prepare()
    from torchtitan.config import ConfigManager
    from torchtitan.trainer import Trainer

    from swift_ft.integrations.torchtitan import SwiftTrainer

    arguments = (
        f"{model} --training.seq_len 64 --training.local_batch_size 4 --training.steps {probe.steps()}"
    )
    arguments += " --training.disable_cuda_graphs --validator.no-enable --debug.seed 7 --metrics.log_freq 1"
    arguments += " --parallelism.spmd_backend partial_dtensor"
    arguments += f" --hf_assets_path {assets} --dump_folder {place / 'dump'}"
    arguments += "".join(f" --parallelism.{name}_degree {degree}" for name, degree in degrees.items())
    own, options = "--checkpoint.enable --checkpoint.interval 5", {}
    if probe.is_protected():
        own, options = "--checkpoint.no-enable", {"checkpoint_every": 5}
    config: Any = ConfigManager().parse_args([*arguments.split(), *own.split()])
    on_cpu.use_assets(assets)
    kind: Any = type("Both", (Noting, SwiftTrainer if options else Trainer), {})
    trainer = kind(config, **options)
    if not options and hasattr(trainer, "pp_schedule"):
        torch_private.take_microbatches(trainer.pp_schedule)  # which torch before 2.14 lacks
    trainer.train()
    trainer.close()
