"""`scripts/soak`: the log at full rate while its processes are killed, and an account of every record.

    writers  append, flush, and are held back only where the disk would hold more than --disk-mib
    readers  follow each stream, now and then from a random older step on, and compare every body: bit for bit, no
             record missing, none twice. After each kill of the server all that is kept is compared again
    trims    as checkpoints would make them: half of the room is kept, and nothing goes that was not compared
    kills    SIGKILL of the log server (started again on its directory and address), of a writer (a successor under
             the next generation compares what the log has and sends the rest), of both at once. In the middle third
             of the run of writers alone: so the server's memory is seen for longer than between two kills

FAIL: a record that a writer was told is durable cannot be read, or differs; or memory is not flat.
"""

import queue
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser, add_json
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.log import admin
from tests.soak import memory as soak_memory
from tests.soak.memory import Rule, Sample
from tests.soak.processes import SERVER, Message, Rank, Server, end, judge_in_place, rss_bytes
from tests.soak.ranks import FLUSH_STEPS, JOB, PATIENCE_S, RECORD_BYTES, STEP_BYTES

# A soak under way: who runs, what is durable, what was compared, when to trim and whom to kill.

TICK_S, SAMPLE_S = 0.05, 0.5
CALL_TIMEOUT_S = 30.0
KEPT_CHECKPOINTS = 4
"""A window of steps holds so many checkpoints; a trim keeps the steps since the one before the newest."""
RANDOM_READINGS = 0.1
"""This part of the readings begins at a random step that is kept."""
BOTH = "server and writer"
CALM = (1 / 3, 2 / 3)
"""In this part of the run the server is left alone, so that its memory is seen for longer than between two kills."""


class Broken(Exception):
    """The log did not keep its word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakConfig:
    """What is soaked, for how long."""

    seconds: float
    kill_every_s: float
    seed: int = 0
    streams: int = 2
    disk_bytes: int = 2 << 30
    """Of records, at most. Writers wait for a trim before that."""
    server: tuple[str, ...] = SERVER
    """The command of the log server, without flags."""
    memory: Rule = field(default_factory=Rule)

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.kill_every_s <= 0 or self.streams < 1:
            raise UsageError("--minutes and --kill-every must be positive, --writers 1 or more")
        if self.window_steps < 4 * FLUSH_STEPS:
            least = 4 * FLUSH_STEPS * STEP_BYTES * self.streams >> 20
            raise UsageError(f"--disk-mib {self.disk_bytes >> 20} is too little: give at least {least + 1}")

    @property
    def window_steps(self) -> int:
        """How many steps of every stream may be kept, a multiple of `FLUSH_STEPS`."""
        return self.disk_bytes // (STEP_BYTES * self.streams) // FLUSH_STEPS * FLUSH_STEPS


@dataclass(frozen=True, slots=True)
class Kill:
    at_s: float
    what: str


@dataclass(slots=True)
class Account:
    """What was seen. Bytes are of bodies."""

    seconds: float = 0.0
    kills: list[Kill] = field(default_factory=list)
    memory: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    acked_bytes: int = 0
    compared_records: int = 0
    compared_bytes: int = 0
    overtaken: int = 0
    trims: int = 0
    resent: int = 0
    taken_over: int = 0
    generation: int = 0
    held_s: float = 0.0
    kept_bytes_max: int = 0

    def kills_of(self, what: str) -> int:
        return sum(what in kill.what for kill in self.kills)


@dataclass(slots=True)
class _Stream:
    """One stream: steps below `acked` are durable by the writer's word, those below `compared` were read back."""

    name: str
    writer: Rank | None = None
    reader: Rank | None = None
    acked: int = 0
    compared: int = 0
    reading: tuple[int, int, int] | None = None
    """From which step, to which one, and how often the server had been killed."""
    told: dict[str, int] = field(default_factory=dict)
    """The writer's own counts so far."""
    stopped: bool = False


def limit(trimmed: int, window_steps: int) -> int:
    """The step below which writers may write. They go on by whole flushes, but a trim that stops in front of a reading
    stops at any step: without rounding a reader would be sent to steps that nobody will write, and with its reading
    hold up the trim that they need."""
    return (trimmed + window_steps) // FLUSH_STEPS * FLUSH_STEPS


