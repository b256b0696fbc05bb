"""The state machine, by transcripts: tests/golden/coordinator. `pytest --rewrite`, then review the diff."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transcripts import rerun
from tests.unit.coordinator.transcript import World

GOLDEN = Path(__file__).parents[2] / "golden" / "coordinator"
TRANSCRIPTS = sorted(GOLDEN.glob("*.txt"))


def test_there_are_transcripts() -> None:
    assert TRANSCRIPTS


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path, golden: Callable[[Path, str], None]) -> None:
    golden(path, rerun(path.read_text(), World().run))
