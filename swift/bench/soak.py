"""`swift-ft bench soak`: the log at full rate while its processes are killed, and an account of every record.

    writers  append, flush, and are held back only where the disk would hold more than --disk-mib
    readers  follow each stream, now and then from a random older step on, and compare every body: bit for bit, no
             record missing, none twice. After each kill of the server all that is kept is compared again
    trims    as checkpoints would make them: half of the room is kept, and nothing goes that was not compared
    kills    SIGKILL of the log server (started again on its directory and address), of a writer (a successor under
             the next generation compares what the log has and sends the rest), of both at once. In the middle third
             of the run of writers alone: so the server's memory is seen for longer than between two kills

FAIL: a record that a writer was told is durable cannot be read, or differs; or memory is not flat.
"""

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from swift.arguments import Parser
from swift.bench import output, soak_memory
from swift.bench.soak_memory import Rule
from swift.bench.soak_plot import draw
from swift.bench.soak_processes import SERVER
from swift.bench.soak_ranks import FLUSH_STEPS, STEP_BYTES
from swift.bench.soak_run import Account, Broken, Soak
from swift.errors import ServiceError, UsageError

EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


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
        "series": account.series(),
    }


def _growth(judged: soak_memory.Judged) -> str:
    return f"{judged.percent_per_minute:+.1f} % a minute, {judged.thirds_percent:+.0f} % from first to last third"


def table(result: dict[str, Any]) -> str:
    """The result as text: what was acknowledged, compared and killed, and a line of memory for each role."""
    kills = [kill["what"] for kill in result["kills"]]
    counted = ", ".join(f"{kills.count(what)} x {what}" for what in dict.fromkeys(kills)) or "none"
    lines = [
        f"{result['machine']}; {result['seconds']:.0f} s, seed {result['seed']}",
        "",
        f"{'acknowledged':<22}{result['acked_bytes'] / 1e9:9.1f} GB, {result['rate_mb_s']:.0f} MB/s over all; "
        f"writers held back {100 * result['held_back']:.0f} % of the time for the disk",
        f"{'compared bit for bit':<22}{result['compared_bytes'] / 1e9:9.1f} GB, {result['compared_records']} records; "
        f"{result['overtaken_by_trims']} readings overtaken by a trim",
        f"{'killed':<22}{len(kills):9d} times: {counted}",
        f"{'sent again, taken over':<22}{result['resent_records']:9d} records, {result['taken_over_records']} records",
        f"{'on disk at most':<22}{result['kept_bytes_max'] / 1e9:9.1f} GB of records; {result['trims']} trims",
        "",
        f"{'memory':<22}{'median MiB':>10}{'% a minute':>12}{'last third':>12}{'seen s':>8}{'lives':>7}",
    ]
    for judged in result["memory"]:
        words = {True: "flat", False: "grows", None: "not judged"}[judged["flat"]]
        lines.append(
            f"{judged['role']:<22}{judged['median_bytes'] / (1 << 20):10.0f}{judged['percent_per_minute']:+12.2f}"
            f"{judged['thirds_percent']:+11.1f}%{judged['observed_s']:8.0f}{judged['lives']:7d}  {words}"
        )
    return "\n".join([*lines, result["memory_rule"], "", f"{result['verdict']}: {result['reason']}"])


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft bench soak",
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
    output.add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw memory, rate and kills there, as SVG")
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
    for flag, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(f"{flag} {path}: give a file in a directory that exists")
    on, began = output.machine(), time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its processes end with it
    try:
        with output.place(arguments.directory) as directory:
            judged = soak(config, Path(directory))
    except KeyboardInterrupt:
        print(f"swift: stopped after {time.monotonic() - began:.0f} s; nothing is judged", file=sys.stderr)
        return EXIT_CODES["INCONCLUSIVE"]
    result = {"machine": on, **judged}
    print(table(result))
    output.write_json(arguments.json, result)
    if arguments.plot is not None:
        output.write_text(arguments.plot, draw(result))
    return EXIT_CODES[result["verdict"]]
