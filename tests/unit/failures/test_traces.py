"""Trace files: what is read, how nodes become hosts, every mistake in one line."""

from pathlib import Path

import pytest

from swift_ft.errors import UsageError
from swift_ft.fault_grammar import RankFault
from swift_ft.lab.failures import schedule
from swift_ft.lab.failures.schedule import Outage, schedule_of

TRACE = """\
Class, start ,node,end,kind,place
GPU,0.5,gamma,3,,rack 1
NIC,2,alpha,4,stop,rack 2
"Fan, rear",2.25,beta,,,rack 1
GPU,6,gamma,7,,rack 1
"""


def written(directory: Path, text: str = TRACE) -> Path:
    path = directory / "trace.csv"
    path.write_text(text)
    return path


def test_rows_are_read_by_time_and_by_the_names_of_columns(tmp_path: Path) -> None:
    assert schedule.read_trace(written(tmp_path)) == [
        Outage(node="gamma", start=0.5, end=3.0),
        Outage(node="alpha", start=2.0, end=4.0, kind="stop"),
        Outage(node="beta", start=2.25),
        Outage(node="gamma", start=6.0, end=7.0),
    ]


def test_a_trace_becomes_failures_of_the_jobs_hosts(tmp_path: Path) -> None:
    path = written(tmp_path, TRACE.replace("gamma", "0").replace("alpha", "1").replace("beta", "2"))
    made = schedule_of(f"trace={path},per=0.25,for=3", 3)
    assert list(map(str, made.faults)) == [
        "rank=0,step=2,phase=idle",
        "kind=stop,rank=1,step=8,phase=idle,for=3",
        "rank=2,step=9,phase=idle",
        "rank=0,step=24,phase=idle",
    ]


def test_a_failure_lasts_as_long_as_the_row_says_if_times_are_seconds(tmp_path: Path) -> None:
    path = written(tmp_path, "node,start,end,kind\n1,2,4,stop\n")
    made = schedule_of(f"trace={path},per=0.5,unit=seconds", 2)
    assert list(map(str, made.faults)) == ["kind=stop,rank=1,at=4,for=4"]


def test_a_window_of_the_trace(tmp_path: Path) -> None:
    path = written(tmp_path, TRACE.replace("gamma", "0").replace("alpha", "1").replace("beta", "1"))
    made = schedule_of(f"trace={path},from=2,until=6,kind=kill", 2)
    assert [(f.rank, f.step) for f in made.faults if isinstance(f, RankFault)] == [(1, 0), (1, 0)]


def test_a_file_may_be_given_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path, "node,start\n0,3\n1,7\n")
    assert schedule_of(str(path), 2).faults == schedule_of(f"trace={path}", 2).faults


def test_names_are_drawn_by_the_seed_and_so_many_as_the_job_has_hosts(tmp_path: Path) -> None:
    rows = "".join(f"n{node},{node}\n" for node in range(40))
    path = written(tmp_path, "node,start\n" + rows)
    made = [schedule_of(f"trace={path},seed={seed}", 4).faults for seed in range(8)]
    assert [schedule_of(f"trace={path},seed={seed}", 4).faults for seed in range(8)] == made
    assert len(set(made)) == 8
    for faults in made:
        assert {f.rank for f in faults if isinstance(f, RankFault)} == {0, 1, 2, 3}
    rare = [_count(f"trace={path},seed={seed},nodes=400") for seed in range(100)]
    assert sum(rare) == pytest.approx(4 * 100 * 40 / 400, rel=0.5), "a host is one of 400 nodes"


def _count(spec: str) -> int:
    try:
        return len(schedule_of(spec, 4).faults)
    except UsageError:
        return 0


@pytest.mark.parametrize(
    ("text", "options", "word"),
    [
        ("", "", "no trace: its first line must name the columns"),
        (
            '\n[{"node": "a"}]',
            "",
            "a JSON list is no schedule: write a trace as CSV (docs/drills.md#traces)",
        ),
        ("start,end\n1,2\n", "", "with node and start among them"),
        ("node,start\n", "", "there is no failure in it"),
        ("node,start\na,soon\n", "", "line 2: start must be a number of 0 or more, not 'soon'"),
        ("node,start\na,1\nb,nan\n", "", "line 3: start must be a number"),
        ("node,start\na,-1\n", "", "line 2: start must be a number of 0 or more"),
        ("node,start,end\na,3,2\n", "", "line 2: end 2 is before start 3"),
        ("node,start\n,3\n", "", "line 2: node is empty"),
        ("node,start,kind\na,3,burn\n", "", "line 2: unknown kind 'burn': one of kill, stop"),
        ("node,start\n7,3\n", "", "there is no host 7: hosts are 0 to 3"),
        ("node,start\na,3\nb,4\n", ",nodes=1", "nodes must be at least 2"),
        ("node,start,kind\n1,3,slow\n", "", "kind=slow needs for=SECONDS"),
        ("node,start,kind\n1,3,slow\n", ",for=3", "kind=slow needs factor=F, more than 1"),
        ("node,start\n1,3\n", ",from=9", "none of its failures is of this job"),
        ("node,start\n" + "1,3\n" * 501, "", "more than 500 failures"),
        ("node,start\n1,3\n", ",mtbf=3", "unknown key 'mtbf'"),
        ("node,start\n1,3\n", ",per=0", "per must be a number from 1e-06"),
    ],
)
def test_refuses(text: str, options: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        schedule_of(f"trace={written(tmp_path, text)}{options}", 4)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