class Soak:
    """``with Soak(...) as soak: soak.run()``. Raises Broken at the first record that is not as it must be."""

    def __init__(self, config: SoakConfig, directory: Path, account: Account) -> None:
        self._config = config
        self._account = account
        self._draw = random.Random(config.seed)
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._server = Server(directory, config.server)
        self._streams = [_Stream(f"s{n}.F") for n in range(config.streams)]
        self._ranks: list[Rank] = []
        self._trimmed = 0
        self._trim_asked = 0
        self._trims_by_itself = False
        """The server may have gone on with a trim, for which a reader had been in its way."""
        self._checkpoints = [0, 0]
        self._bag: list[str] = []
        self._began = 0.0
        self._next_kill_s = self._pause_s()
        self._next_sample_s = 0.0
        self._progress_at = 0.0
        self._server_kills = 0
        self._stopping = False

    def __enter__(self) -> "Soak":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.close()
        self._server.close()

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> None:
        """Runs for the configured seconds, then compares what is left. Raises Broken."""
        self._server.begin()
        self._server.wait()
        self._began = time.monotonic()
        self._new_generation()
        for stream in self._streams:
            stream.reader = self._start(f"reader {stream.name}", "read", stream.name, self._config.seed)
        try:
            while self._now_s < self._config.seconds:
                self._tick(kills=True)
        finally:
            self._account.seconds = self._now_s
        self._finish()

    def _start(self, name: str, role: str, *words: object) -> Rank:
        rank = Rank(name, self._inbox, role, self._server.address, *words)
        self._ranks.append(rank)
        return rank

    # -- one turn ---------------------------------------------------------------------------------------

    def _tick(self, *, kills: bool) -> None:
        for rank, message in self._messages():
            self._take(rank, message)
        if self._now_s >= self._next_sample_s:
            self._sample()
        if not self._server_serves():
            return
        if any(stream.writer is None for stream in self._streams):
            self._new_generation()
        self._trim()
        for stream in self._streams:
            self._read_on(stream)
        if kills and self._now_s >= self._next_kill_s:
            self._kill()
        if self._now_s > self._progress_at + 2 * PATIENCE_S:
            raise Broken(f"the log has acknowledged nothing for {2 * PATIENCE_S:.0f} s")

    def _messages(self) -> Iterator[Message]:
        try:
            yield self._inbox.get(timeout=TICK_S)
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def _server_serves(self) -> bool:
        try:
            return self._server.poll()
        except ServiceError as error:
            raise Broken(str(error)) from None

    def _sample(self) -> None:
        self._next_sample_s = self._now_s + SAMPLE_S
        account = self._account
        pids = {"log server": self._server.pid}
        for stream in self._streams:
            pids |= {rank.name: rank.pid for rank in (stream.writer, stream.reader) if rank is not None}
        for role, pid in pids.items():
            size = rss_bytes(pid)
            if size is not None:
                account.memory[role].append(Sample(self._now_s, pid, size))

    # -- what ranks say -------------------------------------------------------------------------------------

    def _take(self, rank: Rank, message: dict[str, Any]) -> None:
        (stream,) = [stream for stream in self._streams if rank.name.endswith(f" {stream.name}")]
        if "acked" in message:
            self._on_acked(stream, message["acked"])  # by a dead writer too: it was told so before
            if not rank.killed:
                self._on_counts(stream, message)
        elif rank.killed:
            return
        elif "error" in message:
            raise Broken(f"{rank.name}: {message['error']}")
        elif not message:
            if not stream.stopped:
                raise Broken(f"{rank.name} ended by itself")
        elif "stopped" in message:
            stream.stopped = True
        else:
            self._on_reading(stream, message)

    def _on_acked(self, stream: _Stream, step: int) -> None:
        if step <= stream.acked:
            return
        self._account.acked_bytes += (step - stream.acked) * STEP_BYTES
        stream.acked = step
        self._progress_at = self._now_s
        kept = sum(other.acked - self._trimmed for other in self._streams) * STEP_BYTES
        self._account.kept_bytes_max = max(self._account.kept_bytes_max, kept)

    def _on_counts(self, stream: _Stream, message: dict[str, Any]) -> None:
        self._account.held_s += message["held_s"]
        self._account.resent += message["resent"] - stream.told.get("resent", 0)
        self._account.taken_over += message["compared"] - stream.told.get("compared", 0)
        stream.told = message

    def _on_reading(self, stream: _Stream, message: dict[str, Any]) -> None:
        assert stream.reading is not None
        begin, end, server_kills = stream.reading
        stream.reading = None
        self._account.compared_records += message["records"]
        self._account.compared_bytes += message["records"] // len(RECORD_BYTES) * STEP_BYTES
        if "read" in message:
            if message["records"] != (end - begin) * len(RECORD_BYTES):
                raise Broken(f"{stream.name}: {message['records']} records in the steps {begin} to {end - 1}")
            if begin <= stream.compared and server_kills == self._server_kills:
                stream.compared = max(stream.compared, min(end, stream.acked))
        elif self._trim_asked > begin:  # its lease ended with the server
            self._account.overtaken += 1
            self._trims_by_itself = True
        else:
            raise Broken(f"{stream.name}: step {begin} is gone, and nobody trimmed it: {message['reason']}")

    # -- generations, trims, readings ------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return limit(self._trimmed, self._config.window_steps)

    def _new_generation(self) -> None:
        """Fences whoever is dead, lets the living go on, and starts the successors."""
        self._account.generation += 1
        generation = self._account.generation
        self._ask(lambda: admin.fence(self._server.address, JOB, generation, CALL_TIMEOUT_S))
        for stream in self._streams:
            if stream.writer is not None:
                stream.writer.tell(generation=generation)
                continue
            name = f"writer {stream.name}"
            stream.told = {}
            stream.writer = self._start(
                name, "write", stream.name, self._config.seed, generation, stream.acked
            )
            stream.writer.tell(limit=self._limit)

    def _trim(self) -> None:
        """A checkpoint is made as soon as every stream has gone on far enough."""
        oldest = min(stream.acked for stream in self._streams)
        if oldest >= self._checkpoints[-1] + self._config.window_steps // KEPT_CHECKPOINTS:
            self._checkpoints = [self._checkpoints[-1], oldest]
        wanted = min(self._checkpoints[0], *(stream.compared for stream in self._streams))
        if wanted <= self._trimmed and not self._trims_by_itself:
            return
        wanted, self._trims_by_itself = max(wanted, self._trimmed), False
        self._trim_asked = max(self._trim_asked, wanted)
        trimmed = self._ask(lambda: admin.trim(self._server.address, JOB, wanted, CALL_TIMEOUT_S))
        if trimmed > self._trim_asked:
            raise Broken(
                f"asked to drop the steps below {self._trim_asked}, it dropped those below {trimmed}"
            )
        if trimmed <= self._trimmed:
            return  # a reader is there
        self._trimmed = trimmed
        self._account.trims += 1
        for stream in self._streams:
            stream.compared = max(stream.compared, trimmed)
            if stream.writer is not None:
                stream.writer.tell(limit=self._limit)

    def _read_on(self, stream: _Stream) -> None:
        """The next reading: of what was not compared yet, now and then from a random older step on; to a little
        more than is acknowledged, so that the end of it is followed while it is written."""
        end = stream.acked if self._stopping else min(stream.acked + FLUSH_STEPS, self._limit)
        if stream.reading is not None or stream.reader is None or stream.compared >= end:
            return
        begin = stream.compared
        if self._draw.random() < RANDOM_READINGS:
            begin = self._draw.randint(self._trimmed, begin)
        stream.reading = (begin, end, self._server_kills)
        stream.reader.tell(**{"from": begin, "to": end})

    def _ask(self, call: Any) -> Any:
        try:
            return call()
        except SwiftError as error:
            raise Broken(f"the log server answers: {error}") from None

    # -- kills and the end ------------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        return self._draw.uniform(0.75, 1.25) * self._config.kill_every_s

    def _kill(self) -> None:
        if not self._bag:
            self._bag = ["server", "writer", BOTH]
            self._draw.shuffle(self._bag)
        calm_from_s, calm_to_s = (part * self._config.seconds for part in CALM)
        what = "writer" if calm_from_s <= self._now_s < calm_to_s else self._bag.pop()
        self._account.kills.append(Kill(self._now_s, what))
        self._next_kill_s += self._pause_s()
        if "writer" in what:
            stream = self._draw.choice(self._streams)
            assert stream.writer is not None
            stream.writer.kill()
            stream.writer = None
        if "server" in what:
            self._server.kill()
            self._server_kills += 1
            self._compare_again()
            self._server.begin()

    def _compare_again(self) -> None:
        """Whatever is kept must be read again before it is trimmed."""
        for stream in self._streams:
            stream.compared = self._trimmed

    def _finish(self) -> None:
        """Everybody comes to an end; what is kept is compared once more; the server stops as it should."""
        deadline = time.monotonic() + 4 * PATIENCE_S
        while not all(stream.stopped for stream in self._streams):
            for stream in self._streams:
                # Not while its reader waits for more than it has written, nor before it has begun.
                behind = stream.reading is not None and stream.reading[1] > stream.acked
                if stream.writer is not None and not behind:
                    self._stopping = True
                    stream.writer.tell(stop=True)
            self._end_tick(deadline)
        while any(stream.reading is not None for stream in self._streams):
            self._end_tick(deadline)
        self._compare_again()
        while any(stream.compared < stream.acked for stream in self._streams):
            self._end_tick(deadline)
        self._check_inventory()
        code = self._server.stop(CALL_TIMEOUT_S)
        if code != 0:
            raise Broken(f"the log server stopped with exit code {code}: {self._server.last_words()}")

    def _end_tick(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise Broken("the end was not reached: records that were acknowledged do not come")
        self._tick(kills=False)

    def _check_inventory(self) -> None:
        inventories = self._ask(lambda: admin.inventory(self._server.address, JOB, CALL_TIMEOUT_S))
        by_name = {inventory.stream: inventory for inventory in inventories}
        for stream in self._streams:
            inventory = by_name.get(stream.name)
            wanted = stream.acked * len(RECORD_BYTES)
            kept = (stream.acked - self._trimmed) * len(RECORD_BYTES)
            if (
                inventory is None
                or inventory.corrupt
                or (inventory.next_sequence, inventory.records) != (wanted, kept)
            ):
                raise Broken(
                    f"{stream.name}: {kept} records up to {wanted} were acknowledged; the log says {inventory}"
                )


def soak(config: SoakConfig, directory: Path) -> dict[str, Any]:
    """Runs it, and judges. ServiceError: it could not be run."""
    account = Account()
    broken = ""
    with Soak(config, directory, account) as run:
        try:
            run.run()
        except Broken as why:
            broken = str(why)
        except OSError as error:
            raise ServiceError(f"the disk of the soak: {error}; give --directory on another") from error
    return judge(config, account, broken)


def judge(config: SoakConfig, account: Account, broken: str) -> dict[str, Any]:
    """The verdict of a run (PASS, FAIL or INCONCLUSIVE), its reason, and the account. `broken`: what was wrong."""
    memory = soak_memory.judge_all(account.memory, config.memory)
    flat = soak_memory.verdict(memory)
    missing = [what for what in ("server", "writer") if not account.kills_of(what)]
    if broken:
        verdict, reason = "FAIL", broken
    elif flat is False:
        growing = ", ".join(f"{judged.role} {_growth(judged)}" for judged in memory if judged.flat is False)
        verdict, reason = "FAIL", f"memory is not flat: {growing}"
    elif missing:
        verdict, reason = "INCONCLUSIVE", f"no {' and no '.join(missing)} was killed: give more --minutes"
    elif not account.compared_bytes:
        verdict, reason = "INCONCLUSIVE", "nothing was compared"
    elif flat is None:
        verdict, reason = "INCONCLUSIVE", "too little was seen of the memory: give more --minutes"
    else:
        verdict, reason = "PASS", "nothing acknowledged is lost, memory is flat"
    return {
        "verdict": verdict,
        "reason": reason,
        "seed": config.seed,
        "seconds": account.seconds,
        "kills": [asdict(kill) for kill in account.kills],
        "acked_bytes": account.acked_bytes,
        "compared_bytes": account.compared_bytes,
        "compared_records": account.compared_records,
        "overtaken_by_trims": account.overtaken,
        "trims": account.trims,
        "resent_records": account.resent,
        "taken_over_records": account.taken_over,
        "generations": account.generation,
        "held_back": account.held_s / (account.seconds * config.streams) if account.seconds else 0.0,
        "kept_bytes_max": account.kept_bytes_max,
        "rate_mb_s": account.acked_bytes / 1e6 / account.seconds if account.seconds else 0.0,
        "memory_rule": config.memory.words(),
        "memory": [asdict(judged) for judged in memory],
    }


def _growth(judged: soak_memory.Judged) -> str:
    return f"{judged.percent_per_minute:+.1f} % a minute, {judged.thirds_percent:+.0f} % from first to last third"


def make_parser() -> Parser:
    parser = Parser(
        prog="scripts/soak",
        description="Keeps the log at full rate while its processes are killed, and accounts for every record.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="default %(default)s")
    parser.add_argument(
        "--kill-every", type=float, default=20.0, metavar="SECONDS", help="default %(default)s, on average"
    )
    parser.add_argument("--writers", type=int, default=2, metavar="N", help="streams; default %(default)s")
    parser.add_argument(
        "--disk-mib", type=int, default=2048, metavar="N", help="kept records at most; default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of kills and bodies; default %(default)s")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="on the disk to soak (default: temporary)"
    )
    add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    config = SoakConfig(
        seconds=arguments.minutes * 60,
        kill_every_s=arguments.kill_every,
        seed=arguments.seed,
        streams=arguments.writers,
        disk_bytes=arguments.disk_mib << 20,
    )
    return judge_in_place(arguments, lambda directory: soak(config, directory))


if __name__ == "__main__":
    end(main)
