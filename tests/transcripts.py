"""Transcripts: files of blocks, which are commands, a line of dashes, what they gave, and an empty line.

Lines that begin with # are comments. `pytest --rewrite` writes what comes out now (the fixture `golden`).
"""

from collections.abc import Callable, Iterable


def rerun(text: str, run: Callable[[str], Iterable[str]]) -> str:
    """The transcript with what its commands give now."""
    blocks = []
    for block in text.strip().split("\n\n"):
        commands = block.split("\n----", 1)[0].split("\n")
        given = [line for command in commands if not command.startswith("#") for line in run(command)]
        blocks.append("\n".join([*commands, "----", *given]))
    return "\n\n".join(blocks) + "\n"
