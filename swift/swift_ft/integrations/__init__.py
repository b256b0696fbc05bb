"""Sessions for other people's frameworks, each in a module that imports its framework.

huggingface a subclass of `transformers.Trainer`
lightning   a strategy for `lightning.pytorch.Trainer`
torchtitan  a subclass of its trainer
"""

import copy
from collections.abc import Callable
from typing import Any

from swift_ft.state.module_state import is_plain


class Attributes:
    """Attributes of a thing that has no state of its own, to be registered; by default all that are plain, without
    times."""

    def __init__(self, thing: Callable[[], Any], *names: str) -> None:
        self._thing, self._names = thing, names

    def state_dict(self) -> dict[str, Any]:
        thing = self._thing()
        plain = (name for name, value in vars(thing).items() if is_plain(value) and "_time" not in name)
        return {name: getattr(thing, name) for name in self._names or plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self._thing()).update(copy.deepcopy(state))
