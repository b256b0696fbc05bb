"""Runs a transcript against the core: commands in, effects and views out.

Commands, with fields as `name=value` (tests/transcripts.py says how the file is read):

    join rank= [inc=] [pid=] [world=] [host=]            ready rank= generation= version= [stages=] [of=] [shard=]
         [seed=] [torch=] [strategy=] [undo=] [helpers=]
         [run=] [replicas=] [lost_shard=]             refuse rank= generation= reason= [differs=yes]
    report rank= generation= [version=] [undo_to= [exact=no]] [forward_to=] [finish_to=] [help=yes]
    durable rank= version= [generation=]                 finish rank= version=
         [recorded=yes]
    rehearsed rank= version= [under_way=yes] [steps=] [difference=] [why_not=]     rehearsals
    ask [rank= generation= after=] reason=               pressed server= trimmed= reason=
    exited rank= code= [inc=] [pid=] [given_up=yes]   unfit rank= reason=   given_up rank=
                     fail [rank=] reason=     stop run= [reason=]
    measured rank= step_s= [stage= microbatches= microbatch_s=]   (a step takes so long)
    beat rank= version=                                  suspect rank= reason= [generation= [again=yes]]
    fenced generation=    reset generation=    blocked generation= server= reason= [given_up=yes]
    outdated generation= reason= [server=]
    inventory generation= [[SERVER/]STREAM=first-last | ...=corrupt]   (no server: all have it)
    wait seconds=        (time passes in heartbeats; all who `beats` names are heard)
    hears servers=l0,l1  (those answer while time passes; by default all)
    servers number= [copies=]   (before the first join: l0 on machine m0, ...)      places
    logs [lost=] [add= host=]   heard server=
    beats ranks=0,1      stall seconds=   (time passes, nobody looks)
    crash                (what is durable is all that is left)
    status

`inc` is by default what joined the rank last.
"""

import shlex
from typing import Any

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import applied, between, rehearsal_words, whole
from swift_ft.planner import StreamSummary
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.commands import Refusal
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import JobRow, LogServer
from swift_ft_services.coordinator.log_placement import unreplaced
from swift_ft_services.coordinator.timeouts import Timing
from swift_ft_services.coordinator.views import view_of
from tests.descriptors import is_repeated
from tests.unit.coordinator import driver_world
from tests.unit.coordinator.rows import encode, read, write_changes

TIMING = Timing(
    heartbeat_s=1.0,
    lease_s=5.0,
    suspicion_s=1.0,
    step_bound_s=20.0,
    log_lost_s=15.0,
    replaced_within_s=30.0,
)


CONFIG = (
    "strategy",
    "undo",
    "groups",
    "helpers",
    "replicas",
    "tensor_parallel",
    "lost_shard",
    "require_exact",
)


REQUESTS = {
    "refuse": pb.RefuseRequest,
    "durable": pb.CheckpointRequest,
    "rehearsed": pb.RehearsedRequest,
    "ask": pb.AskCheckpointRequest,
    "finish": pb.FinishRequest,
    "fail": pb.FailRequest,
    "suspect": pb.SuspectRequest,
}
"""Commands that are a request, field by field."""
WORDS = {
    "of": "num_stages",
    "exact": "undo_exact",
    "help": "can_help",
    "after": "after_version",
    "code": "exit_code",
}
"""Field of a transcript -> field of the request, where they differ."""


def fields_of(kind: Any) -> Any:
    return kind.DESCRIPTOR.fields_by_name


