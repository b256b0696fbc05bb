"""What is said of an error that ends a job."""

from swift.runtime.errors import words_of


def test_what_it_was_raised_from_is_said_too() -> None:
    """A worker of a DataLoader was killed; the job had failed because "[Stage 1] failed to run forward:"."""
    error = RuntimeError("\n    [Stage 1] failed to run forward:\n    args: ()\n")
    error.__cause__ = ValueError("no such token\nand more")
    assert words_of(error) == "RuntimeError: [Stage 1] failed to run forward: ValueError: no such token"
    assert words_of(error.__cause__) == "ValueError: no such token"
    assert words_of(KeyError()) == "KeyError"
