"""Randomness from a counter, so that replay needs no history.

The default generator is seeded per (seed, step, stage, microbatch) before each forward, so the bits do not
depend on the schedule, on what ran before, or on who computes the microbatch. Activation checkpointing saves
and restores the generator's state around its recomputation, so it sees the same bits.
"""

_MASK = (1 << 64) - 1
# No stage has this index: the seed of what a trainer draws outside of its stages.
OUTSIDE_STAGES = 0xFFFF_FFFF


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    value = (value + 0x9E37_79B9_7F4A_7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)


def seed_for(seed: int, step: int, stage: int, microbatch: int) -> int:
    """The generator seed of one forward: a 63-bit integer, different for every coordinate."""
    value = _mix(seed & _MASK)
    for part in (step, stage, microbatch):
        value = _mix(value ^ (part & _MASK))
    return value >> 1
