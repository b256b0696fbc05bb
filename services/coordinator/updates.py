"""What watchers are told of a View: made once for all that know the same one."""

from swift._pb import coordinator_pb2 as pb
from swift.control import updates
from swift.control.plans import of_view


class Updates:
    """Of all jobs; of each only what leads to its newest View is kept."""

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def to(self, view: pb.View, known: pb.View | None, rank: int | None) -> pb.ViewUpdate:
        """For a watcher that knows `known`, of that rank; None: of none, who is told all."""
        made = self._made.get(view.job)
        if made is None or made.view is not view:
            made = self._made[view.job] = _Made(view, made)
        reads_log = rank is None or rank in made.readers
        key = (0 if known is None else known.revision, reads_log)
        if key not in made.updates:
            made.updates[key] = (
                updates.whole(view, reads_log=reads_log)
                if known is None
                else updates.between(known, view, reads_log=reads_log)
            )
        return made.updates[key]


class _Made:
    def __init__(self, view: pb.View, before: "_Made | None") -> None:
        self.view = view
        self.readers = _readers(view, before)
        self.updates: dict[tuple[int, bool], pb.ViewUpdate] = {}


def _readers(view: pb.View, before: _Made | None) -> frozenset[int]:
    """Worked out once in a generation, which has one plan."""
    if before is not None and before.view.plan == view.plan:
        return before.readers
    published = of_view(view)
    return frozenset() if published is None else published.plan.log_readers
