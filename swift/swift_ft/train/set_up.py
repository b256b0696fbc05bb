"""Collectives of the trainer's before `session.run`: seeds that are broadcast, barriers, a parameter sync.

The ranks that begin together run them. A process that replaces a lost rank runs the script alone: it gets the results
that the others got, from the keys that ranks share (`swift_ft.rpc.key_value`). A key holds as long as one of the
processes is there that had its result. If none is, all ranks are new, and run the collective again.

What is large is taken for parameters (DDP's sync, `distribute_tensor`, the initialization of DTensors). It is not kept:
such a process computes with its own numbers in place of the others', and its state is loaded later. A rehearsal finds
whatever else depends on them.

Objects are carried as JSON, so nothing that another process sends is unpickled.
"""

import json
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from swift_ft import events
from swift_ft.comm.backend import Collective
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.process_groups import Interrupted
from swift_ft.errors import UsageError
from swift_ft.state import tree
from swift_ft.state.tensors import as_bytes, byte_view, dtype_name, plain
from swift_ft.train.failures import Failures
from swift_ft.train.generation import Membership

KEPT_BYTES = 64 << 10
"""Maximum size of a result that is kept for processes that come later."""
KEPT_FLOAT_BYTES = 1 << 10
"""The same for floating-point numbers, most of which are parameters."""
_OF_PARAMETERS = ("broadcast", "scatter", "all_gather", "all_gather_into_tensor")


class SetUp:
    """Runs the collectives of one process before `session.run`, or answers them."""

    def __init__(
        self,
        rank: int,
        membership: Membership,
        failures: Failures,
        store: Callable[[], Store],
        *,
        alone: bool,
    ) -> None:
        """`store` of the current generation. `alone`: this process holds no rank (a warm-up or a rehearsal)."""
        self._rank = rank
        self._membership = membership
        self._failures = failures
        self._store = store
        self._alone = alone
        self._numbers: Counter[str] = Counter()

    def run(
        self,
        group: ReconfigurableGroup,
        name: str,
        results: list[torch.Tensor],
        run: Collective,
        *,
        alike: bool,
    ) -> None:
        """Fills in the `results` of a collective over `group`. `alike`: all ranks get the same. Raises UsageError if a
        later process could not get them."""
        number = self._numbers[group.label]
        self._numbers[group.label] += 1
        size = sum(result.nbytes for result in results)
        most = KEPT_FLOAT_BYTES if any(result.is_floating_point() for result in results) else KEPT_BYTES
        if size > most and name not in _OF_PARAMETERS:
            raise UsageError(
                f"dist.{name} of {size} bytes before session.run: a process that replaces a lost rank could not get "
                f"the result, of which {most} bytes are kept; do it in train_step"
            )
        whose = group.ranks[0] if alike else self._rank
        key = f"set-up/{group.label}-{whose}/{number}"
        forms = [[dtype_name(result), list(result.shape)] for result in results]
        kept = size <= most
        before = [result.detach().clone() for result in results]
        while True:
            try:
                if not self._alone:
                    self._membership.join_newest()
                told = self._told(key)
                if told is None:
                    group.run(run)
                    self._tell(key, name, forms, results if kept else [])
                else:
                    self._answer(key, told, name, forms, results)
                    if not kept:
                        group.run_alone(run)
                return
            except (Interrupted, RuntimeError) as error:
                if self._alone:
                    raise
                # Done again by all, unless one of them has told the result.
                for result, earlier in zip(results, before, strict=True):
                    result.detach().copy_(earlier)
                self._failures.handle(error, self._membership.generation)

    def agree(self, made: Sequence[str]) -> None:
        """(session.run) Raises UsageError unless all ranks have made the same process groups, in the same order.
        `made`: name and ranks of each."""
        if self._alone or self._membership.finished or not made:
            return
        key, mine = "set-up/groups", json.dumps({"made": list(made)} | self._signed())
        told = json.loads(self._store().compare_set(key, "", mine))
        if not self._holds(told):
            told = json.loads(self._store().compare_set(key, json.dumps(told), mine))
        ours, theirs = [*made, "none"], [*told["made"], "none"]
        for number, (own, other) in enumerate(zip(ours, theirs, strict=False), start=1):
            if own != other:
                raise UsageError(
                    f"process group {number} of rank {self._rank} is {own!r} (name: ranks), and that of another rank "
                    f"{other!r}: make the same groups in the same order on all ranks, also those without this rank"
                )

    # --- ---

    def _answer(
        self, key: str, told: dict[str, Any], name: str, forms: Any, results: list[torch.Tensor]
    ) -> None:
        if (told["name"], told["forms"]) != (name, forms):
            raise UsageError(
                f"rank {self._rank} comes to dist.{name} {forms} before session.run, and the others came to "
                f"dist.{told['name']} {told['forms']} there: make the same calls in every process"
            )
        for result, data in zip(results, told["data"], strict=False):
            room = torch.empty(result.shape, dtype=result.dtype)
            byte_view(room)[:] = np.frombuffer(b64decode(data), dtype=np.uint8)
            result.detach().copy_(room)
        if not self._alone:
            self._put(key, told)  # it holds for those who come while this process is there
            events.emit("set_up_answered", rank=self._rank, key=key, name=name)

    def _tell(self, key: str, name: str, forms: Any, results: list[torch.Tensor]) -> None:
        data = [b64encode(as_bytes(plain(result)).cpu().numpy().tobytes()).decode() for result in results]
        generation = self._membership.generation
        self._put(key, {"name": name, "forms": forms, "data": data, "generation": generation})

    def _put(self, key: str, told: dict[str, Any]) -> None:
        self._store().set(key, json.dumps(told | self._signed()))

    def _signed(self) -> dict[str, int]:
        return {"newest": max(self._membership.members())}

    def _holds(self, told: dict[str, Any]) -> bool:
        """Returns whether some process of now was there when this was told, by the ids, which grow."""
        return bool(min(self._membership.members()) <= told["newest"])

    def _told(self, key: str) -> dict[str, Any] | None:
        """Returns what is kept under `key`, unless this rank takes part in the collective itself."""
        there = self._store().check([key])
        while self._alone and not there:  # the job's ranks come there as well; the store bounds the wait
            there = self._store().check([key])
        if not there:
            return None
        told: dict[str, Any] = json.loads(self._store().get(key))
        if self._alone or self._membership.finished:
            return told
        # Of the same generation: the others' messages are on the way to this rank.
        return told if self._holds(told) and told["generation"] < self._membership.generation else None


def encoded(value: Any) -> bytes:
    """Returns a plain object as JSON. Raises UsageError for other objects."""
    try:
        tensors, skeleton = tree.split(value, "the object")
    except tree.Inexpressible as error:
        raise UsageError(
            f"a collective of Python objects: {error} (objects are not pickled: nothing is unpickled from a peer)"
        ) from None
    if tensors:
        raise UsageError(
            "a collective of Python objects with tensors among them: send tensors by dist.broadcast or dist.all_gather"
        )
    return json.dumps(skeleton).encode()


def decoded(data: bytes) -> Any:
    return tree.join(json.loads(data), {})
