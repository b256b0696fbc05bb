"""UNDO, on the rank that does it."""

from swift import events
from swift.errors import ReplayRefused, ServiceError
from swift.optim.journal import UndoResult
from swift.recovery import RankPlan
from swift.runtime.strategies.restore import Restore, Site


class Undo(Restore):
    """Takes the applied buckets back, by the journals of its optimizers; or a whole step, by the copy of before it."""

    def restore(self, site: Site, mine: RankPlan) -> None:
        try:
            loaded = site.staggering.take_back(mine.from_version)
            if loaded is not None:
                site.tell_lost(loaded, mine.from_version)
                _tell(site, UndoResult(mode="copy", exact=True, buckets=0))
                return
            results = site.state.undo()
        except ServiceError as error:  # the parameters are of no version now; the next plan does without them
            site.state.present = False
            raise ReplayRefused(str(error)) from None
        for result in results:
            _tell(site, result)


def _tell(site: Site, result: UndoResult) -> None:
    events.emit(
        "undone",
        rank=site.rank,
        generation=site.generation,
        version=site.state.version,
        mode=result.mode,
        exact=result.exact,
        buckets=result.buckets,
        ulps_max=result.ulps_max,
        ulps_mean=result.ulps_mean,
        relative_error=result.step_error,
    )
