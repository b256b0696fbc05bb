"""`swift-ft completion`: what a shell makes of what it prints."""

import subprocess
import sys
from pathlib import Path

import pytest

from swift_ft import cli

WORDS = [
    (["st"], {"study", "status"}),
    (["status", "--w"], {"--watch"}),
    (["events", "--j"], {"--job", "--json"}),
    (["run", "--strat"], {"--strategy"}),
    (["run", "--start-method", ""], {"fork", "spawn"}),
    (["run", "tr"], {"train.py"}),
    (["logserver", "--addr"], {"--address-file"}),
    (["coordinator", "--log-s"], {"--log-servers"}),
    (["drill", "--sched"], {"--schedule"}),
    (["bench", "che"], {"checkpoint"}),
    (["completion", ""], {"bash", "zsh"}),
]


def test_bash_completes_commands_flags_choices_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    lines = [capsys.readouterr().out]
    for words, _ in WORDS:
        typed = " ".join(f"'{word}'" for word in ["swift-ft", *words])
        lines.append(f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; COMPREPLY=(); _shtab_swift_ft")
        lines.append('echo "${COMPREPLY[@]}"')
    (tmp_path / "train.py").touch()
    bash = ["bash", "--norc", "-c", "\n".join(lines)]
    done = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert [set(line.split()) for line in done.stdout.splitlines()] == [found for _, found in WORDS]


def test_zsh_shows_what_each_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef swift-ft")
    assert all(f"\n    {name}:'" in script for name in [*cli.PROGRAMS, *cli.OTHERS])


def test_without_shtab_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == (
        "swift: completion: shtab is not installed: pip install 'swift-ft[completion]'\n"
    )
