"""Random situations for plan(), and what a plan must be, worked out apart from it.

Nothing here is shared with the planner but the types: ways are tried one choice after the other, replays are
walked step by step.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import hypothesis.strategies as st

from swift_ft.log.record import Steps
from swift_ft.planner import (
    Assignment,
    HeldSnapshot,
    Plan,
    PlanConfig,
    RecoveryGroups,
    Refusals,
    Report,
    Strategy,
    StreamSummary,
)

KEEP, CATCH_UP, REPLAY, CHECKPOINT, ROLL_FORWARD, UNDO, REPLICA, SNAPSHOT, LOSSY_FORWARD = Strategy
NEWEST = 6


@dataclass(frozen=True, kw_only=True)
class Situation:
    reports: tuple[Report, ...]
    assignment: Assignment
    log: dict[str, StreamSummary]
    checkpoints: tuple[int, ...]
    config: PlanConfig
    refused: Refusals

    def arguments(
        self,
    ) -> tuple[list[Report], Assignment, dict[str, StreamSummary], tuple[int, ...], PlanConfig, Refusals]:
        return list(self.reports), self.assignment, self.log, self.checkpoints, self.config, self.refused


# --- drawing them ---

versions = st.integers(0, NEWEST)


@st.composite
def assignments(draw: st.DrawFn, dp_size: int) -> Assignment:
    """`dp_size` ranks to each of up to four stage groups; torch's order, or any other."""
    places = draw(st.integers(1, 3) if dp_size > 2 else st.integers(1, 4))
    num_stages = places * draw(st.sampled_from([1, 1, 2]))
    place_of = draw(st.permutations([stage % places for stage in range(num_stages)]))
    order = draw(st.sampled_from([False, False, True]))
    ranks = draw(st.permutations(range(places * dp_size))) if order else list(range(places * dp_size))
    stages = {
        ranks[place * dp_size + dp_rank]: tuple(s for s in range(num_stages) if place_of[s] == place)
        for place in range(places)
        for dp_rank in range(dp_size)
    }
    shards = {rank: draw(st.integers(0, 1)) for rank in ranks} if draw(st.integers(0, 2)) == 2 else {}
    return Assignment.from_reports(num_stages=num_stages, stages=stages, shards=shards)


@st.composite
def recovery_groups(draw: st.DrawFn, assignment: Assignment) -> RecoveryGroups:
    """None, or runs of stages that no rank is parted by."""
    stages = range(1, assignment.num_stages)
    cuts = [stage for stage in stages if draw(st.booleans())] if draw(st.booleans()) else list(stages)
    run_of = [sum(cut <= stage for cut in cuts) for stage in range(assignment.num_stages)]
    if any(len({run_of[stage] for stage in mine}) > 1 for mine in assignment.stages.values()):
        return RecoveryGroups() if draw(st.booleans()) else RecoveryGroups((0,), assignment.num_stages)
    return draw(st.sampled_from([RecoveryGroups(), RecoveryGroups((0, *cuts), assignment.num_stages)]))


def is_inside(stream: str, assignment: Assignment, groups: RecoveryGroups) -> bool:
    """Only stages of the same recovery group receive it."""
    for stage in range(assignment.num_stages):
        for kind, to in (("F", stage + 1), ("B", stage - 1)):
            names = {name(stage, kind, c, dp_size) for dp_size in (1, 2, 3) for c in range(dp_size)}
            if stream in names and 0 <= to < assignment.num_stages:
                return to in groups.stages(stage)
    return False


def name(stage: int, kind: str, dp_rank: int, dp_size: int) -> str:
    return f"s{stage}.{kind}" if dp_size == 1 else f"s{stage}c{dp_rank}.{kind}"


