"""What the doctor finds about GPUs, by an nvidia-smi that a test has written."""

import os
from pathlib import Path
from typing import Any

import pytest

from swift_ft.tools import doctor
from swift_ft.tools.doctor import GIB, Status

ONE_GPU = "0, NVIDIA H200, 580.159.03, 143771, 4, Enabled, {errors}"
XIDS = """\
4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.
4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault
4,3,3,-;NVRM: Xid (PCI:0000:5e:00): 13, pid=7, Graphics Exception
"""


def gpus(
    directory: Path, monkeypatch: pytest.MonkeyPatch, script: str, messages: str = ""
) -> list[tuple[str, str, str]]:
    """What is found with this nvidia-smi."""
    tool, kmsg = directory / "nvidia-smi", directory / "kmsg"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    kmsg.write_text(messages)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return [
        (f.check, str(f.status), f.found) for f in doctor.devices(1.0, kmsg) if f.check != "torch for GPUs"
    ]


def test_gpus_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"echo '{ONE_GPU.format(errors=0)}'; echo '{ONE_GPU.format(errors=3)}'"
    good, bad, xid = gpus(tmp_path, monkeypatch, script, XIDS)
    assert good[:2] == ("gpu 0", "ok")
    assert "NVIDIA H200, driver 580.159.03" in good[2]
    assert bad[1] == "fail"
    assert xid == ("gpu PCI:0000:3b:00", "warn", "XID 79")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'No devices were found'; exit 6", []),
        (
            'echo "couldn\'t communicate with the NVIDIA driver"; exit 9',
            ["communicate with the NVIDIA driver"],
        ),
        ("exec sleep 60", ["no answer in 1 s"]),
        ("echo 0, a GPU", ["0, a GPU"]),
    ],
)
def test_a_tool_that_cannot_tell(
    script: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = gpus(tmp_path, monkeypatch, script)
    assert len(said) == len(found)
    assert all(words in line[2] and line[1] == "warn" for words, line in zip(found, said, strict=True))


LINKS = """\
GPU {number}: NVIDIA H200 (UUID: GPU-1b2c)
\t Link 0: 26.562 GB/s
\t Link 1: {second}
"""
SLOW, DOWN = LINKS.format(number=1, second="13.281 GB/s"), LINKS.format(number=1, second="<inactive>")
NONE = LINKS.format(number=1, second="<inactive>").replace("26.562 GB/s", "<inactive>")
GOOD = LINKS.format(number=0, second="26.562 GB/s")


@pytest.mark.parametrize(
    ("status", "found"),
    [
        (f"echo '{GOOD}'", {"0": ("ok", "2 of 2 links up, 53 GB/s")}),
        (f"echo '{GOOD}{DOWN}'", {"0": ("ok", "2 of 2"), "1": ("warn", "1 of 2 links up, 27 GB/s")}),
        (f"echo '{GOOD}{SLOW}'", {"0": ("ok", "2 of 2"), "1": ("warn", "2 of 2 links up, 40 GB/s")}),
        (f"echo '{GOOD}{NONE}'", {"0": ("ok", "2 of 2"), "1": ("warn", "0 of 2 links up, 0 GB/s")}),
        (f"echo '{NONE}'", {}),
        ("echo 'no such option: nvlink'; exit 2", {}),
    ],
    ids=["up", "one is down", "one is slow", "all of one are down", "none", "an old tool"],
)
def test_nvlinks_are_looked_at(
    status: str, found: dict[str, tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        f"if [ \"$1 $2\" = 'nvlink --status' ]; then {status}\nelse echo '{ONE_GPU.format(errors=0)}'; fi"
    )
    said = {
        check.removeprefix("nvlink of gpu "): (judged, words)
        for check, judged, words in gpus(tmp_path, monkeypatch, script)
        if check.startswith("nvlink")
    }
    assert said.keys() == found.keys()
    assert all(
        said[gpu][0] == judged and said[gpu][1].startswith(words) for gpu, (judged, words) in found.items()
    )


def test_links_that_are_not_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"[ $1 = nvlink ] && exec sleep 60; echo '{ONE_GPU.format(errors=0)}'"
    assert [line[:2] for line in gpus(tmp_path, monkeypatch, script)] == [("gpu 0", "ok"), ("gpu", "warn")]


def test_nothing_is_said_where_there_is_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(doctor.devices()) == []


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.OK),
        ({"ecc": "[N/A]"}, Status.OK),
        ({"uncorrected": 1}, Status.FAIL),
        ({"ecc": "Disabled"}, Status.WARN),
        ({"used_bytes": 9 * GIB}, Status.WARN),
    ],
)
def test_a_gpu(changes: dict[str, Any], status: Status) -> None:
    good = {"memory_bytes": 80 * GIB, "used_bytes": 8 * GIB, "ecc": "Enabled", "uncorrected": 0}
    assert doctor.gpu("0", "a GPU", "580.1", **{**good, **changes}).status is status
