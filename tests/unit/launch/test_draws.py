"""What a script draws before its first step, without a seed, is the same in every process."""

import random

import numpy as np
import torch

from swift_ft.launch.worker import draw_alike


def test_processes_that_begin_with_other_states_draw_alike() -> None:
    drawn = set()
    for seed in (1, 2):  # as two processes begin
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        draw_alike()
        drawn.add((random.random(), float(np.random.rand()), torch.rand(1).item()))
    assert len(drawn) == 1
