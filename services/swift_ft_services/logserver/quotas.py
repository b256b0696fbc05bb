"""Space accounting: bytes kept here per job and server, their limits, alarms and refusals. No I/O, no clock of its own.

Each account (one for the server, one for every job) has three marks below its limit::

    0 ........ low ........ high ....... taken again ....... limit
               HIGH ends    HIGH begins  FULL ends           FULL begins

HIGH is reported, and makes a coordinator ask for an early checkpoint, whose trim frees space. The room between high and
limit is for what is logged until then. FULL refuses new records. The limit is the quota, or the disk's free space plus
what is kept if that is less.

If a write finds the disk full, that overrides all accounting::

    OPEN ──a write found no space──> FULL ──space is back, and a while has passed──> TRYING
      ^                                ^                                               │
      └── a write went well, or none was tried for a while ───────────────────────────┤
                                       └── no space again: the next while is longer ──┘
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from swift_ft.log.protocol import Reason
from swift_ft_services.logserver.core import LogCore, Refusal

HIGH_WATER = 0.8
LOW_WATER = 0.6
_TAKEN_AGAIN = 0.9
_PAUSE_S = 1.0
_PAUSE_S_MAX = 16.0
_TRIAL_S = 2.0
_FREE_BYTES_LEAST = 1 << 20


class Alarm(IntEnum):
    """Alarm of an account; the same values as in the protocol."""

    NONE = 0
    HIGH = 1
    FULL = 2


class DiskState(IntEnum):
    OPEN = 0
    TRYING = 1
    FULL = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceConfig:
    """Quotas and alarm marks. A quota of 0 means none."""

    quota_bytes: int = 0
    job_quota_bytes: int = 0
    high_water: float = HIGH_WATER
    """Fraction of a limit at which the alarm begins."""
    low_water: float = LOW_WATER
    """Fraction below which it ends. After the disk was full, writes are tried again once the space between the marks
    "taken again" and "limit" is free."""


@dataclass(frozen=True, slots=True)
class Notice:
    event: str
    fields: Mapping[str, object]


@dataclass(slots=True)
class Account:
    """Space of a job or of the server. used <= limit, except after one record that found room, or if the disk
    shrank."""

    name: str
    quota_bytes: int
    used_bytes: int = 0
    limit_bytes: int = 0
    """0: unknown."""
    alarm: Alarm = Alarm.NONE
    told: Alarm = Alarm.NONE

    def part(self) -> float:
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0

    def words(self) -> str:
        return f"{self.name} keeps {self.used_bytes} bytes of the {self.limit_bytes} that it may"


@dataclass(slots=True)
class Space:
    """(holding the server's lock) All accounts. Methods return the events to emit."""

    config: SpaceConfig
    server: Account = field(init=False)
    jobs: dict[str, Account] = field(default_factory=dict)
    free_bytes: int | None = None
    """Free space on the disk when last checked; None: unknown."""
    disk: DiskState = DiskState.OPEN
    disk_reason: str = ""
    """Why a write found the disk full; empty while writes succeed."""
    _until: float = 0.0
    _pause_s: float = _PAUSE_S

    def __post_init__(self) -> None:
        quota = self.config.quota_bytes
        self.server = Account("the server", quota, limit_bytes=quota)

    # -- bytes that are kept ---------------------------------------------------------------------------------

    def job(self, name: str) -> Account:
        account = self.jobs.get(name)
        if account is None:
            account = self.jobs[name] = self._account(name)
        return account

    def _account(self, name: str) -> Account:
        quota = self.config.job_quota_bytes
        return Account(f"job {name}", quota, limit_bytes=quota)

    def refuses(self, job_name: str, frame_bytes: int) -> Refusal | None:
        """Returns a refusal if there is no room for a new record of this size (0: for a new writer)."""
        if self.disk is DiskState.FULL:
            return Refusal(Reason.FULL, self.disk_reason)
        for account in (self.jobs.get(job_name) or self._account(job_name), self.server):
            over = account.used_bytes + frame_bytes > account.quota_bytes
            if account.quota_bytes and (over or account.alarm is Alarm.FULL):
                account.alarm = Alarm.FULL
                return Refusal(Reason.OVER_QUOTA, f"{account.words()}; a checkpoint lets it be trimmed")
        return None

    def added(self, job_name: str, frame_bytes: int) -> None:
        self.job(job_name).used_bytes += frame_bytes
        self.server.used_bytes += frame_bytes

    def recount(self, core: LogCore) -> None:
        """Recounts after records were dropped."""
        for name in [name for name in self.jobs if name not in core.jobs]:
            del self.jobs[name]
        for name, job in core.jobs.items():
            self.job(name).used_bytes = job.tally.hot_bytes
        self.server.used_bytes = sum(account.used_bytes for account in self.jobs.values())

    # -- the disk -------------------------------------------------------------------------------------

    def disk_is_full(self, reason: str, now: float) -> list[Notice]:
        """Records that a write found no space."""
        if self.disk is DiskState.TRYING:
            self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
        news = [Notice("disk_full", {"reason": reason})] if self.disk is DiskState.OPEN else []
        self.disk, self.disk_reason, self._until = DiskState.FULL, reason, now + self._pause_s
        return news

    def disk_took(self) -> list[Notice]:
        """Records that a write succeeded."""
        if self.disk is DiskState.OPEN:
            return []
        self.disk, self.disk_reason, self._pause_s = DiskState.OPEN, "", _PAUSE_S
        return [Notice("disk_has_space", {})]

    def files_removed(self, now: float) -> None:
        """Ends the waiting time: files were removed, so a write may be tried."""
        self._until = min(self._until, now)

    def observe(self, free_bytes: int | None, now: float) -> list[Notice]:
        """Called periodically with the free disk space. Alarms begin and end here."""
        self.free_bytes = free_bytes
        server = self.server
        room = server.used_bytes + free_bytes if free_bytes is not None else 0
        server.limit_bytes = min((x for x in (server.quota_bytes, room) if x), default=0)
        if self.disk is DiskState.FULL and now >= self._until and self._space_is_back():
            self.disk, self._until = DiskState.TRYING, now + _TRIAL_S
        elif self.disk is DiskState.TRYING and now >= self._until:
            return [*self.disk_took(), *self._alarms()]
        return self._alarms()

    def _space_is_back(self) -> bool:
        free = self.free_bytes
        if free is None:
            return True
        return free >= max(_FREE_BYTES_LEAST, round((1 - _TAKEN_AGAIN) * (self.server.used_bytes + free)))

    def _alarms(self) -> list[Notice]:
        news = []
        for name, account in [("", self.server), *self.jobs.items()]:
            account.alarm = self._alarm_of(account)
            if account.told is not account.alarm:
                account.told = account.alarm
                job = {"job": name} if name else {}
                fields = {"alarm": account.alarm.name, "reason": account.words(), **job}
                news.append(Notice("space_alarm", fields))
        return news

    def _alarm_of(self, account: Account) -> Alarm:
        part = account.part()
        if account.alarm is Alarm.FULL and account.used_bytes > _TAKEN_AGAIN * account.quota_bytes:
            return Alarm.FULL
        if part >= (self.config.low_water if account.alarm else self.config.high_water):
            return Alarm.HIGH
        return Alarm.NONE

    # -- reported state ---------------------------------------------------------------------------------

    @property
    def takes_appends(self) -> bool:
        """True unless the server accepts no appends of any job."""
        return self.disk is DiskState.OPEN and self.server.alarm is not Alarm.FULL

    def wants_checkpoint(self, job_name: str) -> str:
        """Returns why a trim of this job would help now; empty if there is no need."""
        account = self.job(job_name)
        if not account.used_bytes:
            return ""
        if self.disk is DiskState.FULL:
            return f"its disk is full: {self.disk_reason}"
        for full in (account, self.server):
            if full.alarm and full.part() >= self.config.high_water:
                return full.words()
        return ""

    def to_move(self) -> list[str]:
        """Returns the jobs whose records should go to the cold tier, before an alarm begins, the largest first; none if
        there is room."""
        low = self.config.low_water
        over = [name for name, account in self.jobs.items() if account.part() >= low]
        if self.server.part() >= low or self.disk is not DiskState.OPEN:
            over = list(self.jobs)
        return sorted(over, key=lambda name: self.jobs[name].used_bytes, reverse=True)

    def high_mark_bytes(self) -> int:
        return round(self.config.high_water * self.server.limit_bytes)

    @property
    def server_alarm(self) -> Alarm:
        """The server's alarm: FULL also while the disk is, whatever the quota says."""
        return self.server.alarm if self.disk is DiskState.OPEN else Alarm.FULL
