"""What a service makes to keep its state in outlasts a power cut: also what is above it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft.state.checkpoint_place import DirectoryPlace
from swift_ft_services.coordinator.__main__ import open_directory
from swift_ft_services.logserver.disk import RealDisk


@pytest.mark.parametrize(
    "make",
    [lambda path: RealDisk(path).close(), open_directory, lambda path: DirectoryPlace(path).check("probe")],
)
def test_all_directories_that_were_missing_are_synced(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    synced: list[Path] = []

    def noted(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink())
        real(file)

    monkeypatch.setattr(os, "fsync", noted)
    make(tmp_path / "new" / "kept")
    assert synced == [tmp_path, tmp_path / "new"]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    make(tmp_path / "new" / "other")
    assert synced == [tmp_path, tmp_path / "new", tmp_path / "new"]
