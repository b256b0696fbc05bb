"""`scripts/hostile`: a job appends at a fixed pace, and its server is attacked meanwhile in every known way.

    quiet     a quarter of the time
    hostile   every kind of attack of `tests.hostile.clients` at once, by a process with low priority
              (one after the other, every half minute, so that what else the machine does meets both alike)
    between   the job reads every record that it has made since, and lets them be trimmed, as after a checkpoint
    then      SIGTERM while the attackers are connected, a start on the same directory, and what is left is read

PASS: the median and the 99th percentile of the time to an acknowledgement are at most twice the quiet ones, memory is
flat, the server ends within its grace, and no acknowledged record is lost or differs. INCONCLUSIVE: every
other quiet phase differs from the rest by as much itself, or too little was seen.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser, add_json
from swift_ft.credentials import ENV_TOKEN_FILE
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.log import admin
from swift_ft.log.protocol import Fsync
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey
from swift_ft.tokens import Role, SigningKey, new_key, write_file
from tests.hostile.clients import ATTACKS
from tests.hostile.clients import JOB as HOSTILE
from tests.log_client import LogWriter
from tests.soak import memory as soak_memory
from tests.soak.memory import Rule, Sample
from tests.soak.processes import SERVER, Server, end, judge_in_place, rss_bytes

JOB, STREAM = "serving", "s0.F"
PACE_S = 0.02
BODY_BYTES = 4096
RATIO_MAX = 2.0
CYCLE_S = 30.0
QUIET_PART = 0.25
STOP_S_MAX = 10.0
CALL_S = 30.0
RECORDS_MAX = 20_000
"""Of a job: so that the hostile one is full before memory is judged."""
KEPT_STEPS = 100
"""Of the serving job, when it is trimmed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostileConfig:
    """Settings of one run. UsageError: a time is not positive, or an attack is not known."""

    seconds: float
    tokens: bool = False
    """Every call needs a token; the attackers have one of another job, with every role."""
    fsync: str = Fsync.ALWAYS.value
    pause_s: float = 1.0
    """Between two rounds of a kind of attack."""
    attacks: tuple[str, ...] = ()
    """Only these; none: all."""
    server: tuple[str, ...] = SERVER
    memory: Rule = field(default_factory=lambda: Rule(warm_up_s=60.0, thirds_percent_max=25.0))

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.pause_s < 0:
            raise UsageError("--seconds and --pause must be positive")
        known = [attack.__name__ for attack in ATTACKS]
        for name in self.attacks:
            if name not in known:
                raise UsageError(f"--attack {name}: there is none; there are: {', '.join(known)}")

    @property
    def cycles(self) -> int:
        return max(1, round(self.seconds / CYCLE_S))

    @property
    def quiet_s(self) -> float:
        """Of each quiet phase: there is one more of them than there are hostile ones."""
        return QUIET_PART * self.seconds / (self.cycles + 1)

    @property
    def hostile_s(self) -> float:
        return (1 - QUIET_PART) * self.seconds / self.cycles


@dataclass(slots=True)
class Seen:
    """What came of it."""

    quiet_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """Every other phase in one of them."""
    hostile_s: list[float] = field(default_factory=list)
    memory: list[Sample] = field(default_factory=list)
    attacks: dict[str, Any] = field(default_factory=dict)
    stop_s: float = 0.0
    stop_code: int = 0
    lost: int = 0

    def add_attacks(self, attacks: dict[str, Any]) -> None:
        for name, did in attacks.items():
            known = self.attacks.setdefault(name, {"rounds": 0, "cut_off": 0, "answers": {}})
            known["rounds"] += did["rounds"]
            known["cut_off"] += did["cut_off"]
            for code, count in did["answers"].items():
                known["answers"][code] = known["answers"].get(code, 0) + count


