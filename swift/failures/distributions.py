"""Failures that a seed draws: ``every=exponential,mtbf=40,until=200,seed=7``.

Every host is a renewal process of its own: the time between two of its failures is drawn again and again, from a host
that is new at the start. ``mtbf`` is the mean of that time. With N hosts that are alike, a job sees a failure every
mtbf / N.

    exponential    no memory: a host that has just failed is as good as any other
    weibull        shape below 1: who has failed is likely to fail soon again (Titan's GPUs: 0.55, its memory: 0.92)
    lemons=K       K hosts, drawn by the seed, fail ``lemon`` times as often (10, if it is not given)
    together=P     with that probability all ranks of the host fail at once; else one of them, drawn

Each host draws from a generator of its own. So a longer run, or one with more hosts, has the same failures and more.

Times are steps, unless ``unit=seconds`` is given. A step is a place in the computation, which is the same in every run:
what fails there can be repeated bit for bit. A second is not: the same time finds another run at another place.
"""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from swift.errors import UsageError
from swift.failures.grammar import KINDS, MICROBATCH_PHASES, Fault, Fields, RankFault, lasting, seconds_text

FAILURES_MAX = 500
"""Of one schedule: ranks are told of them in their environment."""
LAWS = ("exponential", "weibull")
UNITS = ("steps", "seconds")
DRAWN_PHASES = ("forward", "backward", "optimizer", "idle")
"""Of ``phase=any``."""
_PHASES = (*DRAWN_PHASES, "any")
_SEED = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Which ranks are on which host: `per_host` at a time, in order."""

    ranks: int
    per_host: int = 1

    @property
    def count(self) -> int:
        return -(-self.ranks // self.per_host)

    def ranks_of(self, host: int) -> range:
        return range(host * self.per_host, min((host + 1) * self.per_host, self.ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class What:
    """What happens to a host that fails, if nothing else says so: the same keys in every kind of schedule."""

    unit: str = "steps"
    kind: str = "kill"
    for_s: float | None = None
    factor: float = 1.0
    link: str = ""
    phase: str = "idle"
    microbatches: int = 1
    """``phase=any`` draws one of so many."""

    KEYS = ("unit", "kind", "for", "factor", "link", "phase", "microbatches")

    @classmethod
    def of(cls, given: Fields, *, mixed: bool = False) -> "What":
        """`mixed`: see `lasting`. Raises UsageError."""
        kind = given.one_of("kind", KINDS, "kill")
        for_s, factor, link = lasting(given, kind, mixed=mixed)
        return cls(
            unit=given.one_of("unit", UNITS, "steps"),
            kind=kind,
            for_s=for_s,
            factor=factor,
            link=link,
            phase=given.one_of("phase", _PHASES, "idle"),
            microbatches=given.number("microbatches") if "microbatches" in given else 1,
        )

    def words(self) -> list[str]:
        """As `of` reads them."""
        words = [f"{name}={value}" for name, value in self._words().items() if value is not None]
        return words if self.microbatches == 1 else [*words, f"microbatches={self.microbatches}"]

    def _words(self) -> dict[str, str | None]:
        return {
            "unit": None if self.unit == "steps" else self.unit,
            "kind": None if self.kind == "kill" else self.kind,
            "for": None if self.for_s is None else seconds_text(self.for_s),
            "factor": None if self.kind != "slow" and self.factor == 1.0 else seconds_text(self.factor),
            "link": self.link or None,
            "phase": None if self.phase == "idle" else self.phase,
        }

    def hits(self, ranks: Sequence[int], at: float, generator: random.Random) -> Iterator[RankFault]:
        """The failures of these ranks of one host at that time."""
        lasts = None if self.kind == "kill" else self.for_s
        fields_: dict[str, Any] = {"kind": self.kind, "for_s": lasts}
        if self.kind == "slow":
            fields_["factor"] = self.factor
        if self.kind == "network":
            fields_["link"] = self.link
        phase = generator.choice(DRAWN_PHASES) if self.phase == "any" else self.phase
        microbatch = generator.randrange(self.microbatches) if phase in MICROBATCH_PHASES else 0
        # A machine has one network.
        for rank in ranks[:1] if self.kind == "network" else ranks:
            if self.unit == "seconds":
                yield RankFault(rank=rank, at_s=round(at, 3), **fields_)
            else:
                yield RankFault(rank=rank, step=int(at), phase=phase, microbatch=microbatch, **fields_)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A distribution, as it was given."""

    law: str
    mtbf: float
    """Of one host, in steps or seconds."""
    shape: float = 1.0
    seed: int = 0
    until: float | None = None
    count: int | None = None
    lemons: int = 0
    lemon: float = 10.0
    together: float = 0.0
    per_host: int | None = None
    """None: as the job's machines are."""
    what: What = field(default_factory=What)

    KEYS = ("every", "mtbf", "shape", "seed", "until", "count", "lemons", "lemon", "together", "per_host")

    @classmethod
    def of(cls, given: Fields) -> "Drawn":
        """Raises UsageError."""
        given.only(*cls.KEYS, *What.KEYS)
        law = given.one_of("every", LAWS, "")
        if (law == "weibull") != ("shape" in given):
            wrong = "weibull needs shape=K" if law == "weibull" else "shape needs every=weibull"
            raise given.error(f"{wrong} (below 1: failures come in bursts)")
        mtbf = given.decimal("mtbf", 0.001, 1e9)
        if mtbf is None:
            raise given.error("mtbf is missing: the mean time between two failures of one host")
        until, count = given.decimal("until", 0.0, 1e9), given.number_or_none("count")
        if until is None and count is None:
            raise given.error("it has no end: give until=STEP, or count=N failures")
        if count is not None and not 1 <= count <= FAILURES_MAX:
            raise given.error(f"count must be 1 to {FAILURES_MAX}")
        if given.number_or_none("per_host") == 0:
            raise given.error("per_host must be at least 1")
        lemons, lemon = given.number_or_none("lemons") or 0, given.decimal("lemon", 1.0, 1e6)
        if lemon is not None and not lemons:
            raise given.error("lemon needs lemons=K: so many hosts fail so much more often")
        return cls(
            law=law,
            mtbf=mtbf,
            shape=given.decimal("shape", 0.05, 20.0) or 1.0,
            seed=given.number_or_none("seed") or 0,
            until=until,
            count=count,
            lemons=lemons,
            lemon=10.0 if lemon is None else lemon,
            together=given.decimal("together", 0.0, 1.0) or 0.0,
            per_host=given.number_or_none("per_host"),
            what=What.of(given),
        )

    def __str__(self) -> str:
        words = [f"every={self.law}", f"mtbf={seconds_text(self.mtbf)}"]
        if self.law == "weibull":
            words.append(f"shape={seconds_text(self.shape)}")
        unsaid = {f.name: f.default for f in fields(self)}
        for name in ("seed", "until", "count", "lemons", "lemon", "together", "per_host"):
            value = getattr(self, name)
            if value != unsaid[name]:
                words.append(f"{name}={seconds_text(value)}")
        return ",".join([*words, *self.what.words()])

    def faults(self, hosts: Hosts, flag: str = "--failures") -> list[Fault]:
        """The failures of a job with these hosts, by time. UsageError: too many, or there are not so many hosts."""
        if self.lemons > hosts.count:
            raise UsageError(f"{flag} {self}: lemons must be 0 to {hosts.count}, the hosts of this job")
        lemons = random.Random(f"lemons {self.seed}").sample(range(hosts.count), self.lemons)
        found: list[Fault] = []
        for number, (at, host) in enumerate(
            heapq.merge(*(self._times(host, host in lemons) for host in range(hosts.count)))
        ):
            if number == self.count:
                break
            if len(found) >= FAILURES_MAX:
                raise UsageError(
                    f"{flag} {self}: more than {FAILURES_MAX} failures: lower until, or raise mtbf"
                )
            generator = random.Random(f"hit {self.seed} {host} {at!r}")
            there = hosts.ranks_of(host)
            all_of_it = generator.random() < self.together
            found += self.what.hits(there if all_of_it else [generator.choice(there)], at, generator)
        return found

    def _times(self, host: int, is_lemon: bool) -> Iterator[tuple[float, int]]:
        """When that host fails, and its number; at most one more than a schedule may have."""
        generator = random.Random(f"host {self.seed} {host}")
        mtbf = self.mtbf / (self.lemon if is_lemon else 1.0)
        scale, at = mtbf / math.gamma(1.0 + 1.0 / self.shape), 0.0
        for _ in range(FAILURES_MAX + 1):
            at += scale * (-math.log(1.0 - generator.random())) ** (1.0 / self.shape)
            if at >= (math.inf if self.until is None else self.until) or at >= _SEED:
                return
            yield at, host
