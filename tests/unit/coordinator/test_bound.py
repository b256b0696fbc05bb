"""Whatever ranks do again and again, a job that makes no progress ends within a bound, and says why.

Random histories; a coordinator may die in between. What is counted here is counted by this file itself: generations
since all ranks had come to a new version, less the deaths from outside, which a launcher counts.
"""

import hypothesis.strategies as st
from hypothesis import example, given, settings

from swift_ft_services.coordinator.endings import EXITS_MAX, REFUSALS_MAX
from swift_ft_services.coordinator.job_record import JobRow, State
from tests.unit.coordinator.transcript import World

WORLD = 2
RANKS = st.integers(0, WORLD - 1)
ACTIONS = st.one_of(
    st.tuples(st.just("refuse"), RANKS),
    st.tuples(st.just("refuse early"), RANKS),
    st.tuples(st.just("broken connection"), RANKS),
    st.tuples(st.just("other bytes"), RANKS),
    st.tuples(st.just("ends by itself"), RANKS),
    st.tuples(st.just("interrupts itself"), RANKS),
    st.tuples(st.just("killed"), RANKS),
    st.tuples(st.just("steps"), st.integers(0, 2)),
    st.tuples(st.just("coordinator dies"), RANKS),
)


class Job(World):
    """Two ranks that go along with whatever the coordinator wants."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0  # of all ranks; each is at this one
        self.best = 0
        self.lives = 0
        self.deaths = 0
        self.since = 0
        """The generation in which all ranks had come to a new version."""
        self.exits = dict.fromkeys(range(WORLD), 0)
        self.said: list[str] = []

    @property
    def row(self) -> JobRow:
        assert self.job is not None
        return self.job.row

    @property
    def over(self) -> bool:
        return self.job is not None and self.row.state in (State.FAILED, State.FINISHED)

    def tell(self, line: str) -> None:
        self.said += self.run(line)

    def join(self, rank: int) -> None:
        self.lives += 1
        self.tell(f"join rank={rank} world={WORLD} inc=life{self.lives}")

    def go_on(self) -> None:
        """Until it runs, or is over. Each round everybody says what may be wanted; the coordinator refuses the rest."""
        for _ in range(12):
            if self.over or (self.job is not None and self.row.state is State.RUNNING):
                return
            generation = 1 if self.job is None else self.row.generation
            for rank in range(WORLD):
                if self.job is None or rank not in self.row.holders:
                    self.join(rank)
            self.tell(f"fenced generation={generation}")
            for rank in range(WORLD):
                self.tell(f"report rank={rank} generation={generation} version={self.version}")
            self.tell(f"inventory generation={generation}")
            self.tell(f"reset generation={generation}")
            if self.row.plan is not None:
                self.version = self.row.plan.target_version
            for rank in range(WORLD):
                self.tell(f"durable rank={rank} version=0 generation={generation}")
                self.tell(f"ready rank={rank} generation={generation} version={self.version} of={WORLD}")
        raise AssertionError(f"it neither runs nor ends: {self.row.state}\n" + "\n".join(self.said[-30:]))

    def do(self, what: str, number: int) -> None:
        generation = self.row.generation
        match what:
            case "refuse":
                self.tell(f'refuse rank={number} generation={generation} reason="cannot load"')
            case "other bytes":
                self.tell(f'refuse rank={number} generation={generation} reason="other bytes" differs=yes')
            case "broken connection":
                self.tell(f'suspect rank={number} generation={generation} reason="reset by peer" again=yes')
            case "refuse early":  # while the coordinator is busy with the last one
                self.tell(f'refuse rank={number} generation={generation} reason="one"')
                self.tell(f'refuse rank={number} generation={generation + 1} reason="two"')
            case "ends by itself" | "interrupts itself":  # a KeyboardInterrupt that its script raises
                self.exits[number] += 1
                self.tell(f"exited rank={number} code={1 if what == 'ends by itself' else -2}")
                self.go_on()
            case "killed":
                self.deaths += 1
                self.tell(f"exited rank={number} code=-9")
                self.go_on()
            case "coordinator dies":
                self.tell("crash")
            case "steps":
                self.version += number
                for rank in range(WORLD):
                    self.tell(f"beat rank={rank} version={self.version}")

    def check(self) -> None:
        if self.row.state is State.RUNNING and self.version > self.best:
            self.best, self.since, self.deaths = self.version, self.row.generation, 0
            self.exits = dict.fromkeys(range(WORLD), 0)
        by_themselves = sum(self.exits.values())
        assert self.row.generation - self.since <= REFUSALS_MAX + self.deaths + by_themselves + 1
        for rank, times in self.exits.items():
            assert times <= EXITS_MAX
            if times == EXITS_MAX:
                assert self.over, f"rank {rank} has ended by itself {times} times"


@settings(deadline=None, max_examples=150)
@given(actions=st.lists(ACTIONS, max_size=60))
@example(actions=[("refuse", 0)] * (REFUSALS_MAX + 1))
@example(actions=[("coordinator dies", 0), ("refuse", 0)] * (REFUSALS_MAX + 1))
@example(actions=[("refuse", 0), ("broken connection", 1), ("killed", 0)] * REFUSALS_MAX)
@example(actions=[("ends by itself", 1), ("refuse", 0)] * EXITS_MAX)
@example(actions=[("interrupts itself", 1)] * EXITS_MAX)
def test_a_job_without_progress_ends_within_a_bound(actions: list[tuple[str, int]]) -> None:
    job = Job()
    job.join(0)
    job.go_on()
    for what, number in actions:
        job.do(what, number)
        if not job.over:
            job.go_on()
        job.check()
        if job.over:
            assert job.row.reason, "it says why"
            break


def test_the_end_says_what_had_made_the_bits_differ() -> None:
    job = Job()
    job.join(0)
    job.go_on()
    job.row.inexact_since, job.row.inexact_reason = 3, "rank 0: ema of the script began anew: register it"
    while not job.over:
        job.do("other bytes", 1)
        job.go_on()
    assert job.row.reason.startswith("rank 1 refused: other bytes (no. 9 in a row ")
    assert job.row.reason.endswith(
        "; not exact since version 3: rank 0: ema of the script began anew: register it"
    )
