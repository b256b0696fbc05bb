"""Client of the coordinator, used by ranks, launchers and drills. Does not import torch."""

from swift_ft._pb.coordinator_pb2 import (
    CATCH_UP,
    CHECKPOINT,
    FAILED,
    FENCING,
    FINISHED,
    FORMING,
    KEEP,
    PLANNING,
    RECOVERING,
    REPLAY,
    RUNNING,
    View,
)
from swift_ft.rpc.client import CoordinatorClient, make_member
from swift_ft.rpc.views import newer

__all__ = [
    "CATCH_UP",
    "CHECKPOINT",
    "FAILED",
    "FENCING",
    "FINISHED",
    "FORMING",
    "KEEP",
    "PLANNING",
    "RECOVERING",
    "REPLAY",
    "RUNNING",
    "CoordinatorClient",
    "View",
    "make_member",
    "newer",
]
