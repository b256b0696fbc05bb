"""What watchers are told of a View: made once for all that know the same one."""

from swift._pb import coordinator_pb2 as pb
from swift.control import updates


class Updates:
    """Of all jobs; of each only what leads to its newest View is kept."""

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def to(self, view: pb.View, known: pb.View | None, rank: int | None) -> pb.ViewUpdate:
        """For a watcher that knows `known`, of that rank; None: of none, who is told all."""
        made = self._made.get(view.job)
        if made is None or made.view is not view:
            made = self._made[view.job] = _Made(view)
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
    def __init__(self, view: pb.View) -> None:
        self.view = view
        self.readers = updates.log_readers(view.plan)
        self.updates: dict[tuple[int, bool], pb.ViewUpdate] = {}
