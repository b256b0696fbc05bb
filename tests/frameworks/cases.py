"""`python -m tests.frameworks.cases FRAMEWORK PATH`, in the framework's environment: its cases, a line each."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tests.frameworks.environment import INTEGRATIONS, PINS, ROOT
from tests.trainers import probe
from tests.trainers.harness import header, run, verdict
from tests.trainers.harness.header import Trainer
from tests.trainers.harness.run import Kill, Outcome
from tests.trainers.harness.services import Services

TRAINERS = Path(__file__).parent
KILLS_MAX = 4
"""In one run."""
CHECKPOINT_EVERY = 5


def kills(trainer: Trainer, world: int) -> dict[str, list[Kill]]:
    """The places of the trainer's header, in turn. The first kill is in the first step, the last one in the last."""
    places = [place for place in trainer.kills if place != "reduce" or world > 1]
    size = -(-len(places) // -(-len(places) // KILLS_MAX))
    runs = [places[begin : begin + size] for begin in range(0, len(places), size)]
    found = {}
    for number, each in enumerate(runs):
        is_last = number == len(runs) - 1
        first, last = (2 if number else 0), trainer.steps - (1 if is_last else 2)
        listed = []
        for index, place in enumerate(each):
            step = first + (last - first) * index // max(1, len(each) - 1)
            if place == "save":  # of the checkpoint behind a step
                step = CHECKPOINT_EVERY * max(1, round((step + 1) / CHECKPOINT_EVERY)) - 1
            if place == "moment":  # told in the time of a step, and the first one takes longer
                step = max(2, step)
            rank = (world - 1 - index) % world
            listed.append(Kill(place=place, rank=rank, step=step, after=0.4 * (place == "moment")))
        found[f"in turn {number}"] = listed
    if world > 1 and trainer.replicas:
        found["at once"] = [Kill(place="tail", rank=rank, step=trainer.steps // 2) for rank in range(world)]
    return found


def tried(services: Services, place: Path, trainer: Trainer, world: int) -> Iterator[dict[str, object]]:
    """Yields a row for each list of kills, beside one run without."""
    name = f"{trainer.name.replace('_', '-')}-{world}"
    job = f"{name}-calm"
    calm = run.run(services, place / job, trainer, world, (), job, rehearsed=not trainer.parallelism)
    expected, undisturbed = trainer.expected[world], verdict.of_undisturbed(calm)
    killed_so = kills(trainer, world) if undisturbed.word == verdict.SAME else {"": []}
    for number, (how, each) in enumerate(killed_so.items()):
        found, lost = undisturbed, Lost()
        if each:
            job = f"{name}-killed-{number}"
            killed = run.run(services, place / job, trainer, world, each, job)
            found, lost = verdict.of_all_killed(calm, killed, len(each)), lost_in(killed.directory)
        yield {
            "trainer": trainer.name,
            "topology": trainer.parallelism or (f"{world} x data" if world > 1 else "1"),
            "kill": _words(how, each),
            "bitwise_equal": found.word == verdict.SAME,
            "verdict": found.word,
            "why": found.why,
            "expected": found.word == expected.verdict and expected.says in found.why,
            **lost.words(),
        }


def _words(how: str, each: list[Kill]) -> str:
    if how == "at once":
        return f"all ranks at once, {each[0].place} of step {each[0].step}"
    return ", ".join(f"{kill.place} of step {kill.step}" for kill in each) or "nothing"


# What a failure costs, told by the probes alone, so that it is the same measure under torchrun.


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    seconds: float | None = None
    """From a kill until each rank has ended a step that some rank had not done before; the longest of the run. None: no
    step came behind it."""
    steps: int = 0
    """Done again, summed over ranks."""
    processes: int = 0
    """Begun in the place of others."""

    def words(self) -> dict[str, object]:
        return {"seconds_lost": self.seconds, "steps_again": self.steps, "restarted": self.processes}


def lost_in(directory: Path) -> Lost:
    by_rank = [
        [
            (int(step), int(pid), float(told))
            for step, pid, told in map(str.split, path.read_text().splitlines())
        ]
        for path in directory.glob("rank*.times")
    ]
    done = [[step for step, _, _ in notes if step >= 0] for notes in by_rank]
    seconds = []
    for mark in directory.glob("*.fired"):
        at = mark.stat().st_mtime
        reached = min(max(step for step, _, when in notes if when < at) for notes in by_rank)
        behind = [[when - at for step, _, when in notes if step > reached and when > at] for notes in by_rank]
        seconds += [max(map(min, behind))] if all(behind) else []
    return Lost(
        seconds=round(max(seconds), 1) if seconds else None,
        steps=sum(len(steps) - len(set(steps)) for steps in done),
        processes=sum(len({pid for _, pid, _ in notes}) - 1 for notes in by_rank),
    )


# The same script without a session.


def under_torchrun(place: Path, trainer: Trainer, world: int) -> dict[str, object]:
    """Returns the row of one kill under torchrun, which restarts all ranks; they load what the framework has saved.
    Weights and optimizer states are compared."""
    step = CHECKPOINT_EVERY + 2
    calm = _torchrun(place / f"{trainer.name}-{world}-plain-calm", trainer, world, [])
    kill = [{"id": "k0", "rank": world - 1, "step": step, "after": 0, "again": 0}]
    killed = _torchrun(place / f"{trainer.name}-{world}-plain-killed", trainer, world, kill)
    lost = lost_in(killed.directory)
    trained = [
        [[end["digests"][name] for name in ("model", "optimizer")] for end in outcome.ends.values()]
        for outcome in (calm, killed)
    ]
    same = trained[0] == trained[1]
    words = {0: "same bits" if same else "other bits", None: "stood still"}
    return {
        "trainer": trainer.name,
        "topology": trainer.parallelism or (f"{world} x data" if world > 1 else "1"),
        "kill": f"torchrun: tail of step {step}",
        "bitwise_equal": killed.code == 0 and same,
        "verdict": words.get(killed.code, "failed"),
        "why": "" if killed.code == 0 else next(iter(re.findall(r"^\w*Error: .*", killed.stderr, re.M)), ""),
        "expected": calm.code == 0 and len(calm.ends) == world and killed.fired == 1,
        **lost.words(),
    }


def _torchrun(place: Path, trainer: Trainer, world: int, kills: list[dict[str, object]]) -> Outcome:
    place.mkdir(parents=True)
    told = {
        probe.ENV_DIRECTORY: str(place),
        probe.ENV_STEPS: str(trainer.steps),
        probe.ENV_KILLS: json.dumps(kills),
        probe.ENV_SLOW: "1" if kills else "",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarted ranks may find the addresses of the killed ones
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(world), str(trainer.path)]
    began = time.monotonic()
    with (place / "stdout").open("w") as stdout, (place / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | told, stdout=stdout, stderr=stderr)
        try:
            code: int | None = process.wait(trainer.patience_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            code = None
    outcome = Outcome(
        directory=place,
        job="",
        code=code,
        stderr=(place / "stderr").read_text(errors="replace"),
        seconds=time.monotonic() - began,
    )
    outcome.read()
    return outcome


def rows(services: Services, place: Path, trainer: Trainer) -> Iterator[dict[str, object]]:
    for world in trainer.worlds:
        yield from tried(services, place, trainer, world)
    for world in trainer.plain:
        yield under_torchrun(place, trainer, world)


def main(framework: str, path: Path) -> None:
    integration = ROOT / "swift" / "swift_ft" / "integrations" / f"{INTEGRATIONS.get(framework)}.py"
    about = {
        "framework": framework,
        "version": ", ".join(
            f"{package} {metadata.version(package)}"
            for package in (pin.split("==")[0] for pin in PINS[framework])
        ),
        "lines": len(integration.read_text().splitlines()) if framework in INTEGRATIONS else 0,
    }
    with tempfile.TemporaryDirectory(prefix="swift-frameworks-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        with Services(place / "services") as services, path.open("w") as file:
            for trainer in header.trainers(TRAINERS / framework):
                for row in rows(services, place / "runs", trainer):
                    print(
                        f"{row['trainer']}, {row['topology']}, {row['kill']}: {row['verdict']} {row['why']}"
                    )
                    sys.stdout.flush()
                    file.write(json.dumps(about | row) + "\n")
                    file.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
