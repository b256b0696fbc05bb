"""A rank's training state: what it consists of, how a step is undone, how it is saved, exported and copied.

journal              which buckets of a step are applied to an optimizer, and how they are taken back
exact_undo           bit-exact undo; inverse_step: undo by formula; kernels: inverse steps in one pass (kernels.cpp)
module_state         buffers, attributes and modes of modules
carried_gradients    gradients that a step leaves to the next one
loaders, rng         positions of data loaders; random numbers from a counter
torch_settings       settings of torch that a trainer may change
fsdp                 parameters and optimizer state that are DTensors
tensors, tree        tensors as bytes; state dicts as named tensors and JSON
digests              of tensors, computed where they are: in host memory or on a device
checkpoint_file      one rank's state as an index and a file of tensors; checkpoint_store manages such files
checkpoint_place     where they are: a directory or an object store
export               a whole job's state as a directory of torch.distributed.checkpoint, and back
transfer             copies a replica's state to a joining rank
"""

MODES = ("async", "sync")
"""Point at which training continues after a checkpoint: once the state is copied, or once it is durable."""
