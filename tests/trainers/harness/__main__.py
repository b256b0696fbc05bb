"""`scripts/trainers`: runs trainers of this folder and says what came of it, or writes the table of the documents.

``ok`` the verdict of its header; ``MISS`` another one; ``known`` a miss that the header names; ``HELD`` one that it
names and that is none any more. Exit code 1 for MISS and HELD.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.trainers.harness import header, run, table, verdict
from tests.trainers.harness.services import Services

_JOB_NAME_MAX = 64


def _job(name: str) -> str:
    """The end of a long name: a number there tells a place from others, and a job from them."""
    return name[-(_JOB_NAME_MAX - len("-killed")) :].lstrip("-_")


def judge(
    services: Services,
    place: Path,
    trainer: header.Trainer,
    world: int,
    *,
    device: str = "",
) -> tuple[verdict.Verdict, Path]:
    """Undisturbed, then killed at three places. `device`: `probe.ENV_DEVICE`."""
    place.mkdir(parents=True, exist_ok=True)
    name = _job(f"{trainer.name.replace('_', '-')}-{world}-{place.name}")
    calm = run.run(
        services, place / f"{name}-calm", trainer, world, (), f"{name}-calm", rehearsed=True, device=device
    )
    found = verdict.of_undisturbed(calm)
    if found.word != verdict.SAME:
        return found, calm.directory
    kills = run.three_kills(trainer, world)
    job = f"{name}-killed"
    killed = run.run(services, place / job, trainer, world, kills, job, device=device)
    return verdict.of_all_killed(calm, killed, len(kills)), killed.directory


def judge_adaptive(
    services: Services, place: Path, trainer: header.Trainer, *, staggered: bool = False
) -> tuple[verdict.Verdict, Path]:
    """With two replicas of two stages, of which two ranks are lost and nobody comes for them. `staggered`: in that run
    steps go on without their vote; those of the undisturbed run wait."""
    place.mkdir(parents=True, exist_ok=True)
    world, name = 4, _job(f"{trainer.name.replace('_', '-')}-{place.name}")
    calm = run.run(services, place / f"{name}-calm", trainer, world, (), f"{name}-calm", replicas=2)
    found = verdict.of_undisturbed(calm)
    if found.word != verdict.SAME:
        return found, calm.directory
    kills = run.two_losses(trainer, world)
    job = f"{name}-killed"
    killed = run.run(services, place / job, trainer, world, kills, job, replicas=2, staggered=staggered)
    lost = [kill.rank for kill in kills]
    return verdict.of_all_killed(calm, killed, len(kills), lost), killed.directory


def adaptive(
    services: Services, place: Path, trainers: Sequence[header.Trainer], *, keeps: bool, staggered: bool
) -> int:
    """What comes of pipelines whose ranks are lost for good. The number of misses."""
    missed = 0
    for trainer in trainers:
        began = time.monotonic()
        found, where = judge_adaptive(services, place, trainer, staggered=staggered)
        good = found.word == trainer.adaptive
        missed += not good
        word = "ok  " if good else "MISS"
        print(f"{word} {trainer.name} ({time.monotonic() - began:.0f} s): {found}", flush=True)
        if keeps and not good:
            print(f"     {where}", flush=True)
    return missed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/trainers", description=__doc__)
    parser.add_argument("names", nargs="*", help="trainers (default: all)")
    parser.add_argument("--world", type=int, help="number of ranks (default: those in the header)")
    parser.add_argument("--table", action="store_true", help="write the table of docs/trainers.md and stop")
    parser.add_argument(
        "--adaptive", action="store_true", help="pipelines with two replicas, whose ranks are lost for good"
    )
    parser.add_argument(
        "--staggered", action="store_true", help="with --adaptive: steps go on without their vote"
    )
    parser.add_argument("--keep", metavar="DIR", help="keep what the runs leave there")
    arguments = parser.parse_args(argv)
    if arguments.table:
        table.write()
        return 0
    wanted = [t for t in header.trainers() if not arguments.names or t.name in arguments.names]
    if unknown := set(arguments.names) - {t.name for t in wanted}:
        parser.error(f"no such trainer: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    missed = 0
    with tempfile.TemporaryDirectory(prefix="swift-trainers-", ignore_cleanup_errors=True) as temporary:
        place = Path(arguments.keep or temporary).resolve()
        with Services(place / "services") as services:
            if arguments.adaptive:
                keeps = bool(arguments.keep)
                pipelines = [trainer for trainer in header.pipelines() if trainer in wanted]
                return (
                    1
                    if adaptive(
                        services, place / "adaptive", pipelines, keeps=keeps, staggered=arguments.staggered
                    )
                    else 0
                )
            for trainer in wanted:
                for world in [arguments.world] if arguments.world else trainer.worlds:
                    began = time.monotonic()
                    found, where = judge(services, place / "runs", trainer, world)
                    took = time.monotonic() - began
                    expected = trainer.expected.get(world) or trainer.expected[max(trainer.worlds)]
                    good = found.word == expected.verdict and expected.says in found.why
                    known = world in trainer.misses
                    missed += good == known
                    word = ("HELD" if good else "known") if known else ("ok  " if good else "MISS")
                    print(f"{word} {trainer.name} x{world} ({took:.0f} s): {found}", flush=True)
                    if not good and arguments.keep:
                        print(f"     {where}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
