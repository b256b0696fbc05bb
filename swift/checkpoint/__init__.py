"""Checkpoints: one rank's state as an index and a safetensors file."""

MODES = ("async", "sync")
"""When training goes on after a checkpoint: once the state is copied, or once it is durable."""