def body_of(step: int) -> bytes:
    return step.to_bytes(8, "little") * (BODY_BYTES // 8)


class Serving:
    """The job that wants its due."""

    def __init__(self, server: Server, seen: Seen) -> None:
        self._server = server
        self._seen = seen
        admin.fence(server.address, JOB, 1, CALL_S)
        self._writer = LogWriter([server.address], JOB, 1)
        self.steps = 0
        self._kept = 0
        self._sampled_at = 0.0
        self._began = time.monotonic()

    def append(self, seconds: float, took_s: list[float]) -> None:
        """One record after the other, each on its time, or at once if the last one was late."""
        begin = time.monotonic()
        due = begin
        while due < begin + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            sent = time.monotonic()
            self._writer.append(
                STREAM, RecordKey(self.steps, 0, 0), "uint8", (BODY_BYTES,), body_of(self.steps)
            )
            self._writer.flush(CALL_S)
            took_s.append(time.monotonic() - sent)
            self.steps += 1
            due = max(due + PACE_S, time.monotonic())
            self._sample()

    def _sample(self) -> None:
        now = time.monotonic()
        if now >= self._sampled_at + 1.0:
            self._sampled_at = now
            size = rss_bytes(self._server.pid)
            if size is not None:
                self._seen.memory.append(Sample(now - self._began, self._server.pid, size))

    def checkpoint(self) -> None:
        """Reads what is there, and has most of it trimmed."""
        self._seen.lost += self._lost()
        kept = max(self._kept, self.steps - KEPT_STEPS)
        admin.trim(self._server.address, JOB, kept, CALL_S)
        self._kept = kept

    def _lost(self) -> int:
        """Of all that was acknowledged and is not trimmed."""
        reader = LogReader([self._server.address], JOB)
        with closing(reader), closing(reader.follow(STREAM, self._kept)) as cursor:
            lost = 0
            for step in range(self._kept, self.steps):
                record = cursor.get(RecordKey(step, 0, 0), CALL_S, lambda: False)
                lost += bytes(record.body) != body_of(step)
            return lost

    def close(self) -> None:
        self._writer.close(CALL_S)


def run(config: HostileConfig, directory: Path) -> Seen:
    """ServiceError: it could not be run, or the server does not answer."""
    seen = Seen()
    flags, token_file = ["--job-records-max", str(RECORDS_MAX), "--fsync", config.fsync], ""
    if config.tokens:
        signing, verifying = new_key(directory / "keys")
        key = SigningKey.load(signing, "--key")
        lifetime_s = config.seconds + 3600
        for job in (JOB, HOSTILE):
            token = key.mint(job, list(Role), lifetime_s)
            write_file(directory / f"{job}.token", token.encode(), secret=True)
        flags += ["--token-keys", str(verifying.parent)]
        token_file = str(directory / f"{HOSTILE}.token")
        os.environ[ENV_TOKEN_FILE] = str(directory / f"{JOB}.token")
    server = Server(directory, [*config.server, *flags])
    attackers: list[subprocess.Popen[str]] = []

    def attack(seconds: float) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "tests.hostile.clients",
            server.address,
            f"{seconds:.1f}",
        ]
        command += [str(config.pause_s), token_file, ",".join(config.attacks)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        attackers.append(process)
        return process

    try:
        server.begin()
        server.wait()
        serving = Serving(server, seen)
        serving.append(min(5.0, config.quiet_s), [])  # until everything has been imported and connected
        for number in range(config.cycles):
            serving.append(config.quiet_s, seen.quiet_s[number % 2])
            process = attack(config.hostile_s)
            serving.append(config.hostile_s, seen.hostile_s)
            while process.poll() is None:  # the last rounds
                serving.append(PACE_S, seen.hostile_s)
            output, _ = process.communicate()
            seen.add_attacks(json.loads(output or "{}"))
            serving.checkpoint()
        serving.append(config.quiet_s, seen.quiet_s[config.cycles % 2])
        serving.close()
        attack(STOP_S_MAX)
        time.sleep(2.0)
        began = time.monotonic()
        seen.stop_code = server.stop(CALL_S)
        seen.stop_s = time.monotonic() - began
        server.begin()
        server.wait()
        serving.checkpoint()
        return seen
    finally:
        for process in attackers:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        server.close()


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def judge(config: HostileConfig, seen: Seen) -> dict[str, Any]:
    """The verdict of a run (PASS, FAIL or INCONCLUSIVE), its reason, and the numbers that it rests on."""
    first_half, second_half = seen.quiet_s
    quiet = [*first_half, *second_half]
    phases = {
        "quiet, one half": first_half,
        "quiet, other half": second_half,
        "quiet": quiet,
        "hostile": seen.hostile_s,
    }
    ms = {
        name: {
            "count": len(values),
            "median_ms": 1e3 * statistics.median(values) if values else 0.0,
            "p99_ms": 1e3 * percentile(values, 0.99),
            "worst_ms": 1e3 * max(values, default=0.0),
        }
        for name, values in phases.items()
    }
    ratios = {
        what: ms["hostile"][what] / ms["quiet"][what] if ms["quiet"][what] else 0.0
        for what in ("median_ms", "p99_ms")
    }
    halves = {
        what: max(both) / max(1e-9, min(both))
        for what in ("median_ms", "p99_ms")
        for both in [(ms["quiet, one half"][what], ms["quiet, other half"][what])]
    }
    memory = soak_memory.judge("log server", seen.memory, config.memory)
    silent = sorted(name for name, did in seen.attacks.items() if not did["rounds"])
    slow = [what for what, ratio in ratios.items() if ratio > RATIO_MAX]
    if seen.lost:
        verdict, reason = "FAIL", f"{seen.lost} acknowledged records are lost or differ"
    elif seen.stop_code or seen.stop_s > STOP_S_MAX:
        verdict, reason = "FAIL", f"SIGTERM: exit code {seen.stop_code} after {seen.stop_s:.1f} s"
    elif memory.flat is False:
        growth = f"{memory.percent_per_minute:+.1f} % a minute, {memory.thirds_percent:+.0f} % by thirds"
        verdict, reason = "FAIL", f"memory is not flat: {growth}"
    elif slow and all(halves[what] < RATIO_MAX for what in slow):
        slower = ", ".join(f"{what.removesuffix('_ms')} x {ratios[what]:.2f}" for what in slow)
        verdict, reason = "FAIL", f"appends are slower than twice the quiet ones: {slower}"
    elif slow:
        verdict, reason = "INCONCLUSIVE", "the quiet halves differ by more than twice themselves"
    elif not seen.attacks or silent:
        verdict, reason = "INCONCLUSIVE", f"these attacks made no round: {', '.join(silent) or 'all'}"
    elif memory.flat is None:
        verdict, reason = "INCONCLUSIVE", "too little was seen of the memory: give more --seconds"
    else:
        verdict, reason = "PASS", "appends keep their pace, memory is flat, nothing is lost"
    return {
        "verdict": verdict,
        "reason": reason,
        "seconds": config.seconds,
        "tokens": config.tokens,
        "pause_s": config.pause_s,
        "fsync": config.fsync,
        "appends": ms,
        "ratio": ratios,
        "quiet_halves_ratio": halves,
        "memory_rule": config.memory.words(),
        "memory": asdict(memory),
        "attacks": seen.attacks,
        "stop_s": seen.stop_s,
        "records": len(quiet) + len(seen.hostile_s),
        "lost": seen.lost,
    }


def make_parser() -> Parser:
    parser = Parser(
        prog="scripts/hostile",
        description="A job's appends while its log server is attacked in every known way, over the quiet ones.",
    )
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="default %(default)s")
    parser.add_argument(
        "--tokens", action="store_true", help="calls need tokens; the attackers have one of another job"
    )
    parser.add_argument(
        "--fsync",
        choices=[policy.value for policy in Fsync],
        default=Fsync.ALWAYS.value,
        help="of the server",
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=1.0,
        metavar="S",
        help="between two rounds of a kind; default %(default)s",
    )
    parser.add_argument(
        "--attack", action="append", default=[], metavar="KIND", help="only this one; may be given again"
    )
    parser.add_argument("--directory", type=Path, metavar="DIR", help="for the log (default: temporary)")
    add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    config = HostileConfig(
        seconds=arguments.seconds,
        tokens=arguments.tokens,
        fsync=arguments.fsync,
        pause_s=arguments.pause,
        attacks=tuple(arguments.attack),
    )

    def judged(directory: Path) -> dict[str, Any]:
        try:
            return judge(config, run(config, directory))
        except UsageError:
            raise
        except SwiftError as error:  # a server that does not answer the serving job is what this looks for
            raise ServiceError(f"FAIL: the serving job got no answer: {error}") from error

    return judge_in_place(arguments, judged)


if __name__ == "__main__":
    end(main)
