"""Options of the test suite, and what all of it shares."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.integration.forked import Forks

# The same examples in every run: what is merged is not stopped by an old fault that chance finds just then.
# `scripts/test --hypothesis-profile=explore` looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("repeatable")

# Of the jobs that tests start, those rehearse recoveries whose test says so (`--rehearse`).
os.environ.setdefault("SWIFT_REHEARSE", "off")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what came out into the golden files")


@pytest.fixture(scope="session")
def forks() -> "Iterator[Forks]":
    """One fork server for each process that runs tests."""
    from tests.integration.forked import Forks

    forks = Forks()
    yield forks
    forks.close()
