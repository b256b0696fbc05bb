"""What a session is told about recovery groups."""

import pytest

from swift_ft.errors import UsageError
from swift_ft.train.config import SessionConfig


def test_all_ranks_agree_on_groups_however_they_are_written() -> None:
    one, other = SessionConfig(groups=" 0-1, 2-2"), SessionConfig(groups="0-1,2")
    assert one.agreed() == other.agreed()
    assert one.agreed()["groups"] == "0-1,2"
    assert one.agreed() != SessionConfig(groups="0,1-2").agreed()
    assert SessionConfig().agreed()["groups"] == ""


def test_groups_that_are_none_are_bad_input() -> None:
    with pytest.raises(UsageError, match="2 does not begin at 1"):
        SessionConfig(groups="0,2")
