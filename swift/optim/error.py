"""How far an undo is from the truth, for drills and benchmarks that keep a copy besides."""

from dataclasses import dataclass

import torch

from swift.optim.units import DTYPES


@dataclass(slots=True)
class Error:
    """Sums over parameters."""

    elements: int = 0
    equal: int = 0
    ulps: float = 0.0
    ulps_max: float = 0.0
    squares: float = 0.0
    step_squares: float = 0.0

    def add(self, truth: torch.Tensor, got: torch.Tensor, stepped_squares: float) -> None:
        """`stepped_squares`: the squared length of the step that was taken back."""
        if not truth.numel():
            return
        apart = (_order(truth) - _order(got)).abs()
        self.elements += truth.numel()
        self.equal += int((apart == 0).sum())
        self.ulps += float(apart.sum(dtype=torch.float64))
        self.ulps_max = max(self.ulps_max, float(apart.max()))
        self.squares += squares(truth, got)
        self.step_squares += stepped_squares

    @property
    def ulps_mean(self) -> float:
        return self.ulps / max(self.elements, 1)

    @property
    def exact_share(self) -> float:
        return self.equal / self.elements if self.elements else 1.0

    @property
    def step_error(self) -> float:
        return float((self.squares / self.step_squares) ** 0.5) if self.step_squares else 0.0


def squares(a: torch.Tensor, b: torch.Tensor) -> float:
    """Squared distance, over the elements that are finite in both."""
    return float((a.detach().double() - b.detach().double()).nan_to_num_(0.0, 0.0, 0.0).square().sum())


def _order(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values, neighbours one apart; both zeros are 0."""
    integers = DTYPES[tensor.dtype]
    bits = tensor.detach().contiguous().view(integers).to(torch.int64)
    smallest = torch.iinfo(integers).min
    return torch.where(bits < 0, smallest - bits, bits)
