"""Shared replays in the report: who shared, and whether what was planned took place."""

from typing import Any

import pytest

from swift_ft.lab.drill import report
from swift_ft.lab.drill.timeline import Recovery


def event(name: str, **about: Any) -> dict[str, Any]:
    return {"event": name, "generation": 2, **about}


def recovery(steps: int | None = 4, why: str = "", declined: dict[str, str] | None = None) -> Recovery:
    helpers = [] if declined else [1, 3]
    begun: dict[str, Any] = {
        "rank": 2,
        "helpers": helpers,
        "shares": [3, 3, 2][: 1 + len(helpers)],
    }
    return Recovery(
        began_t=0.0,
        generations=[2],
        planned={2: {"help": [{"owner": 2, "helpers": [1, 3], "until": 9}]}},
        window=[
            *([] if steps is None else [event("help_begin", **begun, declined=declined or {})]),
            event("help_end", rank=2, reason=why),
            event("helped", rank=1, owner=2, microbatches=12),
            event("helped", rank=3, owner=2, microbatches=12),
            event("replay_end", rank=2, shared_steps=steps),
        ],
    )


def test_who_did_what() -> None:
    (one,) = report.shared_replays(recovery())
    assert one["workers"] == 3
    assert one["microbatches"] == {"1": 12, "3": 12}


@pytest.mark.parametrize(
    ("given", "answer", "detail"),
    [
        (recovery(), True, ""),
        (recovery(0, "a forward changes buffers"), False, "rank 2: a forward changes buffers"),
        (recovery(0, declined={"1": "no room"}), False, "no room"),
        (recovery(None), None, "not in the trace"),
    ],
)
def test_planned_help_was_given(given: Recovery, answer: bool | None, detail: str) -> None:
    (check,) = report.check_helpers([given])
    assert check.answer is answer
    assert detail in check.detail


def test_help_that_was_not_planned_is_not_missed() -> None:
    alone = Recovery(began_t=0.0, generations=[2], planned={2: {}})
    assert report.check_helpers([alone]) == []
