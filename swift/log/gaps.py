"""Which steps a rank has not logged that was copied from a replica, so that it does not do them again. No I/O.

It goes on behind what its streams hold already: what its predecessor had not sent any more when it was killed stays
missing, and so does the rest of a step that it has dropped itself, while the replica has finished it. So whoever was
copied looks, and declares these steps (`swift.log.unlogged`).

A stream is written in order, so what the log has of it is whole, or declared, below its last step. Of that step, and of
those behind it, nothing in the log says how many records there ought to be; but a replica's process lives, has flushed,
and does the same with other batches: what it has logged is what there ought to be. A replica whose flush has failed,
or that was copied itself and has not looked yet, is no witness: it says so with its copy (`swift.runtime.replica`).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from swift.log.record import RecordKey
from swift.log.unlogged import Steps, declared, mark

Keys = Collection[RecordKey]


def gaps(
    own: Mapping[str, Sequence[Keys]], alike: Iterable[Mapping[str, Keys]], steps: Steps
) -> dict[str, Steps]:
    """Stream -> the steps among `steps` that it lacks and does not declare; the streams that lack none are not named.

    ``own``: by stream, what each server has of it. ``alike``: of each replica that has flushed, what it has logged, by
    the name of our own stream; a stream that cannot be read is left out. The next one is taken only where those before
    it cannot tell. Both from the first of `steps` on. Where no replica can tell, a step that is the last one there, or
    lies behind it, counts as missing.
    """
    replicas = _Replicas(alike, steps.first)
    if not any(map(any, own.values())) and not any(replica.ends is not None for replica in replicas):
        return {}  # a trainer that logs nothing
    gap_of: dict[str, Steps] = {}
    for stream, copies in own.items():
        # A server that has come meanwhile begins with nothing: the coordinator knows from where on it is whole.
        held = [copy for copy in copies if copy] or [()]
        lacking = sorted({step for copy in held for step in _lacking(stream, copy, replicas, steps)})
        if lacking:
            _add(gap_of, stream, Steps(lacking[0], lacking[-1]), held)
    return gap_of


def _add(gap_of: dict[str, Steps], stream: str, steps: Steps, copies: Sequence[Keys]) -> None:
    """One copy may hold the mark that another one lacks. It is not written again: a key has one sequence."""
    while any(mark(steps) in copy for copy in copies) and steps.first > 0:
        steps = Steps(steps.first - 1, steps.last)
    if not any(mark(steps) in copy for copy in copies):
        gap_of[stream] = steps


def _lacking(stream: str, copy: Keys, replicas: "_Replicas", steps: Steps) -> Iterable[int]:
    held = _Stream(copy)
    for step in range(max(held.last, steps.first), steps.last + 1):
        if held.lacks(step):
            continue
        wanted = replicas.of(stream, step)
        if wanted is None or not wanted <= held.keys[step]:
            yield step


class _Stream:
    """The keys of one stream, by step."""

    def __init__(self, keys: Keys) -> None:
        self.keys: defaultdict[int, set[RecordKey]] = defaultdict(set)
        self._marked: list[Steps] = []
        self.last = max((key.step for key in keys), default=-1)
        for key in keys:
            if (marked := declared(key)) is not None:
                self._marked.append(marked)
            else:
                self.keys[key.step].add(key)
        self.begins, self.ends = min(self.keys, default=None), max(self.keys, default=None)

    def lacks(self, step: int) -> bool:
        """It is declared."""
        return any(marked.first <= step <= marked.last for marked in self._marked)


class _Replica:
    """What one of them has logged, as far as that can be relied on."""

    def __init__(self, logged: Mapping[str, Keys], first: int) -> None:
        self._first = first
        self._streams = {name: _Stream(keys) for name, keys in logged.items()}
        written = [s for s in self._streams.values() if s.begins is not None and s.ends is not None]
        self.ends = max((s.ends for s in written if s.ends is not None), default=None)
        self._whole = all(s.begins == first for s in written)

    def of(self, stream: str, step: int) -> set[RecordKey] | None:
        """The keys of its step. None: it cannot tell, as its log begins later (a server was lost), does not go so far,
        has a gap there, or is damaged."""
        logged = self._streams.get(stream)
        if logged is None or logged.lacks(step) or self.ends is None or step > self.ends:
            return None
        begins = logged.begins
        if begins is None:  # it never writes it, or what it has written is gone
            return set() if self._whole else None
        if step < begins or (step == begins != self._first):
            return None
        return logged.keys[step]


class _Replicas:
    """Asked one after the other, as they are needed."""

    def __init__(self, alike: Iterable[Mapping[str, Keys]], first: int) -> None:
        self._coming = (_Replica(logged, first) for logged in alike)
        self._come: list[_Replica] = []

    def __iter__(self) -> Iterator[_Replica]:
        yield from self._come
        for replica in self._coming:
            self._come.append(replica)
            yield replica

    def of(self, stream: str, step: int) -> set[RecordKey] | None:
        """As the first one that can tell."""
        return next((keys for replica in self if (keys := replica.of(stream, step)) is not None), None)
