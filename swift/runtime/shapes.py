"""What shapes the stages of a pipeline send each other, told through the job's store.

torch's stages infer them in the first call of a schedule, and again where it turns from training to evaluation or back,
all of them in the same call: so evaluation may have batches of another size. A process that takes another one's place
infers them in a call in which nobody else does. So an inference is known by its *point*, the step and call in which
it was due: the first stage keeps the list of points, and the shapes that stages tell each other are filed under them.

    (all, before they infer in a call)  the newest point at or before it is of this mode: that one holds
                                        else: the first stage makes this call one, the others wait until it has

Each pipeline has points of its own. While ranks are missing none may be whole: then they infer for all of them, with
the batches of the ranks that are there (`Shapes.together`). Those points are known to each pipeline ever after.
"""

import copy
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from swift.errors import ServiceError

_TIMEOUT_S = 600.0
_POLL_S = 0.02
POINTS_MAX = 1024
"""Older ones are forgotten: no checkpoint is so old."""


class Point(NamedTuple):
    """Where shapes were inferred. Ordered by step and call."""

    step: int
    call: int
    training: bool


class Shapes:
    """Of one rank; ranks of other pipelines have batches of their own.

    (stage) ``infer`` → ``put``, ``get`` until the next one
    """

    def __init__(self, store: Callable[[], Store], dp_rank: int, check: Callable[[], None]):
        """`store`: of the generation that this rank is in. `check` raises once a newer one is published."""
        self._store = store
        self.dp_rank = dp_rank
        """Whose batch is computed."""
        self._check = check
        self._point = Point(0, 0, training=True)
        self._list = ""
        """Of points, in which this one is."""
        self.together = False
        """All pipelines infer, in the same call, or none does: some of their ranks may be missing. What one of them has
        inferred by itself does not count: who knows it would tell nobody, and who has told it may be gone."""
        self._filed: dict[str, deque[str]] = {}
        self._helps = False
        self.schedule = 0
        """The number of the schedule that runs: each turns from training to evaluation by itself."""

    def for_helper(self) -> "Shapes":
        """Of stages that another rank replays: training only, and begun in some call of the step."""
        other = copy.copy(self)
        other._helps = True
        return other

    def infer(self, step: int, call: int, *, training: bool, first: bool) -> None:
        """A stage is about to. `first`: it is the first one of the pipeline."""
        now = Point(step, call, training)
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._at(now):
            if first and not self._helps:
                self._add(now)
            else:
                self._wait(f"the first stage has inferred no shapes in call {call} of step {step}", deadline)

    def put(self, kind: str, one: int, other: int, value: Any) -> None:
        """Stage `one` tells its neighbour."""
        key, link = self._key(kind, one, other), f"{kind}/{one}-{other}"
        self._store().set(key, json.dumps(value))
        filed = self._filed.setdefault(link, deque())
        if key not in filed:
            filed.append(key)
        if len(filed) > POINTS_MAX:
            self._store().delete_key(filed.popleft())

    def get(self, kind: str, one: int, other: int) -> Any:
        """Waits until stage `one` has put it."""
        key = self._key(kind, one, other)
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._store().check([key]):
            self._wait(f"no neighbour has published the shapes of {key}", deadline)
        return json.loads(self._store().get(key))

    def _at(self, now: Point) -> bool:
        """Takes the point that holds now, if there is one."""
        lists = [self._list_of("all"), *([] if self.together else [self._list_of(self.dp_rank)])]
        points = [(point, name) for name in lists for point in self._points(name)]
        if self._helps:
            before = [(point, name) for point, name in points if point.step <= now.step and point.training]
        else:
            before = [(point, name) for point, name in points if point[:2] <= now[:2]]
        newest, name = max(before, default=(None, ""))
        if newest is None or newest.training != now.training:
            return False
        self._point, self._list = newest, name
        return True

    def _add(self, now: Point) -> None:
        name = self._list_of("all" if self.together else self.dp_rank)
        kept = [point for point in self._points(name) if point[:2] != now[:2]]
        self._store().set(name, json.dumps(sorted([*kept, now])[-POINTS_MAX:]))

    def _points(self, name: str) -> list[Point]:
        if not self._store().check([name]):
            return []
        return [Point(*each) for each in json.loads(self._store().get(name))]

    def _list_of(self, pipeline: int | str) -> str:
        return f"shapes/{pipeline}/{self.schedule}"

    def _key(self, kind: str, one: int, other: int) -> str:
        point = self._point
        return f"{self._list}/{point.step}.{point.call}.{int(point.training)}/{kind}/{one}-{other}"

    def _wait(self, why: str, deadline: float) -> None:
        """Polls, so that a notice can end it."""
        self._check()
        if time.monotonic() > deadline:
            raise ServiceError(f"{why} in {_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
