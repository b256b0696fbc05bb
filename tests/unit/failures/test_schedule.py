"""FILE or SPEC -> failures: the same again from what was written down, and every mistake in one line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.fault_grammar import Fault
from swift_ft.lab.failures import schedule
from swift_ft.lab.failures.schedule import FAILURES_MAX, schedule_of
from tests.unit.failures.drawn import any_distribution, any_fault


@given(st.lists(any_fault(), min_size=1, max_size=6))
def test_entries_round_trip(entries: list[Fault]) -> None:
    for between in (";", "\n", " ;\n  # so it is\n"):
        assert schedule.parse_schedule(between.join(map(str, entries))) == entries


@given(any_distribution(), st.integers(6, 12))
def test_a_schedule_as_text_is_the_same_schedule(spec: str, ranks: int) -> None:
    made = schedule_of(spec, ranks)
    if made.faults:
        assert schedule_of("\n".join(map(str, made.faults)), ranks).faults == made.faults


def test_failures_come_in_their_order() -> None:
    spec = "rank=1,at=3;rank=0,step=9;rank=1,phase=replay;rank=1,step=2;rank=0,at=1;rank=1,step=2"
    assert list(map(str, schedule_of(spec, 2).faults)) == [
        "rank=1,step=2,microbatch=0,phase=backward",
        "rank=0,step=9,microbatch=0,phase=backward",
        "rank=0,at=1",
        "rank=1,at=3",
        "rank=1,phase=replay",
    ]


def test_a_machine_is_a_host_unless_an_entry_says_otherwise() -> None:
    spec = "every=exponential,mtbf=50,count=1,together=1"
    assert len(schedule_of(spec, 8).faults) == 1
    assert len(schedule_of(spec, 8, per_host=4).faults) == 4
    assert len(schedule_of(f"{spec},per_host=2", 8, per_host=4).faults) == 2


def test_a_file_of_entries(tmp_path: Path) -> None:
    path = tmp_path / "failures.txt"
    path.write_text("# two of them\nrank=1,step=2  # the first\n\nevery=exponential,mtbf=9,count=3\n")
    assert len(schedule_of(str(path), 4).faults) == 4


def test_the_report_of_a_run_is_a_file_of_its_failures(tmp_path: Path) -> None:
    made = schedule_of("every=weibull,shape=0.5,mtbf=9,count=8,seed=3", 4)
    path = tmp_path / "failures.json"
    path.write_text(json.dumps({"job": "j", "schedule": list(map(str, made.faults))}))
    assert schedule_of(str(path), 4).faults == made.faults


@pytest.mark.parametrize(
    ("given_", "word"),
    [
        ("nowhere.csv", "there is no such file"),
        ("", "there is no such file"),
        (" ; ", "there is no such file"),
        ("#=", "there is no failure in it"),
        ("rank=4,step=1", "rank must be 0 to 3"),
        ("corrupt=copy,rank=4", "rank must be 0 to 3"),
        ("rank=1,step=1;rank=2", "'rank=2': step is missing"),
        ("rank=1,step=1;rank=9,at=2", "rank must be 0 to 3"),
        ("trace=nowhere.csv", "No such file"),
        (";".join(f"rank={n % 4},step={n}" for n in range(501)), "501 failures: 500 are the most"),
        ("every=often,mtbf=3,count=1", "one of exponential, weibull"),
        ("every=weibull,mtbf=3,count=1", "weibull needs shape=K"),
        ("every=exponential,mtbf=3,count=1,shape=0.5", "shape needs every=weibull"),
        ("every=exponential,count=1", "mtbf is missing"),
        ("every=exponential,mtbf=0,count=1", "mtbf must be a number from 0.001"),
        ("every=exponential,mtbf=1e3,count=1", "from 0.001 to 1000000000, in digits, not '1e3'"),
        ("every=exponential,mtbf=nan,count=1", "mtbf must be a number"),
        ("every=exponential,mtbf=3", "until=STEP, or count=N"),
        ("every=exponential,mtbf=3,count=0", f"count must be 1 to {FAILURES_MAX}"),
        ("every=exponential,mtbf=3,count=1,per_host=0", "per_host must be at least 1"),
        ("every=exponential,mtbf=3,count=1,lemon=3", "lemon needs lemons=K"),
        ("every=exponential,mtbf=3,count=1,lemons=9", "lemons must be 0 to 4"),
        ("every=exponential,mtbf=3,count=1,together=2", "together must be a number from 0 to 1"),
        ("every=exponential,mtbf=3,count=1,unit=days", "one of steps, seconds"),
        ("every=exponential,mtbf=3,count=1,kind=slow,for=1", "kind=slow needs factor=F"),
        ("every=exponential,mtbf=3,count=1,rank=2", "unknown key 'rank'"),
        ("every=exponential,mtbf=0.01,until=1000", f"more than {FAILURES_MAX} failures"),
    ],
)
def test_refuses(given_: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        schedule_of(given_, 4)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"rank=1,step=1\nkind=burn,rank=1,step=2\n", "unknown kind 'burn'"),
        (b"{}", "not the failures.json of a run"),
        (b'{"schedule": [3]}', "not the failures.json of a run"),
        (b'{"schedule": 3}', "not the failures.json of a run"),
        (b'[{"node": 1, "start": 2}]', "a JSON list is no schedule: write a trace as CSV"),
        (b"{", "not JSON: line 1, column 2"),
        (b"\xff\xfe", "not a text in UTF-8"),
        (b"", "there is no failure in it"),
        (b"lines of anything", "is not key=value"),
    ],
)
def test_refuses_a_file(content: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "failures"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        schedule_of(str(path), 4)
    assert word in str(caught.value)
    assert str(path) in str(caught.value)
