"""Which steps a rank has not logged that was copied from a replica, so that it does not do them again. No I/O.

It goes on behind what its streams hold already: what its predecessor had not sent any more when it was killed stays
missing, and so does the rest of a step that it has dropped itself, while the replica has finished it. So whoever was
copied looks, and declares these steps (`swift.log.unlogged`).

A stream is written in order, so what the log has of it is whole, or declared, below its last step. Of that step, and of
those behind it, nothing in the log says how many records there ought to be; but a replica's process lives, has flushed,
and does the same with other batches: what it has logged is what there ought to be.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from swift.log.record import RecordKey
from swift.log.unlogged import Steps, declared, mark

Keys = Collection[RecordKey]


def gaps(
    own: Mapping[str, Sequence[Keys]], alike: Sequence[Mapping[str, Keys]], steps: Steps
) -> dict[str, Steps]:
    """Stream -> the steps among `steps` that it lacks and does not declare; the streams that lack none are not named.

    ``own``: by stream, what each server has of it. ``alike``: of each replica, what it has logged, by the name of our
    own stream; a stream that cannot be read is left out. Both from the first of `steps` on. Where no replica can tell,
    a step that is the last one there, or lies behind it, counts as missing.
    """
    replicas = [_Replica(logged, steps.first) for logged in alike]
    if not any(replica.begins is not None for replica in replicas) and not any(map(any, own.values())):
        return {}  # a trainer that logs nothing
    found: dict[str, Steps] = {}
    for stream, copies in own.items():
        # A server that has come meanwhile begins with nothing: the coordinator knows from where on it is whole.
        held = [copy for copy in copies if copy] or [()]
        lacking = sorted({step for copy in held for step in _lacking(stream, copy, replicas, steps)})
        if lacking:
            _add(found, stream, Steps(lacking[0], lacking[-1]), held)
    return found


def _add(found: dict[str, Steps], stream: str, steps: Steps, copies: Sequence[Keys]) -> None:
    """One copy may hold the mark that another one lacks. It is not written again: a key has one sequence."""
    while any(mark(steps) in copy for copy in copies) and steps.first > 0:
        steps = Steps(steps.first - 1, steps.last)
    if not any(mark(steps) in copy for copy in copies):
        found[stream] = steps


def _lacking(stream: str, copy: Keys, replicas: Sequence["_Replica"], steps: Steps) -> Iterable[int]:
    last = max((key.step for key in copy), default=steps.first)
    marked = _marked(copy)
    for step in range(max(last, steps.first), steps.last + 1):
        if any(one.first <= step <= one.last for one in marked):
            continue
        told = [logged for replica in replicas if (logged := replica.of(stream, step)) is not None]
        if not told or not frozenset().union(*told) <= {key for key in copy if key.step == step}:
            yield step


class _Replica:
    """What one of them has logged, as far as that can be relied on."""

    def __init__(self, logged: Mapping[str, Keys], first: int) -> None:
        self._logged = logged
        self._first = first
        real = [key.step for keys in logged.values() for key in keys if declared(key) is None]
        self.begins = min(real, default=None)

    def of(self, stream: str, step: int) -> frozenset[RecordKey] | None:
        """The keys of its step. None: it cannot tell, as its log begins later (a server was lost), has a gap there, or
        is damaged."""
        if self.begins is None or step < self.begins or (step == self.begins != self._first):
            return None
        keys = self._logged.get(stream)
        if keys is None or any(one.first <= step <= one.last for one in _marked(keys)):
            return None
        return frozenset(key for key in keys if key.step == step)


def _marked(keys: Keys) -> list[Steps]:
    return [steps for steps in map(declared, keys) if steps is not None]
