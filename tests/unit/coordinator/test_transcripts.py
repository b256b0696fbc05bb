"""The state machine, by transcripts: tests/golden/coordinator. `pytest --rewrite`, then review the diff."""

from pathlib import Path

import pytest

from tests.unit.coordinator.transcript import rerun

GOLDEN = Path(__file__).parents[2] / "golden" / "coordinator"
TRANSCRIPTS = sorted(GOLDEN.glob("*.txt"))


def test_there_are_transcripts() -> None:
    assert TRANSCRIPTS


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    expected = path.read_text()
    given = rerun(expected)
    if request.config.getoption("--rewrite"):
        path.write_text(given)
    else:
        assert given == expected