@st.composite
def partial_reports(draw: st.DrawFn, rank: int, step: int, fate: str) -> Report:
    """What a failure in `step` may leave, or anything at all."""
    kinds = ["whole", "whole", "lost", "reduced", "half", "applied", "behind", "ahead", "cut", "any"]
    if fate:
        kinds = [fate] * 9 + ["any"]
    kind = draw(st.sampled_from(kinds))
    version: int | None = None
    undo_to: int | None = None
    forward_to: int | None = None
    finish_to = step + 1 if kind == "cut" else None
    match kind:
        case "cut":
            version, undo_to = draw(st.sampled_from([(step, None), (None, step)]))
            forward_to = draw(st.sampled_from([None, step + 1]))
        case "whole" | "reduced":
            version = step
            forward_to = step + 1 if kind == "reduced" else None
        case "half" | "applied":
            undo_to = step
            forward_to = step + 1 if kind == "applied" else None
        case "behind":
            version = max(step - 1, 0)
        case "ahead":
            version = step + 1
        case "any":
            version, undo_to, forward_to, finish_to = (draw(st.none() | versions) for _ in range(4))
    return Report(
        rank=rank,
        version=version,
        undo_to=undo_to,
        undo_exact=draw(st.booleans()),
        forward_to=forward_to,
        finish_to=finish_to,
        since_generation=draw(st.integers(1, 3)),
        host=draw(st.sampled_from(["", "a", "b"])),
    )


@st.composite
def inventories(draw: st.DrawFn, assignment: Assignment) -> dict[str, StreamSummary]:
    """Mostly whole, so that replays are possible; a hole here and there, also one that is declared."""
    dp_size = len(assignment.holders(0))
    names = [
        name(s, kind, c, dp_size)
        for s in range(assignment.num_stages)
        for kind in "FBXT"
        for c in range(dp_size)
    ]
    if draw(st.booleans()):
        names += [f"r{rank}.C" for rank in assignment.stages]
    whole = draw(st.booleans())
    streams = {}
    for stream in names:
        fate = 0 if whole else draw(st.integers(0, 12))
        if fate == 12:
            continue
        first = draw(st.integers(0, 4)) if fate == 11 else 0
        last = draw(st.integers(first, NEWEST)) if fate in (10, 11) else NEWEST
        begin = draw(st.integers(0, NEWEST)) if fate == 8 else -1
        streams[stream] = StreamSummary(
            stream=stream,
            records=1,
            first_step=first,
            last_step=last,
            trimmed_below_step=first if draw(st.booleans()) else 0,
            corrupt=fate == 9,
            unlogged=Steps(begin, draw(st.integers(begin, NEWEST))) if begin >= 0 else None,
        )
    return streams


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    assignment = draw(assignments(draw(st.integers(1, 3))))
    step = draw(st.integers(1, NEWEST - 2))
    # A stage with all of its ranks lost or behind is what replays are for; left to chance it would be rare.
    fates = {
        stages: draw(st.sampled_from(["", "", "lost", "behind", "cut"]))
        for stages in set(assignment.stages.values())
    }
    checkpoints = draw(st.sets(st.integers(0, step), max_size=2)) | (
        {0} if draw(st.integers(0, 3)) else set()
    )
    every_way = [KEEP, CATCH_UP, REPLAY, ROLL_FORWARD, UNDO, REPLICA]
    refused = draw(st.just([]) | st.just([]) | st.lists(st.sampled_from(every_way), unique=True, max_size=3))
    groups = draw(recovery_groups(assignment))
    log = draw(inventories(assignment))
    if groups.starts and draw(st.integers(0, 3)):  # as it is: nothing passes there
        log = {
            stream: summary for stream, summary in log.items() if not is_inside(stream, assignment, groups)
        }
    return Situation(
        reports=tuple(
            draw(partial_reports(rank, step, fates[assignment.stages[rank]]))
            for rank in sorted(assignment.stages)
        ),
        assignment=assignment,
        log=log,
        checkpoints=tuple(sorted(checkpoints)),
        config=PlanConfig(
            groups=groups,
            strategy=draw(
                st.sampled_from(
                    ["auto", "auto", "auto", "replica", "replay", "checkpoint", "rollback", "lossy-forward"]
                )
            ),
            inexact_undo=draw(st.booleans()),
        ),
        refused=Refusals().and_of(refused, "refused before") if refused else Refusals(),
    )


