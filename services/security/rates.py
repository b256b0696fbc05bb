"""How often something may happen, by name: a bucket that fills steadily and holds twice what a second brings."""

import threading

_NAMES_MAX = 4096


class Rates:
    """Thread-safe. ``per_s`` of 0: as often as it likes."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}

    def takes(self, name: str, now: float) -> bool:
        """False: too often."""
        if not self._per_s:
            return True
        most = max(2 * self._per_s, 1.0)
        with self._lock:
            left, at = self._left.get(name, (most, now))
            left = min(most, left + (now - at) * self._per_s)
            if len(self._left) >= _NAMES_MAX and name not in self._left:
                self._left.clear()  # everybody begins anew
            self._left[name] = (left - 1 if left >= 1 else left, now)
            return left >= 1
