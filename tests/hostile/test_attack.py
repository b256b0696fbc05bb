"""Short runs of `scripts/hostile`: of the log server, and of one that is broken on purpose, which must be found."""

import sys
from pathlib import Path

import pytest

from swift_ft.credentials import ENV_TOKEN_FILE
from tests.hostile import attack
from tests.hostile.attack import HostileConfig, judge
from tests.soak.memory import Rule

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(240)]
SHORT = Rule(warm_up_s=5.0, observed_s_min=5.0, percent_per_minute_max=200.0, thirds_percent_max=200.0)

SLOW = """
import sys, time
from swift_ft_services.logserver import __main__ as program
from swift_ft_services.logserver.reading import Reading

honest = Reading.inventory

def slow(self, job):
    with self._changed:
        time.sleep(0.1)
    return honest(self, job)

Reading.inventory = slow
sys.exit(program.main())
"""


@pytest.mark.parametrize("tokens", [False, True])
def test_a_hostile_client_takes_nothing_from_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: bool
) -> None:
    monkeypatch.setenv(ENV_TOKEN_FILE, "")
    config = HostileConfig(seconds=40, tokens=tokens, memory=SHORT)
    seen = attack.run(config, tmp_path)
    result = judge(config, seen)
    assert (result["lost"], seen.stop_code) == (0, 0)
    assert all(did["rounds"] for did in result["attacks"].values())
    # A machine that does other things as well has a long tail: half of all appends are what is looked at here.
    assert result["ratio"]["median_ms"] < attack.RATIO_MAX, result


def test_a_server_that_works_under_its_lock_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(SLOW)
    attacks = ("big_questions", "trims_and_resets")
    config = HostileConfig(seconds=24, attacks=attacks, server=(sys.executable, str(broken)), memory=SHORT)
    result = judge(config, attack.run(config, tmp_path))
    assert result["ratio"]["p99_ms"] > attack.RATIO_MAX
    assert result["verdict"] in ("FAIL", "INCONCLUSIVE")
