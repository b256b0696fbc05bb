"""The two published workloads: bytes by their formulas, and what the docs show."""

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.lab.plan import report
from swift_ft.lab.plan.profile import read

ROOT = Path(__file__).parents[3]
PROFILES = ROOT / "examples" / "profiles"

# (global batch, microbatch, tokens, hidden): fp32 has 4 bytes, and both directions are logged.
WORKLOADS = {"bert-128": (512, 4, 128, 1024), "vit-128-32": (4096, 16, 50, 1024)}
MACHINES, RANKS, INTERVAL = 16, 8, 100


@pytest.fixture(params=sorted(WORKLOADS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def built(name: str) -> dict[str, Any]:
    profile = read(PROFILES / f"{name}.json")
    return report.build(profile, profile.cap)


def test_bytes_are_those_of_the_formulas(name: str) -> None:
    """V = 2 M b s h e; K V for each logged boundary, of which there are at most 15 between 16 machines."""
    batch, microbatch, tokens, hidden = WORKLOADS[name]
    per_boundary = 2 * (batch // microbatch) * microbatch * tokens * hidden * 4
    profile = read(PROFILES / f"{name}.json")
    assert (profile.stages, profile.machines) == (MACHINES * RANKS, MACHINES)
    assert (profile.microbatches, profile.checkpoint_interval_steps) == (batch // microbatch, INTERVAL)
    for boundary in range(profile.stages - 1):
        assert profile.forward_bytes[boundary] + profile.backward_bytes[boundary] == per_boundary
    document = built(name)
    for row in document["frontier"]["points"]:
        assert row["bytes_per_step"] == per_boundary * len(row["logged"])
        assert row["storage_bytes"] == INTERVAL * per_boundary * len(row["logged"])
        # Boundaries between machines only: behind the last stage of one.
        assert all((boundary + 1) % RANKS == 0 for boundary in row["logged"])
    everything = document["frontier"]["points"][-1]
    assert everything["storage_bytes"] == INTERVAL * 15 * per_boundary
    totals = {"bert-128": 805_306_368_000, "vit-128-32": 2_516_582_400_000}
    assert everything["storage_bytes"] == totals[name]


def test_the_document_shows_what_the_command_prints(name: str) -> None:
    shown = (ROOT / "docs" / "planning.md").read_text()
    assert "\n".join(report.text(built(name))) in shown


def test_the_profiles_say_what_is_published_and_what_is_not(name: str) -> None:
    source = json.loads((PROFILES / f"{name}.json").read_text())["source"]
    assert all(word in source for word in ("Published:", "Derived:", "Assumed:"))
