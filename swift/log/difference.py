"""A tensor that was computed again is not that of the first time: what it is, in words for the trainer's author."""

from swift.log.record import RecordKey

_LOADER = "; is what it comes from registered (session.register(loader=...))?"
_CAPTURED = "; the step depends on something that is not captured"
_DIGEST_SHOWN = 4


def differs_words(stream: str, key: RecordKey, logged: bytes, computed: bytes, who: str = "") -> str:
    """`who`: whose computation it was, if not this rank's."""
    by = f"the tensor that {who} computed" if who else "the tensor computed again"
    digests = (
        f"{by} ({computed[:_DIGEST_SHOWN].hex()}) is not the logged one ({logged[:_DIGEST_SHOWN].hex()})"
    )
    what, hint = _named(stream, key)
    return f"{stream} {key}: {what}: {digests}{hint}"


def _named(stream: str, key: RecordKey) -> tuple[str, str]:
    place, _, kind = stream.rpartition(".")
    stage = place.partition("c")[0].removeprefix("s")
    where = f"of stage {stage} in step {key.step}, microbatch {key.microbatch}"
    match kind:
        case "X":
            return f"external input {key.slot} {where}", _LOADER
        case "T":
            return f"the target {where}", _LOADER
        case "F":
            return f"the activation {where}", _CAPTURED
        case "B":
            return f"the gradient {where}", _CAPTURED
    return f"the result of collective {key.slot} in step {key.step}", _CAPTURED
