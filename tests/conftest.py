"""Options of the test suite, and what all of it shares."""

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.integration.forked import Forks

# The same examples in every run: what is merged is not stopped by an old fault that chance finds just then.
# `scripts/test --hypothesis-profile=explore` looks for new ones. No test is timed: other work may share the machine.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("repeatable")

# Of the jobs that tests start, those rehearse recoveries whose test says so (`--rehearse`).
os.environ.setdefault("SWIFT_REHEARSE", "off")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what came out into the golden files")


class Resumed:
    """`-m matrix` that was cut off goes on behind what has passed: the same call, at the same commit and changes."""

    def __init__(self, config: pytest.Config) -> None:
        git = ("git", "-C", str(config.rootpath))
        made_of = [
            subprocess.run([*git, *words], capture_output=True, check=False).stdout
            for words in (("rev-parse", "HEAD"), ("diff", "HEAD"))
        ]
        call = "\0".join(config.invocation_params.args).encode()
        name = hashlib.sha256(b"\0".join([*made_of, call])).hexdigest()[:16]
        self._path: Path = config.cache.mkdir("matrix") / name
        self._before = self._path.read_text().split("\n") if self._path.exists() else []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """(xdist) All workers leave out the same, however late one of them starts."""
        node.workerinput["passed"] = self._before

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        leave_out(config, items, self._before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK:
            self._path.unlink(missing_ok=True)  # all of it has passed: the next call is a new one


def leave_out(config: pytest.Config, items: list[pytest.Item], passed: list[str]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "matrix" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Resumed(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items, getattr(config, "workerinput", {}).get("passed", []))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Holds what came out to a golden file, or writes it there."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--rewrite"):
            path.write_text(text)
        assert path.read_text() == text

    return check


@pytest.fixture(scope="session")
def forks() -> "Iterator[Forks]":
    """One fork server for each process that runs tests."""
    from tests.integration.forked import shared

    yield shared()
    shared().close()
