"""A machine that is too busy to judge what strategies cost in time."""

import subprocess
import sys
from pathlib import Path

import pytest

from swift_ft.lab.bench import output
from swift_ft.lab.study import figures, page
from tests.unit.study.test_figures import SETTINGS, result

SPIN = "import os, time; deadline = time.process_time() + 0.5\nwhile time.process_time() < deadline: pass"


def test_the_share_of_others_is_what_neither_this_process_nor_its_children_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As /proc/stat has it: user, nice, system, idle, iowait, irq, softirq, steal."""
    busy_s = 100.0
    monkeypatch.setattr(output, "_busy_s", lambda: busy_s)
    monkeypatch.setattr(output.os, "cpu_count", lambda: 4)
    times = iter([0.0, 10.0, 10.0, 10.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(times))
    others = output.Others()
    own_s = output._own_s()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    child_s = output._own_s() - own_s
    assert child_s > 0.5
    busy_s += child_s + 8.0
    assert others.share() == pytest.approx(0.2, abs=0.01)
    busy_s -= 8.0
    assert others.share() == pytest.approx(0.0, abs=0.01)
    busy_s += 1000.0
    assert others.share() == 1.0


def test_idle_and_waiting_processors_are_not_busy(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(
        "cpu  100 20 30 9999 9999 4 5 6 70 70\ncpu0 100 20 30 9999 9999 4 5 6 70 70\n"
    )
    assert output._busy_s(str(tmp_path / "stat")) * output.os.sysconf("SC_CLK_TCK") == pytest.approx(165)
    assert output._busy_s() > 0


@pytest.mark.parametrize(("others", "warned"), [(0.0, False), (0.1, False), (0.43, True)])
def test_a_busy_machine_is_named_before_any_figure(others: float, warned: bool) -> None:
    results = {cell: result(cell) for cell in SETTINGS.cells()}
    found = figures.build(SETTINGS, results, "a machine", [], others)
    lines = figures.lines(found)
    assert ("TOO BUSY TO JUDGE: other programs had 43 % of the processors" in lines[1]) == warned
    assert ("TOO BUSY TO JUDGE" in page.build(found)) == warned
