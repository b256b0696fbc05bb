"""The README says how many lines a trainer changes; this counts them."""

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def changed_lines() -> int:
    """Lines of code in the resilient trainer that its plain twin does not have."""
    plain, resilient = (
        (ROOT / "examples" / name).read_text().split('"""', 2)[2].splitlines()
        for name in ("plain.py", "resilient.py")
    )
    return sum(line.startswith("+ ") and bool(line[2:].strip()) for line in difflib.ndiff(plain, resilient))


def test_the_readme_tells_the_truth_about_changed_lines() -> None:
    stated = re.search(r"(\d+) changed lines", (ROOT / "README.md").read_text())
    assert stated is not None
    assert int(stated.group(1)) == changed_lines() <= 8
