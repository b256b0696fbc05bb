"""`python -m tests.frameworks.cases FRAMEWORK PATH`, in the framework's environment: its cases, a line each."""

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tests.frameworks.environment import PINS, ROOT
from tests.trainers.harness import header, run, verdict
from tests.trainers.harness.header import Trainer
from tests.trainers.harness.run import Kill, Outcome
from tests.trainers.harness.services import Services

TRAINERS = Path(__file__).parent


def kills(trainer: Trainer, world: int) -> dict[str, list[Kill]]:
    """One after another: replayed with one rank, copied from a replica with two. All ranks at once: all go back to the
    checkpoint."""
    found = {"one by one": run.three_kills(trainer, world)}
    if world > 1:
        found["all at once"] = [
            Kill(place="tail", rank=rank, step=trainer.steps // 2) for rank in range(world)
        ]
    return found


def tried(services: Services, place: Path, trainer: Trainer, world: int) -> Iterator[dict[str, object]]:
    """Yields a row for each list of kills, beside one run without."""
    name = f"{trainer.name.replace('_', '-')}-{world}"
    calm = run.run(services, place / f"{name}-calm", trainer, world, (), f"{name}-calm", rehearsed=True)
    expected = trainer.expected[world]
    for number, (how, each) in enumerate(kills(trainer, world).items()):
        found, seconds = verdict.of_undisturbed(calm), 0.0
        if found.word == verdict.SAME:
            job = f"{name}-killed-{number}"
            killed = run.run(services, place / job, trainer, world, each, job)
            found, seconds = _judged(calm, killed, each), killed.seconds
        yield {
            "trainer": trainer.name,
            "topology": f"{world} x data" if world > 1 else "1",
            "kill": f"{how}: {', '.join(f'{kill.place} of step {kill.step}' for kill in each)}",
            "bitwise_equal": found.word == verdict.SAME,
            "verdict": found.word,
            "why": found.why,
            "expected": found.word == expected.verdict and expected.says in found.why,
            "seconds": round(seconds, 1),
        }


def _judged(calm: Outcome, killed: Outcome, each: list[Kill]) -> verdict.Verdict:
    found = verdict.of_killed(calm, killed, len(each))
    if found.word == verdict.SAME and killed.fired < len(each):
        return verdict.Verdict(word=verdict.MISS, why=f"only {killed.fired} of {len(each)} kills came about")
    return found


def main(framework: str, path: Path) -> None:
    integration = ROOT / "swift" / "swift_ft" / "integrations" / f"{framework}.py"
    about = {
        "framework": framework,
        "version": ", ".join(
            f"{package} {metadata.version(package)}"
            for package in (pin.split("==")[0] for pin in PINS[framework])
        ),
        "lines": len(integration.read_text().splitlines()) if integration.exists() else 0,
    }
    with tempfile.TemporaryDirectory(prefix="swift-frameworks-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        with Services(place / "services") as services, path.open("w") as file:
            for trainer in header.trainers(TRAINERS / framework):
                for world in trainer.worlds:
                    for row in tried(services, place / "runs", trainer, world):
                        print(
                            f"{row['trainer']} x{world}, {row['kill']}: {row['verdict']} {row['why']}",
                            flush=True,
                        )
                        file.write(json.dumps(about | row) + "\n")
                        file.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
