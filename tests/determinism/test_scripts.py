"""Scripts as other people write them: each gets the verdict, and the cause, that its first lines state."""

from pathlib import Path

import pytest

from swift.determinism import report
from tests.determinism.world import Script, scripts, verified
from tests.integration.forked import Forks

OWN = [script for script in scripts() if not script.session]


def name(script: Script) -> str:
    return script.path.stem


def check(script: Script, place: Path, forks: Forks) -> None:
    verdict = verified(script, place, forks)
    said = "\n".join(report.lines(verdict))
    assert verdict.word == script.verdict, said
    assert [cause.name for cause in verdict.causes][:1] == ([script.cause] if script.cause else []), said
    assert script.says in said, said


@pytest.mark.parametrize("script", [s for s in OWN if not s.interpreters], ids=name)
def test_a_script_with_checkpoints_of_its_own(script: Script, tmp_path: Path, forks: Forks) -> None:
    check(script, tmp_path, forks)


@pytest.mark.matrix
@pytest.mark.parametrize("script", [s for s in OWN if s.interpreters], ids=name)
def test_a_script_that_depends_on_its_interpreter(script: Script, tmp_path: Path, forks: Forks) -> None:
    check(script, tmp_path, forks)
