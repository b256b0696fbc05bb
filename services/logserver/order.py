"""The keys of a dictionary in their order, where some go again: sequences of records, steps that records are of.

Numbers come at the end as a rule, and go from the front, so both cost next to nothing. What a client says is never
counted through: whoever asks gets the next number that is there, however far away it is.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any


class Ordered:
    """``there`` is the dictionary, which its owner changes: `came` after a key was added, `went` after one was
    removed. Those that went stay in the list until there are more of them than of the others."""

    def __init__(self, there: Mapping[int, Any]) -> None:
        self._there = there
        self._numbers: list[int] = []
        """The first of them from ``_head`` on, and the last one, are there."""
        self._head = 0

    def came(self, number: int) -> None:
        numbers = self._numbers
        if not numbers or number > numbers[-1]:
            numbers.append(number)
            return
        at = bisect_left(numbers, number)
        if numbers[at] != number:  # else it had gone, and its place is there still
            numbers.insert(at, number)
        self._head = min(self._head, at)

    def went(self, number: int) -> None:
        """`number` was removed from the dictionary."""
        numbers, there = self._numbers, self._there
        if len(numbers) - self._head > 2 * len(there) + 64 or not there:
            self._numbers = [kept for kept in numbers[self._head :] if kept in there]
            self._head = 0
        elif number == numbers[-1]:
            while numbers[-1] not in there:
                numbers.pop()
        elif number == numbers[self._head]:
            while numbers[self._head] not in there:
                self._head += 1
            if self._head > len(numbers) // 2:
                del numbers[: self._head]
                self._head = 0

    @property
    def first(self) -> int | None:
        return self._numbers[self._head] if self._there else None

    @property
    def last(self) -> int | None:
        return self._numbers[-1] if self._there else None

    def some(self, begin: int, count: int) -> list[int]:
        """At most so many numbers, from ``begin`` on, in order; an empty list: there is none."""
        numbers, there = self._numbers, self._there
        at = bisect_left(numbers, begin, self._head)
        while at < len(numbers):
            present = [number for number in numbers[at : at + count] if number in there]
            if present:
                return present
            at += count
        return []
