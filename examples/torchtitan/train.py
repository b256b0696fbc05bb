"""torchtitan under swift-ft: `train.py ARGUMENTS OF TORCHTITAN...`; on CPUs if there is nothing else."""

import sys
from pathlib import Path
from typing import Any

import on_cpu  # this folder's
import torch


def main(arguments: list[str]) -> None:
    if not torch.accelerator.is_available():
        on_cpu.prepare()
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    from swift_ft.integrations.torchtitan import SwiftTrainer

    init_logger()
    config: Any = ConfigManager().parse_args(arguments)
    if not torch.accelerator.is_available():
        on_cpu.use_assets(Path(config.hf_assets_path))
    trainer = SwiftTrainer(config, checkpoint_every=10)  # in the place of config.build()
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
