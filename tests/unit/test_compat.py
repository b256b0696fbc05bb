"""What `scripts/compat` makes of what it sees."""

from pathlib import Path

import pytest
import torch

from swift_ft.lab.drill import command
from tests.compat import environment, seams
from tests.gpu import overlay


@pytest.mark.parametrize("options", seams.DRILLS.values(), ids=list(seams.DRILLS))
def test_every_drill_can_be_run(options: tuple[str, ...]) -> None:
    command.parse(options)


def test_every_test_and_trainer_is_there() -> None:
    assert all((environment.ROOT / path).exists() for path in (*seams.SUITE, *seams.FLOORS_SUITE))
    assert seams.SHARDED in seams.TRAINERS
    assert all((environment.ROOT / "tests" / "trainers" / f"{name}.py").is_file() for name in seams.TRAINERS)


def test_what_is_installed_beside_torch_is_what_tests_need() -> None:
    names = {environment.name_of(each) for each in environment.requirements()}
    assert {"grpcio", "numpy", "numcodecs", "rich", "pytest", "hatchling"} <= names
    assert not names & {"torch", "swift-ft"}
    assert "torch==" not in environment.constraints()


def test_floors_take_the_place_of_pins() -> None:
    pinned, oldest = (environment.constraints(floors=floors).splitlines() for floors in (False, True))
    assert {environment.name_of(line).lower() for line in pinned} == {
        environment.name_of(line).lower() for line in oldest
    }
    assert "protobuf==4.22.1" in oldest
    assert set(pinned) & set(oldest) >= {line for line in pinned if line.startswith("pytest==")}


def test_the_overlay_replaces_the_pipelining_of_an_older_torch_and_keeps_it(tmp_path: Path) -> None:
    source = Path(torch.__file__).parent / "distributed" / "pipelining"
    (tmp_path / "pipelining").mkdir()
    (tmp_path / "pipelining" / "old.py").touch()
    for _ in range(2):
        overlay.lay(source, tmp_path)
        assert [each.name for each in (tmp_path / overlay.BEFORE).iterdir()] == ["old.py"]
        laid = {each.name for each in (tmp_path / "pipelining").iterdir()}
        assert laid == {each.name for each in source.iterdir()} - {"__pycache__"}
        text = (tmp_path / "pipelining" / "schedules.py").read_text()
        assert 'device_type=device_type or "cuda")' in text  # the pinned torch has the line that is replaced
