"""One run of one trainer under a real launcher, and what it left."""

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_ft import events
from swift_ft.fault_grammar import ENV_FAULTS, ENV_FAULTS_DIR
from tests.integration.forked import NOWHERE, Forked
from tests.trainers import probe
from tests.trainers.harness import plain
from tests.trainers.harness.header import Trainer
from tests.trainers.harness.services import Services

_IN_PROBE = ("tail", "moment")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A SIGKILL. `place`: a phase of `swift_ft.train.fault_points`; "tail": last in the step, before its line is
    written; "moment": `after` steps' time behind the end of `step`, wherever the rank is by then."""

    place: str
    rank: int
    step: int
    microbatch: int = 0
    after: float = 0.0
    again: int = 0
    """1 ("tail" and "moment"): not before the rank does this step once more."""

    def __str__(self) -> str:
        more = f",microbatch={self.microbatch}" if self.place in ("forward", "backward") else ""
        more = f",after={self.after:.3f}" if self.place == "moment" else more
        more += ",again=1" if self.again else ""
        return f"rank={self.rank},step={self.step},place={self.place}{more}"


@dataclass(kw_only=True)
class Outcome:
    """What a run came to."""

    directory: Path
    job: str
    code: int | None
    """The launcher's exit code; None: it stood still."""
    stderr: str
    seconds: float
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    losses: dict[str, dict[int, str]] = field(default_factory=dict)
    """By rank and step."""
    contradictions: list[str] = field(default_factory=list)
    """Steps that were done again with another loss."""
    fired: int = 0
    """Kills that have ended a process."""
    plans: list[dict[str, Any]] = field(default_factory=list)
    """The coordinator's, of this job."""
    rehearsals: list[dict[str, Any]] | None = None
    """What came of each; None: none were asked for."""
    ended_early: int = 0
    """1: its trainer has ended it before its last step, for which there may be one plan."""

    def read(self) -> None:
        """What the probes have written."""
        self.fired = len(list(self.directory.glob("*.fired")))
        for path in sorted(self.directory.glob("rank*.end")):
            self.ends[path.stem] = json.loads(path.read_text())
        for path in sorted(self.directory.glob("rank*.losses")):
            of_rank = self.losses.setdefault(path.stem, {})
            for line in path.read_text().splitlines():
                step, _, text = line.partition(" ")
                if of_rank.setdefault(int(step), text) != text:
                    self.contradictions.append(f"{path.stem} step {step}")


class Running:
    """A run under way."""

    def __init__(
        self,
        services: Services,
        directory: Path,
        trainer: Trainer,
        world: int,
        kills: Sequence[Kill],
        job: str,
        *,
        replicas: int = 0,
        staggered: bool = False,
        rehearsed: bool = False,
        device: str = "",
    ) -> None:
        """`rehearsed`: all ranks are rehearsed twice, and the run waits for that. `device`: `probe.ENV_DEVICE`.

        `replicas`: strategy "adaptive", with so many; nobody comes for a rank that is killed. `staggered`: under it
        steps go on without their vote."""
        self._services = services
        self._directory = directory
        self._job = job
        self._rehearsed = rehearsed
        self._patience_s = trainer.patience_s
        self._began = time.monotonic()
        directory.mkdir(parents=True)
        (directory / "events").mkdir()
        named = [(f"k{number}", kill) for number, kill in enumerate(kills)]
        faults = [
            {
                "id": n,
                "rank": k.rank,
                "step": k.step,
                "microbatch": k.microbatch,
                "phase": k.place,
            }
            for n, k in named
            if k.place not in _IN_PROBE
        ]
        probed = [
            {"id": n, "rank": k.rank, "step": k.step, "after": k.after, "again": k.again}
            for n, k in named
            if k.place in _IN_PROBE
        ]
        env = {
            "OMP_NUM_THREADS": "1",
            events.ENV_EVENTS_DIR: str(directory / "events"),
            ENV_FAULTS: json.dumps(faults),
            ENV_FAULTS_DIR: str(directory),
            probe.ENV_DIRECTORY: str(directory),
            probe.ENV_KILLS: json.dumps(probed),
            probe.ENV_STEPS: str(trainer.steps),
            probe.ENV_SLOW: "1" if kills else "",
            probe.ENV_REPLICAS: str(replicas or ""),
            probe.ENV_DEVICE: device,
            probe.ENV_REHEARSED: "1" if rehearsed else "",
        }
        words = ["--coordinator", services.coordinator, "--job", job, "--nproc-per-node", str(world)]
        words += ["--spares", str(min(1, len(kills))), "--checkpoint-dir", str(directory / "checkpoints")]
        words += ["--rehearse", "start" if rehearsed else "off"]
        words += ["--strategy", "adaptive", "--max-restarts", "0"] if replicas else []
        words += ["--staggered", "on"] if staggered else []
        assert services.forks is not None
        self._process: Forked = services.forks.run(
            "tests.integration.forked_launcher",
            [*words, str(trainer.path)],
            env,
            directory / "stdout",
            directory / "stderr",
        )

    def poll(self) -> Outcome | None:
        """Once it is over."""
        code = self._process.poll()
        seconds = time.monotonic() - self._began
        if code is None and seconds < self._patience_s:
            return None
        if code is None:
            self._process.kill()
        return self._collect(code, seconds)

    def kill(self) -> None:
        self._process.kill()

    def _collect(self, code: int | None, seconds: float) -> Outcome:
        outcome = Outcome(
            directory=self._directory,
            job=self._job,
            code=code,
            stderr=(self._directory / "stderr").read_text(errors="replace"),
            seconds=seconds,
        )
        outcome.read()
        told = [
            json.loads(line)
            for path in self._services.events.glob("coordinator-*.jsonl")
            for line in path.read_bytes().splitlines()
            if f'"{self._job}"'.encode() in line
        ]
        told_here = events.read(self._directory / "events")
        deaths = [-signal.SIGKILL, -signal.SIGALRM]  # the latter at a moment
        killed = [e for e in told_here if e["event"] == "child_exit" and e["code"] in deaths]
        outcome.fired = min(outcome.fired, len(killed))
        if self._rehearsed:
            outcome.rehearsals = [e for e in told_here if e["event"] == "rehearsal_end"]
        outcome.plans = [event for event in told if event["event"] == "plan"]
        outcome.ended_early = int(any(event["event"] == "ends_early" for event in told))
        return outcome


