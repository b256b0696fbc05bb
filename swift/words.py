"""Words of others (a server's, a rank's, a file's), as they are shown to people.

Whoever says them may mean the terminal by it: to clear it, to colour it, to write a line that looks like ours. So what
is printed goes through here: `show` on stdout, `tell` on stderr; what goes into a log, `one_line`.
"""

import re
import sys
from collections.abc import Iterable

_INVISIBLE = (
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
_NOT_IN_A_LINE = re.compile(rf"[\x00-\x1f\x7f-\x9f{_INVISIBLE}]")
_NOT_IN_A_TEXT = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_INVISIBLE}]")


def one_line(text: object) -> str:
    """Ends no line, moves no cursor, turns no direction of writing: what would is a space."""
    return _NOT_IN_A_LINE.sub(" ", str(text))


def text_of(text: str) -> str:
    """The same of what may have several lines: they and tabs stay."""
    return _NOT_IN_A_TEXT.sub(" ", text)


def show(lines: Iterable[object]) -> None:
    """On stdout, each as one line."""
    print("\n".join(map(one_line, lines)))


def tell(line: object, who: str = "swift") -> None:
    """On stderr, as one line."""
    print(one_line(f"{who}: {line}" if who else line), file=sys.stderr, flush=True)
