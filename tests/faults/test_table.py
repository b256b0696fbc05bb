"""docs/faults.md names every fault, and the tests that there are: none is missing, none is invented."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
FAULTS = range(1, 47)

ROW = re.compile(r"\| (\d+) \|.*\| ([^|]*) \|")
SECTION = re.compile(r"\| \| \*\*.*\*\* \| \| `(\w+\.py)` \|")


def written() -> dict[str, str]:
    """Name -> file."""
    return {
        node.name: path.name
        for path in FOLDER.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_f")
    }


def table() -> dict[int, dict[str, str]]:
    """Fault -> its tests -> the file that the table says they are in."""
    found: dict[int, dict[str, str]] = {}
    file = ""
    for line in (FOLDER.parents[1] / "docs" / "faults.md").read_text().splitlines():
        if section := SECTION.fullmatch(line):
            file = section[1]
        elif row := ROW.fullmatch(line):
            assert int(row[1]) not in found, f"fault {row[1]} stands there twice"
            found[int(row[1])] = dict.fromkeys(re.findall(r"`(test_f\w+)`", row[2]), file)
    return found


def test_the_table_and_the_tests_are_the_same() -> None:
    listed = table()
    assert sorted(listed) == list(FAULTS)
    assert {name: file for tests in listed.values() for name, file in tests.items()} == written()
    for fault, tests in listed.items():
        assert all(name.startswith(f"test_f{fault:02d}_") for name in tests), fault


def test_every_fault_has_a_test() -> None:
    assert [fault for fault, tests in table().items() if not tests] == []
