"""`swift-ft plan --adaptive`: throughput of a job with replicas after losses; every stage keeps a replica.

For each number of losses the worst placement is used: all losses in the stage whose loss makes the longest step, as
long as one replica remains there, the rest in the following stages. Throughput is the length of the step without
losses, with whole backwards and 1F1B's memory, over that of the plan; both compute the whole batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swift_ft.cli_parser import Parser, add_json, check_file, write_json
from swift_ft.errors import UsageError
from swift_ft.lab.command_line import check_ranges
from swift_ft.planner.assignment import Assignment
from swift_ft.planner.schedule import ACTIONS_MAX, Costs, Step, Work, owners_of, period, plan_step
from swift_ft.text import show, table

Lost = Sequence[tuple[int, int]]
"""(stage, replica) of each lost worker."""
Counts = tuple[int, ...]
"""The number of losses at each stage."""

STAGES_MAX, ORIGINS_MAX, MICROBATCHES_MAX, CELLS_MAX = 4096, 1024, 65536, 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    stages: int
    replicas: int
    microbatches: int
    """Microbatches of each replica."""
    costs: Costs = field(default_factory=Costs)
    cap_factor: float = 1.0
    """Memory limit, as a multiple of 1F1B's activations."""
    losses: int = 2

    def __post_init__(self) -> None:
        check_ranges(
            ("--stages", self.stages, 1, STAGES_MAX),
            ("--replicas", self.replicas, 2, ORIGINS_MAX),
            ("--microbatches", self.microbatches, 1, MICROBATCHES_MAX),
            ("--failures", self.losses, 0, self.stages * (self.replicas - 1)),
        )
        if (cells := self.stages * self.replicas * self.microbatches) > CELLS_MAX:
            raise UsageError(
                f"stages * replicas * microbatches is {cells}, and a plan takes {CELLS_MAX} at most: plan with fewer "
                "microbatches"
            )
        if not 0.01 <= self.cap_factor <= 1000:
            raise UsageError(f"--cap-factor {self.cap_factor:g}: give 0.01 to 1000")

    def work(self, way: "Way", lost: Lost) -> Work:
        """Returns the work of a step with these losses, in that way."""
        whole = Assignment.grid(self.stages * self.replicas, replicas=self.replicas)
        gone = {whole.at(stage, replica) for stage, replica in lost}
        left = whole.held_by({slot: slot for slot in whole.occupied if slot not in gone}).rerouted()
        factor = self.cap_factor * way.memory
        return Work(
            stages=self.stages,
            origins=self.replicas,
            microbatches=self.microbatches,
            owners=owners_of(left, self.microbatches),
            split=way.split,
            costs=self.costs,
            cap={
                slot: max(1, int((self.stages - (0 if way.even else place.stage_group)) * factor + 1e-9))
                for slot, place in enumerate(whole.slots)
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One mode of continuing a job after losses."""

    name: str
    words: str
    split: bool = False
    even: bool = False
    """Each worker may hold as many activations as the first stage."""
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
_SLACK = 1e-9
DROPPED = "each pipeline with a loss stands still, and the batch is smaller by its share"


def worst(request: Request, losses: int) -> Counts:
    """Returns the worst counts for so many losses. For large jobs only some stages are tried."""
    whole, rest = divmod(losses, request.replicas - 1)

    def at(stage: int) -> Counts:
        """Fills this stage first, then those after it."""
        counts = [0] * request.stages
        for n in range(whole):
            counts[(stage + n) % request.stages] = request.replicas - 1
        if rest:
            counts[(stage + whole) % request.stages] = rest
        return tuple(counts)

    actions = 3 * request.stages * request.replicas * request.microbatches
    order = dict.fromkeys([request.stages - 1, 0, request.stages // 2, *range(request.stages)])
    stages = list(order)[: max(1, ACTIONS_MAX // actions)] if losses else [0]
    if len(stages) == 1:
        return at(stages[0])

    def length(counts: Counts) -> float:
        return plan_step(request.work(WAYS[1], first_ones(counts)), thorough=False).length

    return max(map(at, stages), key=length)


class Planned(NamedTuple):
    lost: Lost
    """The workers that do nothing: as many as are lost, or more."""
    work: Work
    step: Step


def first_ones(counts: Counts) -> list[tuple[int, int]]:
    return [(stage, replica) for stage, count in enumerate(counts) for replica in range(count)]


def planned(request: Request, way: "Way", counts: Counts) -> Planned:
    """Returns the shortest plan among several choices of the lost workers: replicas are alike, so that only their
    number at each stage counts. The number of choices bounds the time."""
    best: Planned | None = None
    actions = request.stages * request.replicas * request.microbatches * (3 if way.split else 2)
    choices = list(_choices(counts, request.replicas))[: 1 + ACTIONS_MAX // actions]
    for lost in choices:
        work = request.work(way, lost)
        step = plan_step(work, actions_max=ACTIONS_MAX // len(choices))
        if best is None or step.length < best.step.length - _SLACK:
            best = Planned(lost, work, step)
        if best.lost == lost and step.length <= work.bound() + _SLACK and len(lost) == sum(counts):
            break
    assert best is not None
    return best


def _choices(counts: Counts, replicas: int) -> Iterator[Lost]:
    """Yields the first replicas of each stage. Or equally many first ones at all stages: then the microbatches of some
    replicas are redistributed as a whole, and some remaining workers stay idle. Or that only in the stages from the
    first loss on, or up to the last one. Or different ones at each stage."""
    most, stages = max(counts, default=0), range(len(counts))
    lossy = [stage for stage in stages if counts[stage]] or [0]
    spans = [stages, range(lossy[0], len(counts)), range(lossy[-1] + 1)]
    shapes = [counts, *(tuple(most if s in span else counts[s] for s in stages) for span in spans)]
    yield from map(first_ones, dict.fromkeys(shapes))
    apart, taken = [], 0
    for stage in stages:
        apart += [(stage, (taken + n) % replicas) for n in range(counts[stage])]
        taken += counts[stage]
    if len(lossy) > 1:
        yield apart


def build_rerouted(request: Request) -> dict[str, Any]:
    """Builds the document: a row for each number of losses, with the length of a step in each way."""
    whole = planned(request, WAYS[0], (0,) * request.stages).step.length
    rows = []
    for losses in range(request.losses + 1):
        counts = worst(request, losses)
        ways: dict[str, dict[str, float]] = {}
        for way in WAYS:
            if not way.staggered:  # it has the plan of the way before it
                lost, work, step = planned(request, way, counts)
            length = period(work, step, staggered=True) if way.staggered else step.length
            least_work = request.work(way, first_ones(counts))
            least = least_work.period_bound() if way.staggered else least_work.bound()
            ways[way.name] = {
                "length": length,
                "bound": least,
                "throughput": whole / length,
                "throughput_bound": whole / least,
                "idle_workers": len(lost) - losses,
            }
        dropped = (request.replicas - max(counts)) / request.replicas
        rows.append({"losses": losses, "counts": list(counts), "ways": ways, "dropped": dropped})
    return {
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


def place(counts: Counts) -> str:
    return ", ".join(f"{count} at stage {stage}" for stage, count in enumerate(counts) if count) or "none"


def rerouted_text(document: dict[str, Any]) -> list[str]:
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
    width = max(map(len, names)) + 2
    return [
        head,
        "throughput over that step's (whole backwards, no losses), and what no order exceeds",
        "",
        *table(rows, left=2),
        "",
        *(f"{way.name.ljust(width)}{way.words}" for way in WAYS),
        f"{'dropped'.ljust(width)}{DROPPED}",
    ]


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft plan --adaptive",
        description="Predicts the throughput with which replicas do the work of lost ranks.",
        epilog="docs/adaptive.md has the model",
    )
    for name, unit, words in (
        ("stages", "P", "of the pipeline, one on each rank"),
        ("replicas", "D", "of each stage"),
        ("microbatches", "M", "of each replica in a step"),
    ):
        parser.add_argument(f"--{name}", type=int, required=True, metavar=unit, help=words)
    times = "of a forward, the backward's parts for inputs and for weights, and a transfer, in any unit; default: 1,1,1"
    parser.add_argument(
        "--times", dest="costs", type=_costs, default=Costs(), metavar="F,I,W[,TRANSFER]", help=times
    )
    factor = "activations in memory, times those of 1F1B; default: %(default)s"
    parser.add_argument("--cap-factor", type=float, default=1.0, metavar="X", help=factor)
    losses = "up to so many ranks are lost; default: %(default)s"
    parser.add_argument("--failures", dest="losses", type=int, default=2, metavar="K", help=losses)
    add_json(parser)
    return parser


def _costs(text: str) -> Costs:
    try:
        times = [float(word) for word in text.split(",")]
    except ValueError:
        times = []
    if len(times) not in (3, 4) or not all(0 <= time <= 1e9 for time in times) or min(times[:3]) <= 0:
        raise UsageError(f"--times {text}: write F,I,W or F,I,W,TRANSFER, such as 1,1,1 or 2,2.1,1.9,0.3")
    forward, inputs, weights, transfer = [*times, 0.0][:4]
    return Costs(forward=(forward,), backward_input=(inputs,), backward_weight=(weights,), transfer=transfer)


def main(argv: Sequence[str]) -> int:
    """Raises UsageError for an invalid value or a missing flag."""
    options = vars(make_parser().parse_args(argv))
    path = options.pop("json")
    check_file("--json", path)
    document = build_rerouted(Request(**options))
    write_json(path, document)
    show(rerouted_text(document))
    return 0
