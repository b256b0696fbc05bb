"""All errors that swift raises for its users.

SwiftError
├── UsageError                 bad input; the message says what to do; exit code 2
│   └── UnknownJob             the log server or the coordinator does not know the job
├── ServiceError               the environment: a service is unreachable, a disk is full; exit code 3
│   ├── AccessDenied           a service does not accept this process's token, or got none
│   ├── JobSetApart            a service's data of this job is damaged, so the service has quarantined the job
│   └── LogUnavailable         the log server cannot be reached or has closed itself
│       └── LogInterrupted     the wait was ended, because a new generation is being formed
├── Fenced                     this process belongs to an older generation and must stop
├── NonFiniteLoss              a loss is not finite, and the trainer's settings end the job; exit code 1
├── JobFailed                  the job cannot continue, for another rank's reason; exit code 1
├── MembersLost                an agreement was reached without members that were lost (`swift_ft.Communicator.agree`)
├── JoinRefused                the coordinator refuses this rank (fingerprint, configuration, holder)
├── LogError
│   ├── StaleGeneration        an append under a fenced generation
│   ├── RecordCorrupt          a checksum does not match: never replayed
│   ├── RecordTrimmed          the step was trimmed: a checkpoint covers it
│   ├── RecordInvalid          checksums match, but the content is invalid (version, codec, size, shape)
│   ├── RecordMissing          the record is not in the log and will never be written
│   └── SequenceConflict       the same key or sequence, with other bytes
└── ReplayRefused              replay would not be exact: a regenerated send differs, or one of the LogErrors
    ├── Divergence             computed bits differ from the logged ones
    └── ReplicaDiffers         replicas hold different states, or what arrived is not what was sent
"""


class SwiftError(Exception):
    """Root of all errors that swift raises for its users."""

    exit_code = 3


class UsageError(SwiftError):
    """Bad input. The message is one line that says what to do."""

    exit_code = 2


class UnknownJob(UsageError):
    """The log server or the coordinator does not know the job."""


class ServiceError(SwiftError):
    """A service or the machine cannot do what was asked."""


class AccessDenied(ServiceError):
    """A service does not accept this process's token: it is missing, has expired, or is for another job, role or
    generation."""


class JobSetApart(ServiceError):
    """A service's data of the job is damaged. The service has quarantined the job; other jobs are served."""


class LogUnavailable(ServiceError):
    """The log server cannot be reached, or it has closed itself (read-only disk, failed sync)."""


class LogInterrupted(LogUnavailable):
    """A wait for the log was ended, because a new generation is being formed."""


class Fenced(SwiftError):
    """This process belongs to an older generation. Another process holds its rank."""


class NonFiniteLoss(SwiftError):
    """A loss is nan or infinite (`SessionConfig.non_finite_loss` is "fail")."""

    exit_code = 1


class JobFailed(SwiftError):
    """The job cannot continue; the message is the coordinator's reason."""

    exit_code = 1


class MembersLost(SwiftError):
    """Members of a communicator were lost, and not all remaining members had acknowledged it. All members get this
    error."""

    def __init__(self, value: int, ranks: tuple[int, ...]) -> None:
        super().__init__(f"lost: ranks {', '.join(map(str, ranks))}; agreed without them: {value}")
        self.value = value
        """Value that the remaining members agreed on."""
        self.ranks = ranks
        """Ranks of the lost members in this generation."""


class JoinRefused(SwiftError):
    """The coordinator refuses this rank. The message names both values that differ."""

    exit_code = 2


class LogError(SwiftError):
    """The log cannot return what was requested."""


class StaleGeneration(LogError):
    """A record was appended under a generation that was fenced."""


class RecordCorrupt(LogError):
    """A checksum does not match. The message names the record."""


class RecordTrimmed(LogError):
    """The requested step has been trimmed. The message names the oldest step that is available."""


class RecordInvalid(LogError):
    """A record's checksums match, but its version is unknown, or its sizes and shape contradict each other."""


class RecordMissing(LogError):
    """The record is not in the log."""


class SequenceConflict(LogError):
    """The log has a record with the same key or sequence number and other bytes."""


class ReplayRefused(SwiftError):
    """A replay would not be exact, so it is refused. The checkpoint is restored instead."""


class Divergence(ReplayRefused):
    """The result of a repeated computation differs from the logged one."""


class ReplicaDiffers(ReplayRefused):
    """Replicas hold different states, or a state was damaged in transfer. The message names the ranks and a path."""

    def __init__(self, message: str, *, damaged: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged
        """True if the state was damaged in transfer. The replicas themselves may be equal."""


def is_difference(error: BaseException) -> bool:
    """Returns whether the error means that a repeated computation had another result. Damaged or missing data do not
    count."""
    if isinstance(error, ReplicaDiffers):
        return not error.damaged
    return isinstance(error, Divergence | SequenceConflict)
