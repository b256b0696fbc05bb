"""The command line: what it prints and writes, and how it fails."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.lab.plan import report
from swift_ft.lab.plan.command import main, parse
from swift_ft.lab.plan.profile import Cap
from swift_ft.planner import RecoveryGroups
from tests.unit.plan.profiles import profile

ADAPTIVE = ["--adaptive", "--stages", "3", "--replicas", "3", "--microbatches", "4"]
GOODPUT = ["--goodput"]


def written(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(profile(machines=8, **changes).document()))
    return path


def test_it_prints_a_table_and_writes_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    given = written(tmp_path / "profile.json")
    assert main([str(given), "--storage-cap", "6.6kB", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["cap"] == {"storage_bytes": 6600}
    assert document["chosen"]["storage_bytes"] == 6600  # three boundaries of 200 bytes, eleven steps
    assert document["met"]
    starred = [line for line in shown.splitlines() if line.startswith("*")]
    assert len(starred) == 1
    assert starred[0].split()[1:4] == ["4", "6.6", "kB"]
    assert len([line for line in shown.splitlines() if "kB" in line]) >= 7
    assert "machines 0 to 1 (stages 0 to 1)" in shown
    text = document["chosen"]["text"]
    assert f'groups="{text}"' in shown
    groups = RecoveryGroups.parse(text)
    assert groups.num_stages == document["stages"] > len(groups.starts) > 1
    assert [stage for stage in range(groups.num_stages - 1) if groups.crosses(stage, stage + 1)] == document[
        "chosen"
    ]["logged"]


def test_a_cap_of_the_profile_holds_until_the_command_line_says_otherwise(tmp_path: Path) -> None:
    given = written(tmp_path / "profile.json", cap=Cap(kind="storage_bytes", value=4400))
    out = tmp_path / "plan.json"
    assert main([str(given), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["chosen"]["storage_bytes"] == 4400
    assert main([str(given), "--recovery-cap", "100", "--json", str(out)]) == 0
    chosen = json.loads(out.read_text())["chosen"]
    assert chosen["recovery_s"] <= 100
    assert main([str(given), "--worst-recovery-cap", "85", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["chosen"]["worst_recovery_s"] <= 85


@pytest.mark.parametrize(
    ("words", "size"),
    [("12", 12), ("12B", 12), ("1.001kB", 1001), ("800GB", 800 * 10**9), ("0.5TB", 5 * 10**11), ("1.9", 1)],
)
def test_sizes_are_read_to_the_byte(words: str, size: int) -> None:
    assert parse(["profile.json", "--storage-cap", words]).cap == Cap(kind="storage_bytes", value=size)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--recovery-cap", "1"], "no groups recover within 1 s on average; 77.5 s is the least"),
        (["--worst-recovery-cap", "1"], "no groups recover from every failure within 1 s; 77.5 s"),
    ],
)
def test_a_cap_that_cannot_be_met_is_a_verdict(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = written(tmp_path / "profile.json", other_bytes=5)
    out = tmp_path / "plan.json"
    assert main([str(given), *flags, "--json", str(out)]) == 1
    shown = capsys.readouterr()
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1
    assert "recovery groups" in shown.out  # what there is to choose from is shown all the same
    document = json.loads(out.read_text())
    assert (document["met"], words in document["problem"]) == (False, True)


def test_one_group_of_all_keeps_to_any_storage_cap(tmp_path: Path) -> None:
    given = written(tmp_path / "profile.json", other_bytes=5)
    out = tmp_path / "plan.json"
    assert main([str(given), "--storage-cap", "10", "--json", str(out)]) == 0
    chosen = json.loads(out.read_text())["chosen"]
    assert (len(chosen["groups"]), chosen["logged"], chosen["storage_bytes"]) == (1, [], 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "PROFILE"),
        (["{}/none.json"], "No such file"),
        (["{}"], "Is a directory"),
        (["{}/broken.json"], "broken.json: not JSON: line 1, column 12"),
        (["{}/profile.json", "--storage-cap", "much"], "--storage-cap: much: write bytes"),
        (["{}/profile.json", "--storage-cap", "-5"], "--storage-cap"),
        (["{}/profile.json", "--storage-cap", "5kb"], "--storage-cap: 5kb: write bytes"),
        (["{}/profile.json", "--recovery-cap", "soon"], "--recovery-cap: soon: write a time"),
        (["{}/profile.json", "--recovery-cap", "nan"], "--recovery-cap: nan: write a time"),
        (["{}/profile.json", "--recovery-cap", "0"], "cap.recovery_s: must be from"),
        (["{}/profile.json", "--recovery-cap", "1", "--storage-cap", "1"], "not allowed with"),
        (
            ["{}/profile.json", "--json", "{}/no/plan.json"],
            "plan.json: give a file in a directory that exists",
        ),
        (["{}/profile.json", "--json", "{}"], "give a file in a directory that exists"),
        (["--adaptive"], "required: --stages, --replicas, --microbatches"),
        ([*ADAPTIVE, "--failures", "7"], "--failures 7: give 0 to 6"),
        ([*ADAPTIVE[:-1], "60000", "--stages", "100"], "plan with fewer microbatches"),
        ([*ADAPTIVE, "--replicas", "1"], "--replicas 1: give 2 to"),
        ([*ADAPTIVE, "--times", "1,2"], "--times 1,2: write F,I,W or F,I,W,TRANSFER"),
        ([*ADAPTIVE, "--times", "1,2,nan"], "--times 1,2,nan: write"),
        ([*ADAPTIVE, "--times", "1,a,1"], "--times 1,a,1: write"),
        ([*ADAPTIVE, "--cap-factor", "0"], "--cap-factor 0: give 0.01 to 1000"),
        ([*ADAPTIVE, "--svg", "plan.svg"], "unrecognized arguments: --svg"),
        ([*ADAPTIVE, "profile.json"], "unrecognized arguments: profile.json"),
        ([*ADAPTIVE, "--json", "/no/such/place.json"], "--json /no/such/place.json: give a file"),
        (["profile.json", "--stages", "3"], "unrecognized arguments: --stages"),
        ([*GOODPUT, "--ranks", "100"], "--ranks 100: give a multiple of the 8 ranks of a node"),
        ([*GOODPUT, "--ranks", "2000000"], "--ranks 2000000: give 2 to 1000000"),
        ([*GOODPUT, "--replicas", "3"], "--replicas 3: give a number that divides 16384 ranks"),
        ([*GOODPUT, "--replicas", "2048", "--stages", "16"], "--stages 16: a replica has 8 ranks"),
        ([*GOODPUT, "--machine-mtbf", "soon"], "--machine-mtbf: soon: write a time, such as"),
        ([*GOODPUT, "--machine-mtbf", "0"], "--machine-mtbf 0: give 1 s to"),
        ([*GOODPUT, "--set", "load_s"], "--set load_s: write NAME=VALUE"),
        ([*GOODPUT, "--set", "speed=4"], "--set speed=4: there is no figure speed"),
        ([*GOODPUT, "--set", "step_s=0"], "--set step_s=0: step_s is 0; give more than 0"),
        ([*GOODPUT, "--set", "helpers=3h"], "--set helpers=3h: write NAME=VALUE"),
        ([*GOODPUT, "--checkpoint-every", "0s"], "--snapshot-every: give a time above 0"),
        (
            [*GOODPUT, "--machine-mtbf", "5d"],
            "a node is in repair for 132.8 h and fails every 120 h: give a longer",
        ),
        ([*GOODPUT, "--times", "1,1,1"], "unrecognized arguments: --times"),
        (
            [*GOODPUT, "--json", "/no/such/place.json"],
            "--json /no/such/place.json: give a file in a directory that exists",
        ),
        (["profile.json", "--ranks", "8"], "unrecognized arguments: --ranks 8"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "profile.json")
    (tmp_path / "broken.json").write_text('{"profile":')
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1, shown.err


@pytest.mark.parametrize("machines", [1, 2])
def test_the_smallest_jobs_have_plans(machines: int) -> None:
    document = report.build(profile(machines=machines), None)
    assert len(document["frontier"]["points"]) == machines
    assert document["name"] in report.text(document)[0]


EXTREME_S, EXTREME_RATE = st.sampled_from([1e-12, 1.0, 1e12]), st.sampled_from([1.0, 1e9, 1e18])
EXTREME_BYTES = st.sampled_from([1, 10**6, 10**13])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_in_range_has_a_plan(data: st.DataObject) -> None:
    """However far from sense: no warning of numpy, no exception, and nothing in the document that JSON has not."""
    machines = data.draw(st.integers(1, 5))
    seconds, rate, size = (lambda x=x: data.draw(x) for x in (EXTREME_S, EXTREME_RATE, EXTREME_BYTES))
    strange = profile(
        machines=machines,
        microbatches=data.draw(st.sampled_from([1, 10**6])),
        forward_s=tuple(seconds() for _ in range(machines)),
        forward_bytes=tuple(size() for _ in range(machines - 1)),
        other_bytes=data.draw(st.sampled_from([0, 10**13])),
        log_write_bytes_per_s=rate(),
        log_read_bytes_per_s=rate(),
        network_bytes_per_s=rate(),
        checkpoint_interval_steps=data.draw(st.sampled_from([1, 10**9])),
        checkpoint_bytes=tuple(size() for _ in range(machines)),
        checkpoint_bytes_per_s=rate(),
        machine_mtbf_s=tuple(seconds() for _ in range(machines)),
        copies_max=2,
        gradient_bytes=(size(),) * machines,
    )
    kind = data.draw(st.sampled_from(["storage_bytes", "recovery_s", "worst_recovery_s"]))
    document = report.build(strange, Cap(kind=kind, value=data.draw(st.sampled_from([1, 10**12]))))
    json.dumps(document, allow_nan=False)
    assert strange.name in report.text(document)[0]


def test_a_long_frontier_is_thinned_and_keeps_what_is_chosen() -> None:
    """Every number of groups of 60 machines is worth having: with the ends and the chosen one, 24 are shown."""
    document = report.build(profile(machines=60), Cap(kind="storage_bytes", value=2200 * 29))
    shown = report.text(document)
    assert shown[2].startswith("60 choices")
    rows = shown[4 : shown.index("", 4) - 1]  # between the head and "(36 more ...)"
    assert len(rows) <= report.ROWS_MAX
    assert [line.split()[1] for line in rows if line.startswith("*")] == ["30"]
    assert f"({60 - len(rows)} more; --json has all)" in shown
