"""What each role may call. A call that is not in the table is nobody's."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Role(StrEnum):
    """What a token lets its bearer do."""

    WRITER = "writer"
    """A rank or a launcher: appends, and speaks to the coordinator as a member."""
    REPLAYER = "replayer"
    """A rank that replays: reads."""
    OPERATOR = "operator"
    """A person: looks at everything of a job, trims and drops it, declares a rank dead or a job failed, names log
    servers."""
    COORDINATOR = "coordinator"
    """The coordinator, towards log servers: fences, trims, resets."""


LOG = "/swift.log.v1.Log/"
COORDINATOR = "/swift.coordinator.v1.Coordinator/"

_MEMBER = frozenset({Role.WRITER})
_MEMBER_OR_OPERATOR = frozenset({Role.WRITER, Role.OPERATOR})
_READ = frozenset({Role.REPLAYER, Role.OPERATOR})
_SEE = frozenset({Role.WRITER, Role.REPLAYER, Role.OPERATOR})
_COORDINATOR = frozenset({Role.COORDINATOR})

MAY_CALL: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        LOG + "Append": _MEMBER,
        LOG + "Read": _READ,
        LOG + "Digests": _READ,
        LOG + "Inventory": frozenset({Role.REPLAYER, Role.OPERATOR, Role.COORDINATOR}),
        LOG + "Fence": _COORDINATOR,
        LOG + "Trim": frozenset({Role.OPERATOR, Role.COORDINATOR}),
        LOG + "Reset": _COORDINATOR,
        LOG + "Status": frozenset({Role.OPERATOR, Role.COORDINATOR}),
        LOG + "Drop": frozenset({Role.OPERATOR}),
        COORDINATOR + "Join": _MEMBER,
        COORDINATOR + "Watch": _SEE,
        COORDINATOR + "Heartbeat": _MEMBER,
        COORDINATOR + "Report": _MEMBER,
        COORDINATOR + "Ready": _MEMBER,
        COORDINATOR + "Refuse": _MEMBER,
        COORDINATOR + "Differs": _MEMBER,
        COORDINATOR + "CheckpointDurable": _MEMBER,
        COORDINATOR + "AskCheckpoint": _MEMBER,
        COORDINATOR + "Measure": _MEMBER,
        COORDINATOR + "Share": _MEMBER,
        COORDINATOR + "Meet": _MEMBER,
        COORDINATOR + "Measurements": _SEE,
        COORDINATOR + "MemberExited": _MEMBER_OR_OPERATOR,
        COORDINATOR + "Suspect": _MEMBER,
        COORDINATOR + "Finish": _MEMBER,
        COORDINATOR + "ChangeGroups": frozenset({Role.OPERATOR}),
        COORDINATOR + "ChangeLogServers": frozenset({Role.OPERATOR}),
        COORDINATOR + "Fail": _MEMBER_OR_OPERATOR,
        COORDINATOR + "Revoke": _MEMBER,
        COORDINATOR + "Vote": _MEMBER,
        COORDINATOR + "Stop": _MEMBER,
        COORDINATOR + "Status": _SEE,
        COORDINATOR + "Jobs": _SEE,
    }
)
