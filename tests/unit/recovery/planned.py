"""plan() by transcripts (tests/golden/planner), and what other tests of it share.

    # What is shown.
    LAYOUT OPTION ...: RANK ... | STREAM ...
      TARGET: what each rank does
      why

LAYOUT  2x3: two stages of three replicas each; or the stages of each rank, 0,3/1,2
OPTION  strategy=, helpers=, groups=: of the job; inexact: an undo may be; checkpoints= (0,10); shards=0101 and
        hosts=aab: of each rank; held=0,2: the slots that are not vacant; refused=: strategies, everything or help;
        measured: what `measured` says; reasons=0,2: those of these ranks, in lines of their own
RANK    15: holds that version; -: none; 14+: in the vote of step 14, of which nothing is applied; 14~: some buckets
        of it are applied; 14?: the same, and its undo is not exact; 14~+: all buckets are applied; and behind that
        g3: its process came in that generation; x: it cannot help; s8,12: snapshots of these versions, of itself
        and of the rank before it; o8: a snapshot of itself alone
STREAM  10-14: of these steps all that this pipeline logs; s0.F:10-14: that stream instead; ! behind it: corrupt; <12:
        trimmed below; ~12-13: steps that are declared unlogged; -s0.F: without that one

A version is shown where it is not the target's; `<` names whom a rank copies, and who helps.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log.record import Steps
from swift_ft.planner import (
    Assignment,
    HeldSnapshot,
    Plan,
    PlanConfig,
    RankPlan,
    RecoveryGroups,
    Refusals,
    Report,
    Strategy,
    StreamSummary,
    plan,
)
from swift_ft.planner.replay_cost import READ_BYTES_MIN
from tests.unit.recovery.situations import Situation, check_can_be_followed, is_inside, name

Log = dict[str, StreamSummary]
_RANK = re.compile(r"(-|\d+)([~?]?)(\+?)(?:g(\d+))?(x?)(?:s([\d,]+))?(?:o(\d+))?")
_STREAM = re.compile(r"([^:]+):(\d+)-(\d+)(!?)(?:<(\d+))?(?:~(\d+)-(\d+))?")


def mesh(stages: int, dp_size: int = 1, shards: dict[int, int] | None = None) -> Assignment:
    """Rank = stage * dp_size + dp_rank, as torch numbers a (pipeline, data) mesh."""
    held = {rank: (rank // dp_size,) for rank in range(stages * dp_size)}
    return Assignment.from_reports(num_stages=stages, stages=held, shards=shards or {})


def _numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word]


def report(rank: int, word: str, host: str = "", ranks: int = 1) -> Report:
    """`ranks`: of the job."""
    found = _RANK.fullmatch(word)
    assert found is not None, word
    number, undo, forward, generation, unable, snapshots, own = found.groups()
    step = None if number == "-" else int(number)
    taken = _numbers(snapshots or "")
    copies = [HeldSnapshot(of, version) for version in taken for of in (rank, (rank - 1) % ranks)]
    copies += [HeldSnapshot(rank, int(own))] if own else []
    return Report(
        rank=rank,
        version=None if undo else step,
        undo_to=step if undo else None,
        undo_exact=undo == "~",
        forward_to=int(number) + 1 if forward else None,
        since_generation=int(generation or 1),
        host=host,
        can_help=not unable,
        snapshots=tuple(copies),
    )


def reports(words: str) -> list[Report]:
    return [report(rank, word) for rank, word in enumerate(words.split())]


def stream(name: str, first: int, last: int, *, trimmed: int = 0, corrupt: bool = False) -> StreamSummary:
    return StreamSummary(
        stream=name,
        records=1,
        first_step=first,
        last_step=last,
        trimmed_below_step=trimmed,
        corrupt=corrupt,
        reason="a checksum differs" if corrupt else "",
    )


def full_log(assignment: Assignment, first: int, last: int, groups: RecoveryGroups | None = None) -> Log:
    """All that passes between stages, but for what passes inside of a recovery group."""
    dp_size = assignment.dp_size
    parts = itertools.product(range(assignment.num_stages), "FB", range(dp_size))
    names = [name(stage, kind, dp_rank, dp_size) for stage, kind, dp_rank in parts]
    inside = {each for each in names if groups and groups.starts and is_inside(each, assignment, groups)}
    return {each: stream(each, first, last) for each in names if each not in inside}


def measured(stages: int, weights: int = 0, read_s: float | None = None) -> dict[int, pb.RankMeasured]:
    """Of one stage on each rank. A step of a replay alone takes 8 * 0.3 + 0.1 s, and one of all ranks 5 s."""
    return {
        rank: pb.RankMeasured(
            step=9,
            steps=8,
            microbatches=8,
            step_s=5.0,
            update_s=0.1,
            stages=(
                pb.StageMeasured(
                    stage=rank,
                    forward_s=0.3 / 3,
                    backward_s=2 * 0.3 / 3,
                    sent=[
                        pb.Sent(destination=o, bytes=1000) for o in (rank - 1, rank + 1) if 0 <= o < stages
                    ],
                    gradient_bytes=weights,
                ),
            ),
            log_read_bytes=None if read_s is None else READ_BYTES_MIN,
            log_read_wait_s=read_s,
        )
        for rank in range(stages)
    }


# --- transcripts ---


def rerun(text: str) -> str:
    """The transcript with what comes out now."""
    lines = []
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"  {told}" for told in _told(line)]
    return "\n".join(lines) + "\n"


def _told(line: str) -> Iterator[str]:
    situation, options = situation_of(line), _options(line)
    known = measured(len(situation.assignment.slots)) if "measured" in options else {}
    outcome, reason = plan(*situation.arguments(), known)
    if outcome is None:
        yield "none"
        yield reason
        return
    assert outcome.reason == reason
    assert [copy.rank for copy in outcome.copies] == [r.rank for r in outcome.ranks if r.sources]
    check_can_be_followed(situation, outcome)
    yield _ways(outcome)
    yield reason
    for rank in _numbers(options.get("reasons", "")):
        yield f"{rank}: {outcome.of(rank).reason}"


def _options(line: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in line.partition(":")[0].split()[1:])


def situation_of(line: str) -> Situation:
    given, _, streams = line.partition("|")
    words, options = given.partition(":")[2].split(), _options(line)
    assignment = _assignment(line.split(maxsplit=1)[0].removesuffix(":"), options)
    hosts = options.get("hosts", "")
    said = [
        report(rank, word, hosts[rank] if hosts else "", len(assignment.slots))
        for rank, word in zip(assignment.occupied, words, strict=True)
    ]
    config = PlanConfig(
        strategy=options.get("strategy", "auto"),
        inexact_undo="inexact" in options,
        helpers=int(options.get("helpers", 0)),
        groups=RecoveryGroups.parse(options.get("groups", "")),
    )
    refused = Refusals()
    for word in filter(None, options.get("refused", "").split(",")):
        why = "a rank refused it"
        match word:
            case "everything":
                refused = refused.and_everything(why)
            case "help":
                refused = refused.and_help(why)
            case _:
                refused = refused.and_of([Strategy(word)], why)
    return Situation(
        reports=tuple(said),
        assignment=assignment,
        log=_log(assignment, config.groups, streams.split()),
        checkpoints=tuple(_numbers(options.get("checkpoints", "0,10"))),
        config=config,
        refused=refused,
    )


def _assignment(layout: str, options: dict[str, str]) -> Assignment:
    shards = {rank: int(shard) for rank, shard in enumerate(options.get("shards", ""))}
    if "x" in layout:
        stages, dp_size = map(int, layout.split("x"))
        assignment = mesh(stages, dp_size, shards)
    else:
        held = {rank: tuple(map(int, mine.split(","))) for rank, mine in enumerate(layout.split("/"))}
        assignment = Assignment.from_reports(num_stages=sum(map(len, held.values())), stages=held)
    if "held" in options:
        assignment = assignment.held_by({slot: slot for slot in _numbers(options["held"])})
    return assignment


def _log(assignment: Assignment, groups: RecoveryGroups, streams: Sequence[str]) -> Log:
    log: Log = {}
    for word in streams:
        if word.startswith("-"):
            del log[word[1:]]
        elif ":" not in word:
            first, last = map(int, word.split("-"))
            log |= full_log(assignment, first, last, groups)
        else:
            found = _STREAM.fullmatch(word)
            assert found is not None, word
            of, first_step, last_step, corrupt, trimmed, begin, end = found.groups()
            made = stream(
                of, int(first_step), int(last_step), trimmed=int(trimmed or 0), corrupt=bool(corrupt)
            )
            log[of] = replace(made, unlogged=Steps(int(begin), int(end))) if begin else made
    return log


def _ways(outcome: Plan) -> str:
    def way(r: RankPlan) -> str:
        version = "" if r.from_version == outcome.target_version else f" {r.from_version}"
        return f"{r.strategy}{version}{_from(r.sources)}"

    ways = [way(r) for r in outcome.ranks]
    found = f"{outcome.target_version}: {f'all {ways[0]}' if len(set(ways)) == 1 else ', '.join(ways)}"
    if not outcome.exact:
        found += "; inexact"
    if outcome.collective_source >= 0:
        found += f"; collectives of {outcome.collective_source}"
    return found + "".join(f"; {h.owner} helped{_from(h.helpers)} to {h.until}" for h in outcome.help)


def _from(ranks: Sequence[int]) -> str:
    return "".join([" <", *(f" {rank}" for rank in ranks)]) if ranks else ""
