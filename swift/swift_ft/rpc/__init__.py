"""Client of the coordinator, used by ranks, launchers and drills. Does not import torch."""
