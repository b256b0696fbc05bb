"""The coordinator's client: how a rank, a launcher and a drill talk to the coordinator. No torch here."""

from swift._pb.coordinator_pb2 import (
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
    Member,
    Plan,
    RankPlan,
    State,
    StatusReply,
    Strategy,
    View,
)
from swift.control.client import CoordinatorClient, make_member
from swift.control.watcher import ViewWatcher, newer

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
    "Member",
    "Plan",
    "RankPlan",
    "State",
    "StatusReply",
    "Strategy",
    "View",
    "ViewWatcher",
    "make_member",
    "newer",
]
