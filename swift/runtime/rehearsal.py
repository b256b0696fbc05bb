"""`paranoid`: the first step of a generation is computed twice from one state, up to its update, and compared.

(engine) ``arm`` before training begins or goes on → (every rank, first step) ``before``: the step, whose update raises
`Rehearsed`; it is dropped as a failure would drop it → the step again, for good: inputs, losses, what is sent to
neighbours and the gradients must be what they were (`swift.runtime.witness`)

What is not put back when a step is dropped (a loader that is not registered, a counter of the trainer's, randomness
of its own) shows at once, without a failure: at the start the job is refused for it, after a recovery it is named.
"""

from collections.abc import Callable

from swift import events
from swift.runtime import evidence
from swift.runtime.channel import Channel
from swift.runtime.differences import Differences
from swift.runtime.errors import Rehearsed
from swift.runtime.state import TrainerState
from swift.runtime.witness import GRADIENT, Witness


class Rehearsal:
    """One rank's. All ranks arm in the same generation, so they rehearse the same step."""

    def __init__(
        self,
        wanted: bool,
        channel: Channel,
        state: TrainerState,
        witness: Witness,
        differences: Differences,
    ) -> None:
        self._wanted = wanted
        self._channel = channel
        self._state = state
        self._witness = witness
        self._differences = differences
        self._due = False
        state.updates.before_update.bind(self._before_update)

    def arm(self, *, at_start: bool) -> None:
        """`at_start`: the job begins, so that it can be refused."""
        self._due, self._differences.refusing = self._wanted, at_start

    def before(self, train_step: Callable[[int], object], step: int, drop: Callable[[], None]) -> bool:
        """Rehearses the step, if it is the one (True); `drop` takes it back."""
        differences = self._differences
        differences.refusing = differences.refusing and self._due
        if not self._due or self._channel.replaying:
            return False
        self._due, at_start, differences.refusing = False, differences.refusing, False
        self._channel.begin_step(step)
        self._witness.begin(step)
        self._witness.thorough = self._channel.rehearsing = True
        self._state.begin_step()
        try:
            train_step(step)
        except Rehearsed:
            pass
        finally:
            self._channel.rehearsing = False
        drop()
        events.emit("rehearsed", rank=self._channel.rank, step=step)
        differences.refusing = at_start
        return True

    def _before_update(self) -> None:
        """(inside optimizer.step, gradients are reduced, nothing is applied)"""
        if self._witness.thorough:
            for stage in self._state.stages:
                for slot, parameter in enumerate(stage.submod.parameters()):
                    if parameter.grad is not None:
                        self._witness.saw(GRADIENT, stage.stage_index, 0, slot, parameter.grad)
        if self._channel.rehearsing and not self._channel.replaying:
            raise Rehearsed
        evidence.before_update(self._state)