@st.composite
def snapshot_situations(draw: st.DrawFn) -> Situation:
    """Under a strategy that goes back to snapshots: any copies of any ranks' states, in any rank's memory."""
    situation = draw(situations())
    ranks = sorted(situation.assignment.stages)
    copies = st.builds(HeldSnapshot, st.sampled_from(ranks), st.integers(0, 2))
    held = [draw(st.frozensets(copies, max_size=2 * len(ranks))) for _ in ranks]
    if draw(st.booleans()):  # every rank keeps its own, and the one before its
        version = draw(versions)
        for rank, report in enumerate(situation.reports):
            if report.version is not None or draw(st.integers(0, 3)) == 0:
                held[rank] |= {HeldSnapshot(rank, version), HeldSnapshot(ranks[rank - 1], version)}
    refused = draw(st.sampled_from([[], [], [], [KEEP], [SNAPSHOT], [KEEP, SNAPSHOT], [UNDO]]))
    return replace(
        situation,
        reports=tuple(
            replace(report, snapshots=tuple(sorted(copies)))
            for report, copies in zip(situation.reports, held, strict=True)
        ),
        config=replace(situation.config, strategy=draw(st.sampled_from(["snapshot", "snapshot", "auto"]))),
        refused=Refusals().and_of(refused, "refused before") if refused else Refusals(),
    )


