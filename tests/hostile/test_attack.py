"""Short runs of `scripts/hostile`: of the log server, and of one that is broken on purpose, which must be found."""

import sys
from pathlib import Path

import pytest

from swift_ft.credentials import ENV_TOKEN_FILE
from tests.hostile import attack
from tests.hostile.attack import HostileConfig, Seen, judge
from tests.soak.memory import Rule, Sample

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


@pytest.mark.matrix
@pytest.mark.timeout(240)
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
    assert result["ratio"]["median_ms"] < attack.RATIO_MAX, attack.table({"machine": "", **result})


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_a_server_that_works_under_its_lock_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(SLOW)
    attacks = ("big_questions", "trims_and_resets")
    config = HostileConfig(seconds=24, attacks=attacks, server=(sys.executable, str(broken)), memory=SHORT)
    result = judge(config, attack.run(config, tmp_path))
    assert result["ratio"]["p99_ms"] > attack.RATIO_MAX
    assert result["verdict"] in ("FAIL", "INCONCLUSIVE")


def seen(quiet_s: float, hostile_s: float, other_s: float | None = None) -> Seen:
    memory = [Sample(float(at), 1, 50 << 20) for at in range(200)]
    attacks = {"nonsense": {"rounds": 1, "cut_off": 0, "answers": {}}}
    quiet = ([quiet_s] * 500, [quiet_s if other_s is None else other_s] * 500)
    return Seen(quiet_s=quiet, hostile_s=[hostile_s] * 1000, memory=memory, attacks=attacks)


def test_the_verdict_follows_the_rule() -> None:
    config = HostileConfig(seconds=200)
    assert judge(config, seen(0.001, 0.0019))["verdict"] == "PASS"
    slow = judge(config, seen(0.001, 0.0021))
    assert (slow["verdict"], "p99 x 2.10" in slow["reason"]) == ("FAIL", True)
    assert judge(config, seen(0.001, 0.0100, 0.0030))["verdict"] == "INCONCLUSIVE"
    for broken in ({"lost": 1}, {"stop_code": -9}, {"stop_s": 60.0}):
        one = seen(0.001, 0.001)
        for name, value in broken.items():
            setattr(one, name, value)
        assert judge(config, one)["verdict"] == "FAIL"
    idle = seen(0.001, 0.001)
    idle.attacks["nonsense"]["rounds"] = 0
    assert judge(config, idle)["verdict"] == "INCONCLUSIVE"
    growing = seen(0.001, 0.001)
    growing.memory = [Sample(float(at), 1, (50 + at) << 20) for at in range(200)]
    assert "not flat" in judge(config, growing)["reason"]
