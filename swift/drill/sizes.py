"""Sizes of the drill's models, and what follows from them for the log. No torch."""

from dataclasses import dataclass, replace

VOCABULARY = 256
_FLOAT_BYTES, _TOKEN_BYTES = 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of the transformer and its batches."""

    layers: int
    width: int
    heads: int
    sequence: int
    microbatch: int
    """Sequences in one microbatch."""
    bucket_bytes: int
    """Gradients reduced and applied together: small enough that every stage has several buckets."""
    dropout: float = 0.1
    checkpoint_activations: bool = False
    """Recompute each block in backward instead of keeping its activations."""
    forward_s: float = 0.0
    """For which a stage sleeps in every forward of a microbatch, as if a device of its own computed meanwhile."""
    backward_s: float = 0.0

    @property
    def boundary_bytes(self) -> int:
        """Of what crosses a boundary for one microbatch, in each direction: b s h e."""
        return self.microbatch * self.sequence * self.width * _FLOAT_BYTES

    @property
    def batch_bytes(self) -> int:
        """Of the inputs of one microbatch, and of its targets."""
        return self.microbatch * self.sequence * _TOKEN_BYTES


_TINY = ModelConfig(layers=8, width=32, heads=2, sequence=16, microbatch=2, bucket_bytes=16 << 10)
MODELS = {
    "tiny": _TINY,
    "default": ModelConfig(layers=8, width=128, heads=4, sequence=64, microbatch=4, bucket_bytes=256 << 10),
    # Every rank has a stage that takes a fixed time: schedules and replays take what their formulas say, although all
    # ranks share two cores.
    "paced": replace(_TINY, forward_s=0.01, backward_s=0.02),
}
NORM_BYTES = 4
"""Of the global gradient norm, the only result of a collective that a rank logs."""
