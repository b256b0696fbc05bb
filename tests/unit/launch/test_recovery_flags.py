"""What `swift-ft run` is told of recovery, as the session of a rank reads it."""

from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.launch.command import make_plan
from swift_ft.text import ENV_ALLOW_INEXACT, ENV_SPARES, LAUNCHER_SETTINGS
from swift_ft.train.config import SessionConfig
from swift_ft.train.session import _launchers

COORDINATOR = "--coordinator=127.0.0.1:5000"
ADAPTIVE = ["--strategy=adaptive", "--exact-gradients=off", "--adaptive-memory=2", "--allow-inexact"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a script; the environment comes back as it was."""
    for name in (*LAUNCHER_SETTINGS.values(), ENV_ALLOW_INEXACT, ENV_SPARES):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], {}),
        (["--lost-shard", "reroute"], {"lost_shard": "reroute"}),
        (["--snapshot-every=7"], {"snapshot_every": 7}),
        (["--split_backward", "off"], {"split_backward": False}),
        (["--exact-gradients", "on"], {"exact_gradients": True}),
        (["--staggered", "on"], {"staggered": True}),
        (["--rehearse", "always", "--require-exact"], {"rehearse": "always", "require_exact": True}),
        (
            ADAPTIVE,
            {
                "strategy": "adaptive",
                "exact_gradients": False,
                "adaptive_memory": 2.0,
                "allow_inexact": True,
            },
        ),
    ],
)
def test_sessions_read_what_the_launcher_was_told(flags: list[str], wanted: dict[str, Any]) -> None:
    make_plan([COORDINATOR, *flags, "train.py"])
    told = _launchers({})
    assert told == wanted
    assert {name: type(value) for name, value in told.items()} == {k: type(v) for k, v in wanted.items()}


def test_a_session_is_made_of_it() -> None:
    make_plan([COORDINATOR, *ADAPTIVE, "train.py"])
    config = SessionConfig(replicas=2, **_launchers({"replicas": 2}))
    assert (config.reroutes, config.exact_gradients, config.adaptive_memory) == (True, False, 2.0)


def test_a_script_that_says_the_same_is_taken_and_another_one_is_not() -> None:
    make_plan([COORDINATOR, *ADAPTIVE, "train.py"])
    assert _launchers({"adaptive_memory": 2, "exact_gradients": False})["adaptive_memory"] == 2.0
    with pytest.raises(
        UsageError, match="given --exact-gradients off, and the script says exact_gradients=True"
    ):
        _launchers({"exact_gradients": True})


@pytest.mark.parametrize(
    ("variable", "word", "problem"),
    [
        (
            "SWIFT_SPLIT_BACKWARD",
            "1",
            "SWIFT_SPLIT_BACKWARD=1: give on or off (--split-backward of swift-ft run",
        ),
        ("SWIFT_ADAPTIVE_MEMORY", "x", "SWIFT_ADAPTIVE_MEMORY=x: give a number"),
        ("SWIFT_SNAPSHOT_EVERY", "2.5", "SWIFT_SNAPSHOT_EVERY=2.5: give a number"),
    ],
)
def test_a_variable_that_says_something_else(
    variable: str, word: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, word)
    with pytest.raises(UsageError) as refused:
        _launchers({})
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--adaptive-memory=0.5"], "--adaptive_memory: 0.5: 1 or more"),
        (["--adaptive-memory=nan"], "nan"),
        (["--exact-gradients=perhaps"], "invalid choice"),
        (["--snapshot-every=0"], "--snapshot_every: 0: 1 or more"),
        (["--max-restarts=-1"], "--max_restarts: -1: 0 or more"),
        (["--strategy=adaptive", "--lost-shard=drop"], "leave it out, or use shrink"),
        (["--strategy=shrink", "--lost-shard=reroute"], "leave it out, or use adaptive"),
    ],
)
def test_one_line_for_what_cannot_be(flags: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=r"^run: ") as refused:
        make_plan([COORDINATOR, *flags, "train.py"])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
