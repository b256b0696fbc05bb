"""`scripts/sweep`: seeded kills at random places of the folder's trainers, as many as are asked for.

A point is one kill that came about. Several share a run, one after the other, and each run is compared with the same
trainer's run without any: bit by bit, losses and all. A seed stands for one run; `--only SEED` does it again.

What is done is appended to the file of `--resume`: stop it (Ctrl-C, SIGTERM) and start it again as often as you like.
A plan that missed is put into tests/trainers/pinned.txt once its cause is found.
Exit codes: 0 all points done and none missed; 1 a miss; 2 usage; 3 stopped before the end.
"""

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.trainers.harness import header, verdict
from tests.trainers.harness.run import Kill, Outcome, Running
from tests.trainers.harness.services import Services

KILLS_MAX = 5
"""In one run."""
RUNS_PER_SERVICES = 40
"""Then log server and coordinator begin anew, so that no run is held up by what all before it have left."""
_KILL = re.compile(r"(\w+)=([\w.]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run: round-trips through its text, which is what a failure is pinned by."""

    trainer: str
    world: int
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        return f"{self.trainer} x{self.world}: " + "; ".join(map(str, self.kills))

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """ValueError: it is none."""
        front, _, rest = text.partition(": ")
        trainer, _, world = front.partition(" x")
        kinds = {"rank": int, "step": int, "microbatch": int, "after": float, "again": int, "place": str}
        kills = [
            Kill(**{name: kinds[name](value) for name, value in _KILL.findall(part)})  # type: ignore[operator]
            for part in rest.split("; ")
        ]
        return cls(trainer=trainer, world=int(world), kills=tuple(kills))


def plan(seed: int, trainers: Sequence[header.Trainer]) -> Plan:
    """The same for the same seed and trainers."""
    dice = random.Random(seed)
    trainer = dice.choice(trainers)
    world = dice.choice(_worlds(trainer))
    places = sorted({*trainer.kills, "tail", "moment", "idle"})
    kills: list[Kill] = []
    step = dice.randint(0, 3)
    for _ in range(dice.randint(3, KILLS_MAX)):
        if step >= trainer.steps - 1:
            break
        rank = dice.randrange(world)
        kills.append(_kill(dice, places, rank, step))
        if dice.random() < 0.2:  # and once more, where its replacement does the step again
            kills.append(Kill(place="tail", rank=rank, step=max(0, step - dice.randint(0, 2)), again=1))
        step += dice.choice((0, 1, 1, 2, 3, 4))
    return Plan(trainer=trainer.name, world=world, kills=tuple(kills))


def _worlds(trainer: header.Trainer) -> list[int]:
    """Those that a run of it is not refused with."""
    return [world for world, each in trainer.expected.items() if each.verdict != verdict.REFUSED]


def _kill(dice: random.Random, places: Sequence[str], rank: int, step: int) -> Kill:
    place = dice.choice(places)
    microbatch = dice.randrange(4) if place in ("forward", "backward") else 0
    after = round(dice.uniform(0.02, 1.3), 3) if place == "moment" else 0.0
    return Kill(place=place, rank=rank, step=step, microbatch=microbatch, after=after)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A run that is over."""

    seed: int
    plan: str
    points: int
    """Kills that came about."""
    word: str
    why: str
    good: bool
    seconds: float


def report(done: Iterable[Done]) -> dict[str, Any]:
    """What `--json` writes."""
    runs = list(done)
    missed = [run for run in runs if not run.good]
    return {
        "points": sum(run.points for run in runs),
        "misses": len(missed),
        "refused": sum(run.points for run in runs if run.good and run.word == verdict.REFUSED),
        "named": sum(run.points for run in runs if run.good and run.word == verdict.NAMED),
        "runs": len(runs),
        "seeds_missed": sorted(run.seed for run in missed),
        "missed": [f"{run.plan} -> {run.word}: {run.why}" for run in missed],
    }


def read(path: Path) -> list[Done]:
    """What was done before. A torn last line was not."""
    if not path.exists():
        return []
    return [
        Done(**json.loads(line)) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
    ]


class Sweep:
    """Lanes of runs beside each other, from one thread."""

    def __init__(self, place: Path, lanes: int) -> None:
        self._place = place
        self._lanes = lanes
        self._calm: dict[tuple[str, int], Outcome | None] = {}
        self._trainers = {trainer.name: trainer for trainer in header.trainers()}
        self._services: Services | None = None
        self._number = 0

    def run(self, plans: Iterator[tuple[int, Plan]]) -> Iterator[Done]:
        """Each as it ends. Whatever is under way is killed when this is closed."""
        running: list[tuple[int, Plan, Running]] = []
        batch, more = 0, True
        try:
            while more or running:
                while more and len(running) < self._lanes and batch < RUNS_PER_SERVICES:
                    following = next(plans, None)
                    more = following is not None
                    if following is not None:
                        running.append((*following, self._start(*following)))
                        batch += 1
                ended = [(each, found) for each in running if (found := each[2].poll()) is not None]
                for each, found in ended:
                    running.remove(each)
                    if (finished := self._finish(each[0], each[1], found, running)) is not None:
                        yield finished
                if batch >= RUNS_PER_SERVICES and not running:
                    self._renew()
                    batch = 0
                time.sleep(0.005)
        finally:
            for each in running:
                each[2].kill()
            self.close()

    def close(self) -> None:
        if self._services is not None:
            self._services.__exit__(None, None, None)
            shutil.rmtree(self._services.directory, ignore_errors=True)
            self._services = None

    def _renew(self) -> None:
        self.close()

    def _start(self, seed: int, plan: Plan) -> Running:
        """Without kills first, and rehearsed, if that has not been done yet: `_finish` goes on from there."""
        calm = (plan.trainer, plan.world) not in self._calm
        kills = () if calm else plan.kills
        if self._services is None:
            self._services = Services(self._place / f"services{self._number}")
            self._services.__enter__()
        self._number += 1
        job = f"s{seed}-{self._number}"
        trainer = self._trainers[plan.trainer]
        place = self._place / job
        return Running(self._services, place, trainer, plan.world, kills, job, rehearsed=calm)

    def _finish(
        self, seed: int, plan: Plan, found: Outcome, running: list[tuple[int, Plan, Running]]
    ) -> Done | None:
        key, wanted = (plan.trainer, plan.world), self._trainers[plan.trainer].expected[plan.world].verdict
        calm = self._calm.get(key)
        if calm is None:
            judged = verdict.of_undisturbed(found)
            if judged.word == verdict.SAME:
                self._calm[key] = found
                running.append((seed, plan, self._start(seed, plan)))
                shutil.rmtree(found.directory, ignore_errors=True)
                return None
        else:
            judged = verdict.of_killed(calm, found, len(plan.kills))
        good = judged.word in (verdict.SAME, wanted)
        if good:
            shutil.rmtree(found.directory, ignore_errors=True)
        return Done(
            seed=seed,
            plan=str(plan),
            points=found.fired,
            word=judged.word,
            why=judged.why[:400],
            good=good,
            seconds=round(found.seconds, 1),
        )


def _plans(seed: int, skip: set[int]) -> Iterator[tuple[int, Plan]]:
    trainers = [trainer for trainer in header.trainers() if _worlds(trainer) and not trainer.misses]
    while True:
        if seed not in skip:
            yield seed, plan(seed, trainers)
        seed += 1


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=100, metavar="N", help="kills in all (default 100)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first run's seed (default 0)")
    parser.add_argument("--resume", metavar="PATH", help="go on from what this file says, and append to it")
    parser.add_argument("--json", metavar="PATH", help="write the figures there")
    parser.add_argument("--only", action="append", default=[], metavar="SEED|PLAN", help="this run alone")
    parser.add_argument(
        "--lanes", type=int, default=2, metavar="N", help="runs beside each other (default 2)"
    )
    parser.add_argument("--directory", metavar="DIR", help="where runs work; those that missed stay there")
    arguments = parser.parse_args(argv)
    if arguments.points < 1 or arguments.lanes < 1:
        parser.error("--points and --lanes must be at least 1")
    signal.signal(signal.SIGTERM, _stop)
    done = read(Path(arguments.resume)) if arguments.resume else []
    stopped = False
    with tempfile.TemporaryDirectory(prefix="swift-sweep-", ignore_cleanup_errors=True) as temporary:
        place = Path(arguments.directory or temporary).resolve()
        if arguments.only:
            fixed = [_named(word) for word in arguments.only]
            plans, wanted = iter(fixed), None
        else:
            plans, wanted = _plans(arguments.seed, {run.seed for run in done}), arguments.points
        try:
            _carry_out(Sweep(place, arguments.lanes), plans, done, wanted, arguments.resume)
        except KeyboardInterrupt:
            stopped = True
    figures = report(done)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps({name: value for name, value in figures.items() if name != "missed"}))
    if figures["misses"]:
        return 1
    return 3 if stopped else 0


def _named(word: str) -> tuple[int, Plan]:
    if not word.isdigit():
        return 0, Plan.parse(word)
    return next(_plans(int(word), set()))


def _carry_out(
    sweep: Sweep,
    plans: Iterator[tuple[int, Plan]],
    done: list[Done],
    wanted: int | None,
    resume: str | None,
) -> None:
    """Until there are so many points; None: until there are no more plans."""
    if wanted is not None and sum(each.points for each in done) >= wanted:
        return
    runs = sweep.run(plans)
    try:
        for finished in runs:
            done.append(finished)
            if resume:
                with Path(resume).open("a") as file:
                    file.write(json.dumps(asdict(finished)) + "\n")
            points = sum(each.points for each in done)
            if not finished.good:
                print(f"seed {finished.seed}: {finished.plan}\n  {finished.word}: {finished.why}", flush=True)
            elif len(done) % 10 == 0:
                print(f"{points} points in {len(done)} runs", flush=True)
            if wanted is not None and points >= wanted:
                return
    finally:
        runs.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
