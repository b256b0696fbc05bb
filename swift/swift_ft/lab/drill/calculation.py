"""Independent calculation of a drill that drops batches of lost ranks, by plain torch in one process.

It does not use the session. For each step it sums the gradients of the origins present (data-parallel ranks) in their
order, divides by their number, clips, and does one step of the optimizer and of the learning rate schedule. It shares
with the trainer the model, the data, and the rule that derives randomness from (seed, step, origin, microbatch).

A step interrupted by a loss has buckets of several kinds. The event "lossy_step" gives each bucket's contributing
origins and the divisor of their sum.

Run by the drill: ``python -m swift_ft.lab.drill.calculation TRAINER'S FLAGS --absent '{"5": [2]}' --cut '{}' --out
FILE``; FILE: version -> digests, in the format of the ranks.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swift_ft.files import write_whole
from swift_ft.lab.drill.model import (
    ByteLoader,
    StageModule,
    loss_fn,
    make_optimizer,
    make_stage,
    standard_library,
)
from swift_ft.lab.drill.topology import MODELS
from swift_ft.lab.drill.trainer import make_parser, make_scheduler
from swift_ft.state.rng import Randomness
from swift_ft.state.tensors import digest
from swift_ft.state.tree import split


class Calculation:
    """A model that is trained step by step: ``step(step, origins)`` any number of times; ``digests()`` of the current
    state."""

    def __init__(self, args: Any) -> None:
        """Builds the whole model as one stage. `args`: the flags of the trainer."""
        self._config = MODELS[args.model]
        self._args = args
        self._text = standard_library()
        self._module: StageModule = make_stage(self._config, 0, 1, args.seed)
        self._parameters = list(self._module.parameters())
        self._optimizer = make_optimizer(args.optimizer, self._parameters)
        self._scheduler = make_scheduler(self._optimizer, args.steps)

    def step(self, step: int, origins: Sequence[int]) -> None:
        """Computes one step. `origins`: the data-parallel ranks present, ascending."""
        everything = range(len(self._parameters))
        self.cut_step(
            step,
            [{"parameters": everything, "contributors": origins, "divisor": len(origins)}],
        )

    def cut_step(self, step: int, buckets: Sequence[Mapping[str, Any]]) -> None:
        """Computes a step whose `buckets` each have their own contributors and divisor."""
        origins = sorted({origin for bucket in buckets for origin in bucket["contributors"]})
        gradients = {origin: self._gradients(step, origin) for origin in origins}
        self._optimizer.zero_grad()
        for bucket in buckets:
            first, *others = sorted(bucket["contributors"])
            for number in bucket["parameters"]:
                total = gradients[first][number].clone()
                for origin in others:
                    total.add_(gradients[origin][number])
                self._parameters[number].grad = total / bucket["divisor"]
        if self._args.updates == "after_backward":
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._scheduler.step()

    def _gradients(self, step: int, origin: int) -> list[torch.Tensor]:
        """Returns the gradients of the origin's batch: the mean over its microbatches, per parameter."""
        self._optimizer.zero_grad()
        count = self._args.microbatches
        batch = count * self._config.microbatch
        loader = ByteLoader(self._text, batch, self._config.sequence, self._args.seed, origin)
        loader.load_state_dict({"position": step})
        randomness = Randomness(self._args.seed, origin)
        randomness.begin_step(step)
        inputs, targets = (whole.chunk(count) for whole in next(loader))
        for microbatch in range(count):
            randomness.forward(0, microbatch)
            loss = loss_fn(self._module(inputs[microbatch]), targets[microbatch])
            randomness.backward(0, microbatch)
            loss.backward()  # type: ignore[no-untyped-call]
        return [p.grad / count for p in self._parameters if p.grad is not None]

    def digests(self) -> dict[str, str]:
        """Returns the digests of the current state, keyed by `TRAINED_FIELDS`."""
        parts = {
            "parameters": {"0": self._module.state_dict()},
            "optimizer": [self._optimizer.state_dict()],
        }
        return {name: digest(*_in_json(part)) for name, part in parts.items()}


def _in_json(part: Any) -> tuple[dict[str, torch.Tensor], str]:
    tensors, rest = split(part)
    return tensors, json.dumps(rest)


def main() -> None:
    parser = make_parser()
    parser.add_argument("--absent", type=json.loads, required=True, help="step -> origins, as JSON")
    parser.add_argument("--cut", type=json.loads, required=True, help="step -> its buckets, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    calculation = Calculation(args)
    found = {0: calculation.digests()}
    for step in range(args.steps):
        absent = args.absent.get(str(step), [])
        if str(step) in args.cut:
            calculation.cut_step(step, args.cut[str(step)])
        else:
            calculation.step(step, [origin for origin in range(args.replicas) if origin not in absent])
        found[step + 1] = calculation.digests()
    write_whole(args.out, json.dumps(found))


if __name__ == "__main__":
    main()