class World:
    """One job, its durable row, a clock."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.durable: dict[str, str] = {}
        self.shown: pb.View | None = None
        self.now = 100.0
        self.incarnations: dict[int, str] = {}
        self.beats: list[int] = []
        self.versions: dict[int, int] = {}
        self.servers, self.copies = 2, 1
        self.hears: list[str] = ["l0", "l1"]

    def run(self, line: str) -> list[str]:
        name, *fields = shlex.split(line)
        arguments = dict(field.split("=", 1) for field in fields)
        try:
            if name in REQUESTS:
                return self.step(self.request(REQUESTS[name], **arguments))
            return list(getattr(self, f"do_{name}")(**arguments))
        except Refusal as refusal:
            return [f"{type(refusal).__name__.upper()}: {refusal}"]

    def do_servers(self, number: str, copies: str = "1") -> list[str]:
        self.servers, self.copies = int(number), int(copies)
        self.hears = [f"l{n}" for n in range(self.servers)]
        return []

    # --- members ---

    def sender(self, rank: str, inc: str = "") -> dict[str, Any]:
        return {"rank": int(rank), "incarnation": inc or self.incarnations.get(int(rank), "?")}

    def do_join(
        self, rank: str, inc: str = "", pid: str = "", world: str = "3", host: str = "h", **config: str
    ) -> list[str]:
        inc = inc or f"a{rank}"
        request = driver_world.join(
            int(rank),
            inc,
            pid=int(pid or 1000 + int(rank)),
            host=host,
            world_size=int(world),
            config={"seed": config.get("seed", "7")} | {key: config[key] for key in CONFIG if key in config},
            fingerprint={"torch": config.get("torch", "2.13.0")},
            run=config.get("run", ""),
        )
        join = m.Join(request)
        if self.job is None:
            servers = [LogServer(address=f"l{n}", host=f"m{n}") for n in range(self.servers)]
            self.job = Job.create("j", servers, join, TIMING, self.now, self.copies)
        out = self.step(join)
        self.incarnations[int(rank)] = inc
        return out

    def do_measured(
        self, rank: str, step_s: str, stage: str = "", microbatches: str = "4", microbatch_s: str = "0"
    ) -> list[str]:
        of = (
            [pb.StageMeasured(stage=int(stage), forward_s=float(microbatch_s), backward_s=0.0)]
            if stage
            else []
        )
        measured = pb.RankMeasured(
            step=9,
            steps=5,
            microbatches=int(microbatches),
            step_s=float(step_s),
            update_s=0.0,
            stages=of,
        )
        return self.step(pb.MeasureRequest(**self.sender(rank), measured=measured))

    def request(self, kind: Any, **words: str) -> Any:
        """The request with these fields. Its incarnation is by default what joined the rank last."""
        request = kind()
        if "rank" in words and "incarnation" in fields_of(kind):
            request = kind(**self.sender(words["rank"], words.pop("inc", "")))
        for name, word in words.items():
            field = fields_of(kind)[WORDS.get(name, name)]
            if is_repeated(field):
                getattr(request, field.name).extend(map(int, word.split(",")))
            elif field.type == field.TYPE_BOOL:
                setattr(request, field.name, word == "yes")
            else:
                setattr(request, field.name, word if field.type == field.TYPE_STRING else int(word))
        return request

    def do_ready(self, rank: str, of: str = "3", **words: str) -> list[str]:
        return self.step(self.request(pb.ReadyRequest, **{"rank": rank, "of": of, "stages": rank, **words}))

    def do_report(self, snapshots: str = "", **words: str) -> list[str]:
        """`snapshots`: rank@version, …"""
        report = self.request(pb.ReportRequest, **({"exact": "yes"} if "undo_to" in words else {}) | words)
        report.has_state = "version" in words
        for held in filter(None, snapshots.split(",")):
            of, _, at = held.partition("@")
            report.snapshots.add(rank=int(of), version=int(at))
        return self.step(report)

    def do_rehearsals(self) -> list[str]:
        """As people are told of them, and from where steps are recorded."""
        assert self.job is not None
        view = view_of(self.job.row)
        recorded = [
            f"rank {known.rank} records from version {known.recorded}"
            for known in view.rehearsals
            if known.HasField("recorded")
        ]
        return [*rehearsal_words(view), *recorded]

    def do_stop(self, run: str, reason: str = "SIGTERM on h") -> list[str]:
        return self.step(pb.StopRequest(run=run, reason=reason))

    def do_unsaved(
        self, rank: str, version: str, unsaved: str, generation: str = "1", reason: str = "no space"
    ) -> list[str]:
        """A heartbeat of a rank that cannot write a checkpoint."""
        self.versions[int(rank)] = int(version)
        said = pb.UnsavedCheckpoint(version=int(unsaved), generation=int(generation), reason=reason)
        return self.step(pb.HeartbeatRequest(**self.sender(rank), version=int(version), unsaved=said))

    def do_beat(self, rank: str, version: str, **words: str) -> list[str]:
        self.versions[int(rank)] = int(version)
        return self.step(self.request(pb.HeartbeatRequest, rank=rank, version=version, **words))

    def do_exited(self, rank: str, **words: str) -> list[str]:
        incarnation = words.pop("inc", self.incarnations.get(int(rank), ""))
        exited = self.request(pb.ExitRequest, rank=rank, **words)
        exited.incarnation = incarnation
        return self.step(exited)

    def do_given_up(self, rank: str) -> list[str]:
        return self.step(pb.ExitRequest(rank=int(rank), incarnation="", pid=0, exit_code=0, given_up=True))

    def do_unfit(self, rank: str, reason: str) -> list[str]:
        return self.step(pb.ExitRequest(rank=int(rank), incarnation="", pid=0, exit_code=0, unfit=reason))

    # --- log servers ---

    def do_fenced(self, generation: str) -> list[str]:
        return self.step(m.LogsFenced(generation=int(generation)))

    def do_reset(self, generation: str) -> list[str]:
        return self.step(m.LogsReset(generation=int(generation)))

    def do_blocked(self, generation: str, server: str, reason: str, given_up: str = "") -> list[str]:
        return self.step(
            m.LogsBlocked(
                generation=int(generation), address=server, reason=reason, given_up=given_up == "yes"
            )
        )

    def do_outdated(self, generation: str, reason: str, server: str = "") -> list[str]:
        return self.step(m.LogsRefused(generation=int(generation), reason=reason, address=server))

    def do_inventory(self, generation: str, **streams: str) -> list[str]:
        assert self.job is not None
        servers: dict[str, list[StreamSummary]] = {address: [] for address in self.job.row.addresses()}
        for name, steps in streams.items():
            where, _, stream = name.rpartition("/")
            if steps == "corrupt":
                summary = StreamSummary(stream=stream, records=9, corrupt=True, reason="a checksum differs")
            else:
                first, last = map(int, steps.split("-"))
                summary = StreamSummary(stream=stream, records=9, first_step=first, last_step=last)
            for address in [where] if where else servers:
                servers[address].append(summary)
        return self.step(m.InventoryTaken(generation=int(generation), servers=servers))

    def do_heard(self, server: str) -> list[str]:
        return self.step(m.LogHeard(address=server))

    def do_logs(self, lost: str = "", add: str = "", host: str = "") -> list[str]:
        return self.step(pb.ChangeLogServersRequest(lost=lost, add=add, add_host=host))

    def do_places(self) -> list[str]:
        """Where everything is, as the View says."""
        assert self.job is not None
        view = view_of(self.job.row)
        out = [
            f"{place.address} on {place.host}" + (f", lost: {place.lost}" if place.lost else "")
            for place in view.log_places
        ]
        whole = {
            rank: [copy.whole_from for copy in logs.copies] for rank, logs in self.job.row.placement.items()
        }
        for logs in view.log_copies:
            begins = ", ".join(
                f"{address} from {'?' if begin is None else begin}"
                for address, begin in zip(logs.servers, whole[logs.rank], strict=True)
            )
            out.append(f"rank {logs.rank}: {begins}")
        gaps = unreplaced(self.job.row)
        return [*out, f"not replaced: {gaps}"] if gaps else out

    def do_pressed(self, server: str, trimmed: str, reason: str) -> list[str]:
        return self.step(m.LogsPressed(address=server, reason=reason, trimmed_below_step=int(trimmed)))

    # --- time, crashes ---

    def do_beats(self, ranks: str) -> list[str]:
        self.beats = [int(rank) for rank in ranks.split(",") if rank]
        return []

    def do_hears(self, servers: str = "") -> list[str]:
        self.hears = [server for server in servers.split(",") if server]
        return []

    def do_wait(self, seconds: str) -> list[str]:
        out = []
        until = self.now + float(seconds)
        while self.now < until:
            self.now += 0.5
            out += self.step(m.Tick())
            for rank in self.beats:
                out += self.step(
                    pb.HeartbeatRequest(**self.sender(str(rank)), version=self.versions.get(rank, 0))
                )
            for server in self.hears:
                out += self.step(m.LogHeard(address=server))
        return out

    def do_stall(self, seconds: str) -> list[str]:
        self.now += float(seconds)
        return self.step(m.Tick())

    def do_crash(self) -> list[str]:
        self.job = Job(read(self.durable), TIMING, self.now, stored=True)
        assert encode(self.job.row) == self.durable
        return [_view(self.job.row), *self.carry_out(self.job.resume())]

    def do_status(self) -> list[str]:
        assert self.job is not None
        ages = [f"rank {rank} {self.job.leases.age_s(rank, self.now):.1f} s" for rank in self.job.row.holders]
        out = [f"heard: {', '.join(ages)}"]
        for rank, unsaved in self.job.checkpoints.unsaved.items():
            out.append(f"rank {rank} cannot write version {unsaved.version}: {unsaved.reason}")
        for one in self.job.suspicions.all(self.job.row, self.now):
            out.append(f"suspicion of rank {one.rank}, {one.age_s:.1f} s: {one.reason}")
        return out

    # --- ---

    def step(self, command: m.Command) -> list[str]:
        assert self.job is not None
        before = encode(self.job.row)
        try:
            effects = self.job.step(command, self.now)
        except Refusal:
            assert encode(self.job.row) == before, "a refused command has changed the row"
            raise
        return self.carry_out(effects)

    def carry_out(self, effects: list[m.Effect]) -> list[str]:
        assert self.job is not None
        out = []
        for effect in effects:
            match effect:
                case m.Persist():
                    write_changes(self.job, self.durable)
                    entered = f" {effect.entered}" if effect.entered else ""
                    out.append(f"persist{entered} revision {self.job.row.revision}")
                case m.PublishView():
                    assert self.durable == encode(self.job.row), "published before it was durable"
                    self.show(view_of(self.job.row))
                    out.append(_view(self.job.row))
                case m.Emit():
                    fields = {k: v for k, v in effect.fields.items() if k not in ("job", "generation")}
                    words = " ".join(f"{key}={value}" for key, value in fields.items())
                    out.append(f"event {effect.event} {words}".rstrip())
                case m.TrimLogs():
                    out.append(f"trim below step {effect.below_step}")
                case m.FenceLogs() | m.FetchInventory() | m.ResetLogs():
                    assert self.durable == encode(self.job.row), "an effect before it was durable"
                    out.append(f"{type(effect).__name__} generation {effect.generation}")
        return out

    def show(self, view: pb.View) -> None:
        """Whoever knows the View before, or none, is told this one."""
        assert applied(whole(view), None) == view
        if self.shown is not None:
            assert applied(between(self.shown, view), self.shown) == view
        self.shown = view


def _view(row: JobRow) -> str:
    view = view_of(row)
    parts = [f"view {pb.State.Name(view.state)} generation {view.generation}"]
    parts.append(f"members {','.join(member.incarnation for member in view.members)}")
    if view.fenced:
        parts.append(f"fenced {','.join(member.incarnation for member in view.fenced)}")
    if view.checkpoints:
        parts.append(f"checkpoints {','.join(map(str, view.checkpoints))}")
    if view.checkpoints_from:
        parts.append(f"no incomplete one below {view.checkpoints_from}")
    if view.HasField("checkpoint_at"):
        parts.append(f"checkpoint at {view.checkpoint_at} for {view.checkpoint_reason}")
    if view.reason:
        parts.append(f"because {view.reason}")
    if view.HasField("inexact_since"):
        parts.append(f"not exact since {view.inexact_since}")
    if view.waiting_for:
        parts.append(f"waits for {view.waiting_for}")
    if view.HasField("plan"):
        exactly = "" if view.plan.exact else "not exact: "
        parts.append(f"plan {exactly}{view.plan.reason} (collectives from {view.plan.collective_source})")
    if view.plan.sources and len(view.log_places) > 2:
        where = " ".join(f"{s.stream}={','.join(s.servers)}" for s in view.plan.sources)
        parts.append(f"read {where}")
    return "; ".join(parts)
