"""Runs the scripts of this folder, forked from one process that has imported torch."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_ft.lab.determinism.runs import Config, ScriptRuns
from swift_ft.lab.determinism.verify import Verdict, verify
from swift_ft.lab.drill.cluster import Process
from tests.integration.forked import Forked, Forks

FOLDER = Path(__file__).parent / "scripts"
_FIELD = re.compile(
    r"^# (verdict|cause|says|ranks|interpreters|session|quick|strategy)(?:: (.*))?$", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A file of the folder, and what its first lines say that must come of it."""

    path: Path
    verdict: str
    cause: str
    says: str
    ranks: int
    interpreters: bool
    """Each run needs a Python of its own: what matters is read when that starts."""
    session: bool
    quick: bool
    """The default suite runs it too."""
    strategies: tuple[str, ...]


def read(path: Path) -> Script:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), path
    fields = dict(_FIELD.findall(text))
    return Script(
        path=path,
        verdict=fields["verdict"],
        cause=fields.get("cause", ""),
        says=fields.get("says", ""),
        ranks=int(fields.get("ranks") or 1),
        interpreters="interpreters" in fields,
        session="session" in fields,
        quick="quick" in fields,
        strategies=tuple(fields.get("strategy", "auto").split(", ")),
    )


def scripts() -> list[Script]:
    return [read(path) for path in sorted(FOLDER.glob("*.py"))]


_AS_NEW = """\
import random, numpy, torch
random.seed()
numpy.random.seed()
torch.manual_seed(torch.Generator().initial_seed())
"""
"""What is forked begins with the generators of a launcher's rank. A script that is started by hand does not."""


class _Rank:
    """A rank of a script, in the place of a `swift_ft.lab.drill.cluster.Process`."""

    def __init__(self, forked: Forked, output: Path) -> None:
        self._forked = forked
        self.output = output
        self.poll = forked.poll

    def stop(self, _grace_s: float) -> None:
        if self.poll() is None:
            self._forked.kill()
            self._forked.wait(10.0)

    def tail(self) -> str:
        return self.output.read_text()


def forking(forks: Forks) -> Callable[..., Process]:
    """As `Process`, but forked."""

    def start(
        name: str, arguments: Sequence[str], env: Mapping[str, str], output: Path, cwd: Path | None
    ) -> Process:
        output.touch()
        module, *rest = arguments
        command = [
            _AS_NEW,
            "import os",
            f"os.chdir({str(cwd)!r})",
            f"from {module} import main",
            f"main({rest!r})",
        ]
        program = output.with_suffix(".py")
        program.write_text("\n".join(command) + "\n")
        return _Rank(forks.run(program, [], env, output, output), output)  # type: ignore[return-value]

    return start


def asked(script: Script, **fields: object) -> Config:
    """What the command makes of no flags, and of these."""
    given: dict[str, object] = {
        "script": script.path,
        "arguments": (),
        "ranks": script.ranks,
        "own_checkpoints": not script.session,
        "strategy": None,
        "lost_shard": None,
        "snapshot_every": None,
        "kill": None,
        "seed": 0,
        "patience_s": 60.0,
        "json_path": None,
        "directory": None,
        "keep": False,
    }
    return Config(**{**given, **fields})  # type: ignore[arg-type]


def verified(script: Script, place: Path, forks: Forks, **fields: object) -> Verdict:
    """Of a script with checkpoints of its own."""
    start = Process if script.interpreters else forking(forks)
    return verify(ScriptRuns(asked(script, **fields), place, start))