@st.composite
def grouped_situations(draw: st.DrawFn) -> Situation:
    """Four to six stages, some of them in recovery groups of several, of which ranks are lost or behind."""
    places, dp_size = draw(st.integers(4, 6)), draw(st.sampled_from([1, 1, 2]))
    assignment = Assignment.from_reports(
        num_stages=places, stages={rank: (rank // dp_size,) for rank in range(places * dp_size)}
    )
    cuts = sorted(draw(st.sets(st.integers(1, places - 1), min_size=1, max_size=places - 2)))
    groups = RecoveryGroups((0, *cuts), places)
    log = draw(inventories(assignment))
    step = draw(st.integers(2, NEWEST - 2))
    fates = [draw(st.sampled_from(["whole"] * 4 + ["lost", "behind", "half"])) for _ in range(places)]
    return Situation(
        reports=tuple(
            draw(partial_reports(rank, step, fates[rank // dp_size])) for rank in assignment.stages
        ),
        assignment=assignment,
        log={stream: summary for stream, summary in log.items() if not is_inside(stream, assignment, groups)},
        checkpoints=(0,) if draw(st.booleans()) else (step - 1,),
        config=PlanConfig(groups=groups, inexact_undo=draw(st.booleans())),
        refused=Refusals(),
    )


# --- what is right ---


def groups_of(situation: Situation) -> list[list[int]]:
    by_stages: dict[tuple[int, ...], list[int]] = {}
    stages_of = situation.assignment.stages
    for rank, stages in ((rank, stages_of[rank]) for rank in situation.assignment.occupied):
        by_stages.setdefault(stages, []).append(rank)
    return list(by_stages.values())


def together_of(situation: Situation) -> list[list[list[int]]]:
    """The stage groups by the recovery group that they are in."""
    by_run: dict[tuple[int, ...], list[list[int]]] = {}
    for group in groups_of(situation):
        stages = situation.assignment.stages[group[0]]
        run = situation.config.groups.stages(stages[0]) if situation.config.groups.starts else stages
        by_run.setdefault(run, []).append(group)
    return list(by_run.values())


def shards_of(situation: Situation, group: list[int]) -> list[list[int]]:
    by_shard: dict[int, list[int]] = {}
    for rank in group:
        by_shard.setdefault(situation.assignment.slots[rank].shard, []).append(rank)
    return list(by_shard.values())


def usable(situation: Situation) -> set[Strategy]:
    """What refusals and the configuration leave of the ways that replay nothing."""
    ways = {KEEP, ROLL_FORWARD, UNDO, REPLICA} - set(situation.refused.strategies)
    match situation.config.strategy:
        case "replay" | "snapshot":
            ways.discard(REPLICA)
        case "rollback":
            ways.discard(ROLL_FORWARD)
        case "lossy-forward":
            ways |= {LOSSY_FORWARD} - set(situation.refused.strategies)
    return ways


def all_finish(situation: Situation, rank: int, version: int) -> bool:
    """Every rank of its stage can finish a step to that version, and holds no such one already."""
    stages_of = situation.assignment.stages
    of_stage = [r for r in situation.reports if stages_of[r.rank] == stages_of[rank]]
    ways = usable(situation)
    return all(
        r.version != version
        and ((r.forward_to == version and ROLL_FORWARD in ways) or r.finish_to == version)
        for r in of_stage
    )


def own_ways(situation: Situation, rank: int, version: int, inexact: bool) -> Iterator[Strategy]:
    report = next(r for r in situation.reports if r.rank == rank)
    if report.version == version:
        yield KEEP
    if report.forward_to == version:
        yield ROLL_FORWARD
    if report.finish_to == version and all_finish(situation, rank, version):
        yield LOSSY_FORWARD
    if report.undo_to == version and (report.undo_exact or inexact):
        yield UNDO


def shard_gets_to(situation: Situation, replicas: list[int], version: int, inexact: bool) -> bool:
    """Is there any assignment of ways with which all replicas end with the same bits of `version`?"""
    ways = usable(situation)
    exact = {r.rank: r.undo_exact for r in situation.reports}
    choices = [{*own_ways(situation, rank, version, inexact), REPLICA} & ways for rank in replicas]
    for chosen_ways in itertools.product(*choices):
        chosen = dict(zip(replicas, chosen_ways))
        givers = [rank for rank, way in chosen.items() if way is not REPLICA]
        inexactly = [rank for rank in givers if chosen[rank] is UNDO and not exact[rank]]
        if givers and (not inexactly or len(givers) == 1):
            return True
    return False


def group_reaches(situation: Situation, group: list[int], version: int, inexact: bool) -> bool:
    return all(
        shard_gets_to(situation, replicas, version, inexact) for replicas in shards_of(situation, group)
    )


def reached(situation: Situation, group: list[int], inexact: bool) -> set[int]:
    return {v for v in range(NEWEST + 2) if group_reaches(situation, group, v, inexact)}


@dataclass(frozen=True)
class Expected:
    """What kind of plan, to which version."""

    kind: str
    """"direct" (nothing replayed), "replay", "snapshot", "checkpoint", "none"."""
    target: int = -1
    exact: bool = True


def expected(situation: Situation) -> Expected:
    newest = max(situation.checkpoints, default=None)
    fallback = Expected("none") if newest is None else Expected("checkpoint", newest)
    if situation.config.strategy in ("snapshot", "auto") and SNAPSHOT not in situation.refused.strategies:
        whole = [v for v in range(NEWEST + 2) if is_whole(situation, v)]
        if whole and (newest is None or max(whole) >= newest):
            fallback = Expected("snapshot", max(whole))
    if KEEP in situation.refused.strategies or situation.config.strategy == "checkpoint":
        return fallback
    allowed = situation.config.inexact_undo
    groups = groups_of(situation)
    direct = set.intersection(*(reached(situation, group, allowed) for group in groups))
    if direct:
        target = max(direct)
        exactly = all(group_reaches(situation, group, target, False) for group in groups)
        return Expected("direct", target, exactly)
    if len(together_of(situation)) == 1 and situation.config.groups.starts:
        return fallback
    if {CATCH_UP, REPLAY} & set(situation.refused.strategies) or situation.config.strategy in (
        "replica",
        "snapshot",
        "rollback",
        "lossy-forward",
    ):
        return fallback
    somewhere = {
        version
        for report in situation.reports
        for version in range(NEWEST + 2)
        if set(own_ways(situation, report.rank, version, allowed)) & usable(situation)
    }
    for target in sorted(somewhere, reverse=True):
        for inexact in (False, True) if allowed else (False,):
            bases = bases_for(situation, target, inexact)
            if bases is not None and replays_are_fed(situation, bases, target):
                exactly = all(
                    from_checkpoint or group_reaches(situation, list(group), base, False)
                    for group, (base, from_checkpoint) in bases.items()
                )
                return Expected("replay", target, exactly)
    return fallback


def is_whole(situation: Situation, version: int) -> bool:
    """Of every rank somebody holds a copy."""
    there = {held.rank for r in situation.reports for held in r.snapshots if held.version == version}
    return there == set(situation.assignment.stages)


def bases_for(
    situation: Situation, target: int, inexact: bool
) -> dict[tuple[int, ...], tuple[int, bool]] | None:
    """group -> (base, is it the checkpoint); None: `target` is not to be had."""
    checkpoints = [v for v in situation.checkpoints if v <= target]
    bases = {}
    for members in together_of(situation):
        states = set.intersection(*(reached(situation, group, inexact) for group in members))
        below = [v for v in states if v <= target]
        if states and not below:
            return None  # it would have to throw away a whole state
        if below and max(below) >= max(checkpoints, default=0):
            bases |= {tuple(group): (max(below), False) for group in members}
        elif checkpoints:
            bases |= {tuple(group): (max(checkpoints), True) for group in members}
        else:
            return None
    return bases


def replays_are_fed(
    situation: Situation, bases: dict[tuple[int, ...], tuple[int, bool]], target: int
) -> bool:
    starts = {rank: base for group, (base, _) in bases.items() for rank in group}
    if not all(inputs_are_there(situation, rank, starts, target) for rank in starts):
        return False
    first = min(starts.values())
    needed = first < target and any(
        stream.endswith(".C") and summary.records for stream, summary in situation.log.items()
    )
    return not needed or any(
        gives_collectives(situation, rank, first, target) for rank in situation.assignment.stages
    )


def inputs_are_there(situation: Situation, rank: int, starts: dict[int, int], target: int) -> bool:
    """Every input of every step is logged, or generated again; and nothing it needs or compares is corrupt."""
    assignment = situation.assignment
    dp_size = len(assignment.holders(assignment.stages[rank][0]))
    for step in range(starts[rank], target):
        for stage in assignment.stages[rank]:
            dp_rank = sorted(r for r, stages in assignment.stages.items() if stage in stages).index(rank)
            own = [situation.log.get(name(stage, kind, dp_rank, dp_size)) for kind in "FBXT"]
            if any(summary is not None and (summary.corrupt or dropped(summary, step)) for summary in own):
                return False
            for neighbour, kind in ((stage - 1, "F"), (stage + 1, "B")):
                if not 0 <= neighbour < assignment.num_stages:
                    continue
                writer = sorted(r for r, stages in assignment.stages.items() if neighbour in stages)[dp_rank]
                if situation.config.groups.starts and neighbour in situation.config.groups.stages(stage):
                    if starts[writer] != starts[rank]:
                        return False  # nothing of it is logged
                    continue
                summary = situation.log.get(name(neighbour, kind, dp_rank, dp_size))
                if summary is not None and summary.corrupt:
                    return False
                if step < starts[writer] and not has(summary, step):
                    return False
    return True


def gives_collectives(situation: Situation, rank: int, first: int, target: int) -> bool:
    summary = situation.log.get(f"r{rank}.C")
    report = next(r for r in situation.reports if r.rank == rank)
    done = max(v for v in (report.version, report.undo_to, report.forward_to, -1) if v is not None)
    return (
        done >= target
        and summary is not None
        and not summary.corrupt
        and all(has(summary, step) for step in range(first, target))
    )


def has(summary: StreamSummary | None, step: int) -> bool:
    return (
        summary is not None
        and summary.records > 0
        and max(summary.first_step, summary.trimmed_below_step) <= step <= summary.last_step
        and not dropped(summary, step)
    )


def dropped(summary: StreamSummary, step: int) -> bool:
    return summary.unlogged is not None and summary.unlogged[0] <= step <= summary.unlogged[1]


def check_can_be_followed(situation: Situation, plan: Plan) -> None:
    """Every rank can do what the plan says, and all end at the target with the same bits as their replicas."""
    target = plan.target_version
    reports = {report.rank: report for report in situation.reports}
    by_rank = {r.rank: r for r in plan.ranks}
    assert list(by_rank) == sorted(reports)
    assert all(r.reason for r in plan.ranks)
    if SNAPSHOT in {r.strategy for r in plan.ranks}:
        assert plan.restores
        for r in plan.ranks:
            assert (r.strategy, r.from_version) == (SNAPSHOT, target)
            (giver,) = r.sources or (r.rank,)
            assert HeldSnapshot(r.rank, target) in reports[giver].snapshots
            assert not r.sources or HeldSnapshot(r.rank, target) not in reports[r.rank].snapshots
        return
    if CHECKPOINT in {r.strategy for r in plan.ranks}:
        assert plan.restores
        assert {r.from_version for r in plan.ranks} == {target}
        assert target == max(situation.checkpoints)
        return
    inexact = []
    for r in plan.ranks:
        report = reports[r.rank]
        assert r.strategy not in situation.refused.strategies
        assert r.from_version <= target
        assert bool(r.sources) == (r.strategy is REPLICA)
        match r.strategy:
            case Strategy.KEEP:
                assert report.version == r.from_version == target
            case Strategy.CATCH_UP:
                assert report.version == r.from_version < target
            case Strategy.ROLL_FORWARD:
                assert report.forward_to == r.from_version
            case Strategy.LOSSY_FORWARD:
                assert report.finish_to == r.from_version
                assert all_finish(situation, r.rank, r.from_version), "somebody is not in that step"
            case Strategy.UNDO:
                assert report.undo_to == r.from_version
                if not report.undo_exact:
                    inexact.append(r.rank)
            case Strategy.REPLICA:
                assert len(set(r.sources)) == len(r.sources)
                for source in r.sources:
                    check_source(situation, plan, r.rank, source)
            case Strategy.REPLAY:
                assert r.from_version in situation.checkpoints
    assert plan.exact == (not inexact)
    assert not inexact or situation.config.inexact_undo
    for group in groups_of(situation):
        assert len({by_rank[rank].from_version for rank in group}) == 1, "a stage replays as a whole"
        assert len({by_rank[rank].strategy is REPLAY for rank in group}) == 1
        for replicas in shards_of(situation, group):
            if set(replicas) & set(inexact):
                others = [by_rank[rank].strategy for rank in replicas if rank not in inexact]
                assert len(replicas) - len(others) == 1, "two inexact undos do not give the same bits"
                assert set(others) <= {REPLICA}
    starts = {r.rank: r.from_version for r in plan.ranks}
    assert all(inputs_are_there(situation, rank, starts, target) for rank in starts)
    first = min(starts.values())
    if plan.collective_source >= 0:
        assert gives_collectives(situation, plan.collective_source, first, target)
    else:
        logged = [s for stream, s in situation.log.items() if stream.endswith(".C") and s.records > s.marks]
        assert first == target or not logged


def check_source(situation: Situation, plan: Plan, rank: int, source: int) -> None:
    assignment = situation.assignment
    giver = plan.of(source)
    assert source != rank
    assert assignment.stages[source] == assignment.stages[rank]
    assert assignment.slots[source].shard == assignment.slots[rank].shard
    assert giver.strategy in (KEEP, CATCH_UP, ROLL_FORWARD, UNDO), "it has nothing of its own to give"
    assert giver.from_version == plan.of(rank).from_version


def check_ways(situation: Situation, plan: Plan) -> None:
    """Who holds it keeps it, else who can roll forward does, else who can undo bit for bit; the rest copy it.

    So no copy is made for a rank that needs none, and none of those that can give the state loses what it has.
    """
    reports = {report.rank: report for report in situation.reports}
    ways = usable(situation)
    for group in groups_of(situation):
        for replicas in shards_of(situation, group):
            plans = {rank: plan.of(rank) for rank in replicas}
            if any(p.strategy is REPLAY for p in plans.values()):
                continue
            version = next(iter(plans.values())).from_version
            exact = {
                rank: [way for way in own_ways(situation, rank, version, False) if way in ways]
                for rank in replicas
            }
            makers = [rank for rank in replicas if exact[rank]]
            for rank, p in plans.items():
                if KEEP in exact[rank]:
                    assert p.strategy in (KEEP, CATCH_UP)
                elif exact[rank]:
                    assert p.strategy is exact[rank][0]
                elif makers:
                    assert p.strategy is REPLICA
                    assert set(p.sources) == set(makers)
                near = [
                    (
                        not reports[rank].host or reports[rank].host != reports[source].host,
                        abs(source - rank),
                    )
                    for source in p.sources
                ]
                assert near == sorted(near), "the nearest comes first"
