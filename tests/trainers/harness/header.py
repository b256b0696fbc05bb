"""What a trainer's first lines say of it.

\"\"\"One sentence: what is special about this trainer.\"\"\"

# verdict: same bits            (or: refused, named inexact)
# worlds: 1, 2                  how many ranks it is tried with
# steps: 14                     (default 14)
# says: a piece of the line     (of what is refused, or named)
# with 2: refused: a piece ...  (another verdict with so many ranks)
# kills: tail, optimizer        (default: what its kind has; see `places`)
# adaptive: refused             (a pipeline with two replicas under that strategy; default: same bits)
# parallelism: pipeline 2       (default: as many replicas as ranks)
# plain: 1, 2                   so many ranks are compared with torch without a session (default: none)
# device                        tried on the simulated device too
# quick                         the default suite runs it too
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1]
VERDICTS = ("same bits", "refused", "named inexact")
STEPS_DEFAULT = 14
_NOT_TRAINERS = ("__init__", "probe", "conftest")
_WITH = re.compile(r"^# with (\d+): ([^:\n]*): (.*)$", re.MULTILINE)
_FIELD = re.compile(
    r"^# (verdict|worlds|steps|says|kills|adaptive|parallelism|plain|device|quick|patience|misses|because)(?:: (.*))?$",
    re.MULTILINE,
)


PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Expected:
    """A verdict, and a piece of the line that says it."""

    verdict: str
    says: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.says}" if self.says else self.verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """One file of the folder, and what is expected of it."""

    name: str
    about: str
    expected: dict[int, Expected]
    """By number of ranks."""
    steps: int
    kills: tuple[str, ...]
    adaptive: str
    """The verdict if ranks are lost for good, under strategy "adaptive"."""
    parallelism: str
    """What its ranks are, if not replicas."""
    plain: tuple[int, ...]
    device: bool
    quick: bool
    patience_s: float
    """A run that takes longer stands still."""
    misses: tuple[int, ...]
    because: str
    path: Path

    @property
    def replicas(self) -> bool:
        """Whether several ranks of it are replicas."""
        return not self.parallelism or "replicas" in self.parallelism

    @property
    def worlds(self) -> tuple[int, ...]:
        return tuple(self.expected)


def read(path: Path) -> Trainer:
    text = path.read_text()
    about = ast.get_docstring(ast.parse(text)) or ""
    fields = dict(_FIELD.findall(text))
    usual = Expected(fields.get("verdict", ""), fields.get("says", ""))
    others = {int(world): Expected(verdict, says) for world, verdict, says in _WITH.findall(text)}
    for each in (usual, *others.values()):
        if each.verdict not in VERDICTS:
            raise ValueError(f"{path.name}: '# verdict: {each.verdict}'; give one of {', '.join(VERDICTS)}")
    kills = fields.get("kills") or ""
    pipeline = any(word in text for word in ("probe.pipeline(", "session.pipeline_stage("))
    default = "forward, backward, optimizer, tail, moment" if pipeline else "moment, optimizer, tail"
    return Trainer(
        name=path.stem,
        about=about.partition("\n")[0],
        expected={world: others.get(world, usual) for world in _numbers(fields.get("worlds") or "1, 2")},
        steps=int(fields.get("steps") or STEPS_DEFAULT),
        kills=tuple(word.strip() for word in (kills or default).split(",")),
        adaptive=fields.get("adaptive") or "same bits",
        parallelism=fields.get("parallelism") or "",
        plain=_numbers(fields.get("plain")),
        device="device" in fields,
        quick="quick" in fields,
        patience_s=float(fields.get("patience") or PATIENCE_S),
        misses=_numbers(fields.get("misses")),
        because=fields.get("because") or "",
        path=path,
    )


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(word) for word in (text or "").split(",") if word)


def pipelines() -> list[Trainer]:
    """Those that call a schedule."""
    return [trainer for trainer in trainers() if trainer.name.startswith("pipeline")]


def trainers(folder: Path = FOLDER) -> list[Trainer]:
    """All of the folder, by name."""
    paths = sorted(folder.glob("*.py"))
    return [
        read(path)
        for path in paths
        if path.stem not in _NOT_TRAINERS and not path.stem.startswith(("test_", "_"))
    ]