def run(
    services: Services,
    directory: Path,
    trainer: Trainer,
    world: int,
    kills: Sequence[Kill],
    job: str,
    **settings: Any,
) -> Outcome:
    """To its end. `settings`: of `Running`."""
    running = Running(services, directory, trainer, world, kills, job, **settings)
    try:
        while (outcome := running.poll()) is None:
            time.sleep(0.005)
        return outcome
    except BaseException:
        running.kill()
        raise


def beside_plain(services: Services, directory: Path, trainer: Trainer, world: int, job: str) -> list[str]:
    """What differs in the end, or in a step, between its ranks under a session, which nobody launches and nothing
    happens to, and without one."""
    found: dict[str, dict[str, Any]] = {"session": {}, "plain": {}}
    running: list[tuple[Path, Forked]] = []
    assert services.forks is not None
    services.forks.give_word()
    for kind in found:
        place = directory / kind
        place.mkdir(parents=True)
        env = {
            **NOWHERE,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(world),
            "SWIFT_COORDINATOR": services.coordinator,
            "SWIFT_JOB": job,
            "SWIFT_CHECKPOINT_DIR": str(place / "checkpoints"),
            plain.ENV_STORE: str(place / "store"),
            probe.ENV_DIRECTORY: str(place),
            probe.ENV_STEPS: str(trainer.steps),
        }
        for rank in range(world):
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "SWIFT_INCARNATION": f"rank{rank}"}
            said = place / f"rank{rank}.txt"
            running.append((said, services.forks.run(plain.__name__, [trainer.path, kind], own, said, said)))
    for said, process in running:
        assert (code := process.wait(trainer.patience_s)) == 0, (
            f"{said}: exit code {code}\n{said.read_text()}"
        )
    for kind, ends in found.items():
        for path in sorted((directory / kind).glob("rank*.end")):
            ends.update({f"{path.stem} {k}": v for k, v in json.loads(path.read_text())["digests"].items()})
        for path in sorted((directory / kind).glob("rank*.losses")):
            ends.update({f"{path.stem} step {i}": v for i, v in enumerate(path.read_text().splitlines())})
    session, alone = found.values()
    assert session, f"no rank wrote its end in {directory}"
    return [name for name in {**session, **alone} if session.get(name) != alone.get(name)]


def two_losses(trainer: Trainer, world: int) -> list[Kill]:
    """Of different stages and replicas, so that no pipeline is whole after the second one."""
    return [
        Kill(place="backward", rank=world - 1, step=3, microbatch=1),
        Kill(place="idle", rank=0, step=trainer.steps // 2),
    ]


def three_kills(trainer: Trainer, world: int) -> list[Kill]:
    """One after the other in one run: at three of the places that this trainer has."""
    places = list(trainer.kills)
    if world == 1 and "reduce" in places:
        places.remove("reduce")
    if len(places) > 3:
        places = (
            [places[0], places[len(places) // 2], places[-2]] if world % 2 else [*places[:1], *places[-3:-1]]
        )
    spread = max(1, (trainer.steps - 3) // 3)
    return [
        Kill(place=place, rank=(world - 1 - number) % world, step=2 + number * spread, after=0.6)
        for number, place in enumerate(places)
    ]
