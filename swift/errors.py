"""Every error that swift raises for its users.

SwiftError
├── UsageError                 bad input: says what to do; exit code 2
│   └── UnknownJob             the log server, or the coordinator, knows no such job
├── ServiceError               the environment: a service is unreachable, a disk is full; exit code 3
│   ├── AccessDenied           a service does not take this process's token, or has none to take
│   ├── JobSetApart            a service does nothing for this job: what it keeps of it is damaged
│   └── LogUnavailable         the log server cannot be reached or has closed itself
│       └── LogInterrupted     the wait was called off: a new generation is being formed
├── Fenced                     this process belongs to an older generation and must stop
├── NonFiniteLoss              a loss is not finite, and the trainer chose that this ends the job; exit code 1
├── JobFailed                  the job cannot go on, for another rank's reason; exit code 1
├── JoinRefused                the coordinator will not have this rank (fingerprint, configuration, holder)
├── LogError
│   ├── StaleGeneration        an append under a fenced generation
│   ├── RecordCorrupt          a checksum does not match: never replayed
│   ├── RecordTrimmed          the step was trimmed: a checkpoint covers it
│   ├── RecordInvalid          checksums match, but it makes no sense here (version, codec, size, shape)
│   ├── RecordMissing          the record is not in the log and nobody will write it
│   └── SequenceConflict       same key or sequence with other bytes
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
    """The log server, or the coordinator, knows no such job."""


class ServiceError(SwiftError):
    """A service or the machine is not able to do it."""


class AccessDenied(ServiceError):
    """A service does not take this process's token: missing, expired, or of another job, role or generation."""


class JobSetApart(ServiceError):
    """What a service keeps of the job is damaged: it does nothing for it, and serves the others."""


class LogUnavailable(ServiceError):
    """The log server cannot be reached, or it has closed itself (read-only disk, failed sync)."""


class LogInterrupted(LogUnavailable):
    """Waiting for the log was called off, because a new generation is being formed."""


class Fenced(SwiftError):
    """This process belongs to an older generation; somebody else holds its rank."""


class NonFiniteLoss(SwiftError):
    """A loss is nan or infinite (`SessionConfig.non_finite_loss` is "fail")."""

    exit_code = 1


class JobFailed(SwiftError):
    """The job cannot go on; the message is the coordinator's reason."""

    exit_code = 1


class JoinRefused(SwiftError):
    """The coordinator will not have this rank. The message names both values that differ."""

    exit_code = 2


class LogError(SwiftError):
    """The log cannot serve what was asked."""


class StaleGeneration(LogError):
    """An append under a generation that was fenced."""


class RecordCorrupt(LogError):
    """A checksum does not match. The message names the record."""


class RecordTrimmed(LogError):
    """The step asked for was trimmed. The message names the oldest step that is there."""


class RecordInvalid(LogError):
    """Well-formed by its checksums, but of an unknown version, or its sizes and shape contradict each other."""


class RecordMissing(LogError):
    """The record is not in the log."""


class SequenceConflict(LogError):
    """The same key or sequence number came with other bytes."""


class ReplayRefused(SwiftError):
    """Replay would not be exact, so it is not done; the checkpoint stands behind."""


class Divergence(ReplayRefused):
    """Bits that were computed again differ from the logged ones."""


class ReplicaDiffers(ReplayRefused):
    """Replicas hold different states, or what arrived is not what was sent. Names the ranks and a path."""

    def __init__(self, message: str, *, damaged: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged
        """It was damaged on its way, which says nothing about the replicas."""


def is_difference(error: BaseException) -> bool:
    """Something that was done again came out different. (What is damaged, or missing, is another matter.)"""
    if isinstance(error, ReplicaDiffers):
        return not error.damaged
    return isinstance(error, Divergence | SequenceConflict)
