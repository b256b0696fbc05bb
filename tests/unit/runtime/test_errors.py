"""What is said of an error that ends a job."""

import pytest

from swift_ft.comm.backend import is_communication, words_of
from swift_ft.comm.gloo import GlooBackend


def test_what_it_was_raised_from_is_said_too() -> None:
    """A worker of a DataLoader was killed; the job had failed because "[Stage 1] failed to run forward:"."""
    error = RuntimeError("\n    [Stage 1] failed to run forward:\n    args: ()\n")
    error.__cause__ = ValueError("no such token\nand more")
    assert words_of(error) == "RuntimeError: [Stage 1] failed to run forward: ValueError: no such token"
    assert words_of(error.__cause__) == "ValueError: no such token"
    assert words_of(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5678"),
            True,
        ),
        (RuntimeError("Process group world: connection of an ended generation"), True),
        (RuntimeError("process group: there is no generation yet"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection"), False),
    ],
)
def test_what_a_lost_peer_may_be_behind(error: Exception, expected: bool) -> None:
    lost_peer = GlooBackend().is_lost_peer
    assert is_communication(error, lost_peer) is expected
    outer = RuntimeError("[Stage 1] failed to run forward")
    outer.__cause__ = error
    assert is_communication(outer, lost_peer) is expected
