"""What torch waits for: a message or a collective that is under way, as torch's Work."""

from collections.abc import Callable
from typing import Any

import torch

from swift.runtime import _torch
from swift.runtime.backends.base import Pending
from swift.runtime.backends.runner import Task


class MessageWork(_torch.Work):
    """A point-to-point operation. `broke` hears of its error."""

    def __init__(self, pending: Pending, broke: Callable[[Exception], None]):
        super().__init__()
        self._pending = pending
        self._broke = broke

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._pending.wait()
        except RuntimeError as error:
            self._broke(error)
            raise
        return True


class FinishedWork(_torch.Work):
    """A collective that is over: its result is there, or will not be used."""

    def __init__(self, result: list[torch.Tensor]):
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class CollectiveWork(_torch.Work):
    """A collective. `broke` hears of its error; with `swallow` torch does not."""

    def __init__(
        self,
        task: Task,
        result: list[torch.Tensor],
        broke: Callable[[Exception], None],
        *,
        swallow: bool,
    ):
        super().__init__()
        self._task = task
        self._result = result
        self._broke = broke
        self._swallow = swallow

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._task.wait()
        except RuntimeError as error:
            self._broke(error)
            if not self._swallow:
                raise
        return True

    def is_completed(self) -> bool:
        return self._task.done

    def get_future(self) -> Any:
        """A torch Future: of the result, or of the collective's error, unless that is swallowed."""
        future: Any = torch.futures.Future()

        def over() -> None:
            error = self._task.error
            if error is not None:
                self._broke(error)
            if error is None or self._swallow:
                future.set_result(self._result)
            else:
                future.set_exception(error)

        self._task.then(over)
        return future
