"""What a View says, in words for people: `swift-ft status`, and the launcher's lines."""

from swift._pb import coordinator_pb2 as pb

STARTED_AGAIN = "started again"
"""How the reason of a job begins that was over and has been started once more."""


def state_name(state: int) -> str:
    """One that only a newer coordinator knows has a number alone."""
    return pb.State.Name(state) if state in pb.State.values() else f"STATE_{state}"  # type: ignore[arg-type]


def has_left_forming(view: pb.View | None) -> bool:
    """As far as is seen."""
    return view is not None and view.state not in (pb.FORMING, pb.FAILED, pb.STOPPED)


def inexact_words(view: pb.View) -> str:
    """Empty: the bits are those of a run that never failed."""
    if not view.HasField("inexact_since"):
        return ""
    return f"not exact since version {view.inexact_since}: {view.inexact_reason}"


def end_words(view: pb.View) -> list[str]:
    """What is to be said of a run that came to its end. Empty: it has done all of its steps, exactly."""
    words = []
    if view.state == pb.FINISHED and view.reason:  # its trainer has ended it
        words.append(f"{view.reason}; with more than {view.ends_of} steps it goes on")
    return [*words, *filter(None, [inexact_words(view)])]
