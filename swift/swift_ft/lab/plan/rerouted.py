"""What a job does with losses of which every stage keeps a replica: its throughput by adaptive pipelines.

For each number of losses the worst place is taken: the stage whose loss makes the longest step, all losses there, as
far as one replica is left. Throughput is that of the step without losses, with whole backwards and 1F1B's memory,
over that of the plan; both do the whole batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.planner.canonical_plans import Counts, JobShape, Plans, even, move, one_f_one_b
from swift_ft.planner.schedule import ACTIONS_MAX, Action, Costs, Step, Timed, Work, needs, period, plan_step

# The shortest step of a small work, by an integer program: what the list scheduler is judged by.
#
# Time has whole units. For each action and each unit there is a variable: whether it has begun by then. So what waits
# for what is a comparison of two variables, and the sums over a worker say what it does and holds at a time. Of
# microbatches that take the same way, the first one goes first everywhere; others are as good, by another name.

VARIABLES_MAX = 30_000
_FORWARD = "F"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """What is known of the shortest step."""

    step: Step
    """The shortest that was found."""
    least: float
    """No step is shorter."""

    @property
    def proven(self) -> bool:
        return self.step.length <= self.least


def exact_step(work: Work, listed: Step, *, limit_s: float) -> Exact:
    """Looks for a shorter step than the one that is there, for so many seconds at most.

    Raises UsageError without highspy, for times that are not whole, and for too large a work.
    """
    try:
        import highspy
    except ModuleNotFoundError:
        raise UsageError(
            "the exact plan needs highspy, which is missing here: pip install 'swift-ft[lab]'"
        ) from None
    costs = work.costs
    times = [costs.transfer, *(costs.of(action.kind, action.stage) for _, action in work.actions())]
    if any(time != int(time) for time in times) or min(times[1:]) < 1:
        raise UsageError("the exact plan needs times that are whole numbers, 1 or more: choose another unit")
    least = math.ceil(work.bound() - 1e-9)
    if listed.length <= least:
        return Exact(step=listed, least=least)
    variables = len(times) * int(listed.length)
    if variables > VARIABLES_MAX:
        raise UsageError(
            f"the exact plan of this work has {variables} variables, and takes {VARIABLES_MAX} at most: "
            "give fewer stages, replicas or microbatches"
        )
    return _Program(work, int(listed.length)).solve(highspy, listed, least, limit_s)


class _Program:
    """Of a step that is over within `horizon`."""

    def __init__(self, work: Work, horizon: int) -> None:
        self._work = work
        self._horizon = horizon
        self._owner = {action: worker for worker, action in work.actions()}
        self._takes = {action: int(work.costs.of(action.kind, action.stage)) for action in self._owner}
        self._number = {action: n for n, action in enumerate(self._owner)}
        self.variables = (len(self._number) + 1) * horizon
        self._rows: list[tuple[list[int], list[float], float]] = []
        """(variables, factors, at most)."""
        self._over = len(self._number)
        self._compare()
        self._share()

    def _at(self, number: int, time: int) -> int | None:
        """The variable; None: it cannot have begun."""
        return None if time < 0 else number * self._horizon + min(time, self._horizon - 1)

    def _after(self, behind: int, before: int, lag: int) -> None:
        """What is behind begins `lag` later, or more."""
        for time in range(self._horizon):
            later, sooner = self._at(behind, time), self._at(before, time - lag)
            assert later is not None
            if sooner is None:
                self._rows.append(([later], [1.0], 0.0))
            else:
                self._rows.append(([later, sooner], [1.0, -1.0], 0.0))

    def _compare(self) -> None:
        work = self._work
        for action, number in self._number.items():
            for time in range(self._horizon - 1):
                sooner, later = self._at(number, time), self._at(number, time + 1)
                assert sooner is not None
                assert later is not None
                self._rows.append(([sooner, later], [1.0, -1.0], 0.0))
            for needed in needs(work, action):
                message = int(work.costs.transfer) if self._owner[needed] != self._owner[action] else 0
                self._after(number, self._number[needed], self._takes[needed] + message)
            self._after(self._over, number, self._takes[action])
        for time in range(self._horizon - 1):
            sooner, later = self._at(self._over, time), self._at(self._over, time + 1)
            assert sooner is not None
            assert later is not None
            self._rows.append(([sooner, later], [1.0, -1.0], 0.0))
        alike: dict[tuple[int, ...], tuple[int, int]] = {}
        for origin in range(work.origins):
            for microbatch in range(work.microbatches):
                way = tuple(work.owners[stage, origin][microbatch] for stage in range(work.stages))
                if way in alike:
                    for kind in work.kinds():
                        for stage in range(work.stages):
                            first = Action(kind, stage, *alike[way])
                            self._after(
                                self._number[Action(kind, stage, origin, microbatch)],
                                self._number[first],
                                self._takes[first],
                            )
                alike[way] = origin, microbatch

    def _share(self) -> None:
        """A worker does one thing at a time, and holds so much."""
        for worker in self._work.stages_of():
            own = [action for action, owner in self._owner.items() if owner == worker]
            for time in range(self._horizon):
                self._sum([(action, time, self._takes[action]) for action in own], 1.0)
                if self._work.cap is not None:
                    forwards = [(action, time, None) for action in own if action.kind == _FORWARD]
                    frees = [
                        (action, time - self._takes[action])
                        for action in own
                        if action.kind == self._work.adds()
                    ]
                    self._sum(forwards, float(self._work.cap[worker]), frees)

    def _sum(
        self,
        runs: Sequence[tuple[Action, int, int | None]],
        most: float,
        less: Sequence[tuple[Action, int]] = (),
    ) -> None:
        variables, factors = [], []
        for action, time, takes in runs:
            begun = self._at(self._number[action], time)
            assert begun is not None
            variables.append(begun)
            factors.append(1.0)
            over = None if takes is None else self._at(self._number[action], time - takes)
            if over is not None:
                variables.append(over)
                factors.append(-1.0)
        for action, time in less:
            freed = self._at(self._number[action], time)
            if freed is not None:
                variables.append(freed)
                factors.append(-1.0)
        self._rows.append((variables, factors, most))

    def solve(self, highspy: Any, listed: Step, least: int, limit_s: float) -> Exact:
        """The step that was there, or a shorter one."""
        horizon, over = self._horizon, self._over * self._horizon
        # Without callbacks, which nobody uses here: to set them, it prints its name on stdout.
        solver = type("Quiet", (highspy.Highs,), {"enableCallbacks": lambda _: None})()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("time_limit", limit_s)
        solver.setOptionValue("threads", 1)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.variables, len(self._rows)
        # The more units in which all is over, the shorter. In the last one all has begun.
        model.col_cost_ = [-1.0 if column >= over else 0.0 for column in range(self.variables)]
        model.col_lower_ = [
            1.0 if column < over and column % horizon == horizon - 1 else 0.0
            for column in range(self.variables)
        ]
        model.col_upper_ = [
            0.0 if column >= over and column - over < least else 1.0 for column in range(self.variables)
        ]
        model.row_lower_ = [-highspy.kHighsInf] * len(self._rows)
        model.row_upper_ = [most for _, _, most in self._rows]
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        starts, indices, values = [0], [], []
        for variables, factors, _ in self._rows:
            indices += variables
            values += factors
            starts.append(len(indices))
        matrix.start_, matrix.index_, matrix.value_ = starts, indices, values
        model.integrality_ = [highspy.HighsVarType.kInteger] * self.variables
        solver.passModel(model)
        solver.run()
        found = solver.getInfo()
        # No unit within the horizon: as long as the one that was there.
        proven = least
        if math.isfinite(found.mip_dual_bound):
            proven = max(least, min(horizon, horizon + math.ceil(found.mip_dual_bound - 1e-6)))
        if not -horizon <= found.objective_function_value < -0.5:
            return Exact(step=listed, least=proven)
        return Exact(step=self._step(solver.getSolution().col_value), least=proven)

    def _step(self, values: list[float]) -> Step:
        slots: dict[int, list[Timed]] = {worker: [] for worker in self._work.stages_of()}
        for action, number in self._number.items():
            begun = values[number * self._horizon : (number + 1) * self._horizon]
            begin = float(sum(1 for value in begun if value < 0.5))
            slots[self._owner[action]].append(Timed(begin, begin + self._takes[action], action))
        return Step(slots={worker: sorted(row) for worker, row in slots.items()})


STAGES_MAX, ORIGINS_MAX, MICROBATCHES_MAX, CELLS_MAX = 4096, 1024, 65536, 1_000_000
MOVED_CELLS_MAX = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """What it takes to move a loss to another stage: a rank from there gets the state of the lost one."""

    cost: float
    """Of copying a rank's state, in the unit of the times."""
    steps: float
    """Until a repair is expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the command line says, checked."""

    stages: int
    replicas: int
    microbatches: int
    """Of each replica."""
    costs: Costs
    cap_factor: float
    """Times the activations of 1F1B."""
    losses: int
    moves: Moves | None = None
    """None: it is not asked where losses had better be."""

    def __post_init__(self) -> None:
        for flag, value, least, most in (
            ("--stages", self.stages, 1, STAGES_MAX),
            ("--replicas", self.replicas, 2, ORIGINS_MAX),
            ("--microbatches", self.microbatches, 1, MICROBATCHES_MAX),
            ("--failures", self.losses, 0, self.stages * (self.replicas - 1)),
        ):
            if not least <= value <= most:
                raise UsageError(f"{flag} {value}: give {least} to {most}")
        if (cells := self.stages * self.replicas * self.microbatches) > CELLS_MAX:
            raise UsageError(
                f"stages * replicas * microbatches is {cells}, and a plan takes {CELLS_MAX} at most: plan with fewer "
                "microbatches"
            )
        if self.moves is not None and self.stages * cells > MOVED_CELLS_MAX:
            raise UsageError(
                f"--move plans for each other stage: stages * stages * replicas * microbatches is "
                f"{self.stages * cells}, and {MOVED_CELLS_MAX} is the most: leave it out, or plan with fewer "
                "microbatches"
            )
        if not 0.01 <= self.cap_factor <= 1000:
            raise UsageError(f"--cap-factor {self.cap_factor:g}: give 0.01 to 1000")

    def job(self, way: "Way") -> JobShape:
        """As that way has it."""
        memory = even if way.even else one_f_one_b
        return JobShape(
            group_stages=[[stage] for stage in range(self.stages)],
            origins=self.replicas,
            microbatches=self.microbatches,
            split=way.split,
            costs=self.costs,
            cap=memory(self.stages, self.cap_factor * way.memory),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How a job goes on."""

    name: str
    words: str
    split: bool = False
    even: bool = False
    """Each worker may hold as many activations as the first stage's do."""
    memory: float = 1.0
    staggered: bool = False


WAYS = (
    Way(name="fused", words="backwards are whole; each stage holds as many activations as in 1F1B"),
    Way(name="split", words="gradients of weights are computed later, where a worker would wait", split=True),
    Way(
        name="split, even",
        words="the same, and every stage may hold as many activations as the first one does in 1F1B",
        split=True,
        even=True,
    ),
    Way(name="split, 2x", words="the same with twice as many of them", split=True, even=True, memory=2.0),
    Way(
        name="staggered",
        words="the same, and a stage steps, and goes on, once its own gradients are there (a model)",
        split=True,
        even=True,
        memory=2.0,
        staggered=True,
    ),
)
DROPPED = "each pipeline with a loss stands still, and the batch is smaller by its share"


def worst(request: Request, losses: int) -> Counts:
    """The counts for so many losses. Of large jobs only some stages are tried."""
    whole, rest = divmod(losses, request.replicas - 1)

    def at(stage: int) -> Counts:
        """The stage first, then those behind it."""
        counts = [0] * request.stages
        for n in range(whole):
            counts[(stage + n) % request.stages] = request.replicas - 1
        if rest:
            counts[(stage + whole) % request.stages] = rest
        return tuple(counts)

    job = request.job(WAYS[1])
    actions = 3 * request.stages * request.replicas * request.microbatches
    order = dict.fromkeys([request.stages - 1, 0, request.stages // 2, *range(request.stages)])
    stages = list(order)[: max(1, ACTIONS_MAX // actions)] if losses else [0]
    if len(stages) == 1:
        return at(stages[0])

    def length(counts: Counts) -> float:
        lost = [(stage, role) for stage, count in enumerate(counts) for role in range(count)]
        return plan_step(job.work(lost), thorough=False).length

    return max(map(at, stages), key=length)


def build_rerouted(
    request: Request, exact_s: float | None = None
) -> tuple[dict[str, Any], dict[str, tuple[Work, Step]]]:
    """The document; and by way, the step of its last row, to be drawn. `exact_s`: steps are compared with the shortest
    ones, each searched for so many seconds.

    Raises UsageError if that cannot be done.
    """
    plans = {_kind(way): Plans(request.job(way), losses=0) for way in WAYS}
    whole = plans[_kind(WAYS[0])].of((0,) * request.stages).step.length
    rows = []
    drawn: dict[str, tuple[Work, Step]] = {}
    for losses in range(request.losses + 1):
        counts = worst(request, losses)
        ways: dict[str, dict[str, float]] = {}
        for way in WAYS:
            planned = plans[_kind(way)].of(counts)
            work, step = planned.placed([(s, d) for s, count in enumerate(counts) for d in range(count)])
            length = period(work, step, staggered=True) if way.staggered else step.length
            least = _bound(request, counts, way)
            ways[way.name] = {
                "length": length,
                "bound": least,
                "throughput": whole / length,
                "throughput_bound": whole / least,
                "idle_workers": len(planned.lost) - losses,
            }
            if exact_s is not None and not way.staggered:
                found = exact_step(work, step, limit_s=exact_s)
                ways[way.name] |= {"exact": found.step.length, "exact_least": found.least}
            drawn[way.name] = work, step
        dropped = (request.replicas - max(counts)) / request.replicas
        row = {"losses": losses, "counts": list(counts), "ways": ways, "dropped": dropped}
        if request.moves is not None and losses:
            row["moved"] = _moved(request, plans, counts, request.moves)
        rows.append(row)
    document = {
        "stages": request.stages,
        "replicas": request.replicas,
        "microbatches": request.microbatches,
        "forward": request.costs.forward[0],
        "backward_input": request.costs.backward_input[0],
        "backward_weight": request.costs.backward_weight[0],
        "transfer": request.costs.transfer,
        "cap_factor": request.cap_factor,
        "whole": whole,
        "rows": rows,
    }
    return document, drawn


def _moved(
    request: Request, plans: dict[tuple[bool, bool, float], Plans], counts: Counts, moves: Moves
) -> dict[str, Any]:
    """By way: where the losses had better be, and what a step takes then."""
    found = {}
    for way in WAYS:
        if way.staggered:
            continue
        of = plans[_kind(way)]
        better = move(
            counts,
            lambda counts, of=of: of.of(counts).step.length,  # type: ignore[misc]
            origins=request.replicas,
            move_cost=moves.cost,
            steps=moves.steps,
        )
        found[way.name] = {"counts": list(better), "length": of.of(better).step.length}
    return found


def _kind(way: Way) -> tuple[bool, bool, float]:
    """Ways of one kind have the same plans."""
    return way.split, way.even, way.memory


def _bound(request: Request, counts: Counts, way: Way) -> float:
    lost = [(stage, role) for stage, count in enumerate(counts) for role in range(count)]
    work = request.job(way).work(lost)
    return work.period_bound() if way.staggered else work.bound()


def place(counts: Counts) -> str:
    """Of the losses, in words."""
    return ", ".join(f"{count} at stage {stage}" for stage, count in enumerate(counts) if count) or "none"


def rerouted_text(document: dict[str, Any]) -> list[str]:
    """The table, and what its columns are."""
    numbers = (document[name] for name in ("stages", "replicas", "microbatches", "whole"))
    head = "{} stages, {} replicas, {} microbatches each; a step without losses takes {:g}".format(*numbers)
    names = [way.name for way in WAYS]
    rows = [["losses", "the worst place", *names, "dropped"]]
    for row in document["rows"]:
        ways = [row["ways"][name] for name in names]
        rows.append(
            [
                str(row["losses"]),
                place(row["counts"]),
                *(f"{way['throughput']:.2f} of {way['throughput_bound']:.2f}" for way in ways),
                f"{row['dropped']:.2f}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    width = max(map(len, names)) + 2
    exact = []
    for row in document["rows"]:
        for name in names:
            if "exact" in (way := row["ways"][name]):
                shortest = f"{way['exact']:g}"
                if way["exact_least"] < way["exact"]:
                    shortest = f"{way['exact_least']:g} to {shortest}"
                exact.append(
                    f"{row['losses']:>6}  {name.ljust(width)}planned {way['length']:g}, the shortest {shortest}, bound "
                    f"{way['bound']:g}"
                )
    moved = [
        f"{row['losses']:>6}  {name.ljust(width)}{_move_words(row, name)}"
        for row in document["rows"]
        for name in row.get("moved", ())
    ]
    return [
        head,
        "throughput over that step's (whole backwards, no losses), and what no order exceeds",
        "",
        *lines,
        "",
        *(f"{way.name.ljust(width)}{way.words}" for way in WAYS),
        f"{'dropped'.ljust(width)}{DROPPED}",
        *(
            ["", "steps of the same workers for the same microbatches, by an integer program", *exact]
            if exact
            else []
        ),
        *(
            ["", "where the losses had better be, if ranks are given the state of another stage", *moved]
            if moved
            else []
        ),
    ]


def _move_words(row: dict[str, Any], name: str) -> str:
    moved, now = row["moved"][name], row["ways"][name]["length"]
    if moved["counts"] == row["counts"]:
        return f"where they are: a step takes {now:g}"
    return f"{place(moved['counts'])}: a step takes {moved['length']:g} instead of {now:g}"
