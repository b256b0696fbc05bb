"""Failures, distributions and schedules, as hypothesis draws them."""

from hypothesis import strategies as st

from swift_ft.fault_grammar import (
    BUCKET_PHASES,
    LAYER_PHASES,
    MICROBATCH_PHASES,
    PHASES,
    RECOVERY_PHASES,
    STATES,
    CoordinatorFault,
    CorruptCheckpointFault,
    CorruptCopyFault,
    CorruptFault,
    Fault,
    LogLossFault,
    LogServerFault,
    RankFault,
)

numbers = st.integers(0, 999)
seconds = st.integers(0, 10**9).map(lambda millionths: millionths / 10**6)


@st.composite
def when(draw: st.DrawFn) -> dict[str, float | int]:
    return draw(st.one_of(numbers.map(lambda n: {"step": n}), seconds.map(lambda s: {"at_s": s})))


@st.composite
def lasting(draw: st.DrawFn) -> dict[str, object]:
    kind = draw(st.sampled_from(["kill", "stop", "hang", "device", "slow"]))
    if kind == "kill":
        return {}
    if kind == "device":
        return {"kind": kind}
    if kind == "slow":
        factor = draw(st.integers(1000, 10**6).map(lambda thousandths: thousandths / 1000))
        return {"kind": kind, "factor": factor, "for_s": draw(seconds)}
    return {"kind": kind, "for_s": draw(st.none() | seconds)}


@st.composite
def rank_fault(draw: st.DrawFn) -> RankFault:
    about = draw(lasting())
    if draw(st.booleans()):
        return RankFault(rank=draw(numbers), at_s=draw(seconds), **about)  # type: ignore[arg-type]
    phase = draw(st.sampled_from(PHASES))
    return RankFault(
        rank=draw(numbers),
        phase=phase,
        step={"replay": draw(st.none() | numbers), "copy": None}.get(phase, draw(numbers)),
        microbatch=draw(numbers) if phase in MICROBATCH_PHASES else 0,
        layer=draw(st.sampled_from(["", "Blocks.1"])) if phase in LAYER_PHASES else "",
        bucket=draw(st.none() | numbers) if phase in BUCKET_PHASES else None,
        **({} if phase in RECOVERY_PHASES else about),  # type: ignore[arg-type]
    )


def any_fault() -> st.SearchStrategy[Fault]:
    streams = st.sampled_from(["", "s0.F", "s12.B"])
    return st.one_of(
        rank_fault(),
        when().map(lambda at: LogServerFault(**at)),  # type: ignore[arg-type]
        st.builds(LogLossFault, server=numbers, step=st.none() | numbers),
        st.builds(CoordinatorFault, state=st.sampled_from(STATES)),
        when().map(lambda at: CoordinatorFault(**at)),  # type: ignore[arg-type]
        st.builds(CorruptFault, step=numbers, stream=streams),
        st.builds(CorruptCheckpointFault, rank=numbers, step=numbers),
        st.builds(CorruptCopyFault, rank=numbers),
    )


@st.composite
def any_distribution(draw: st.DrawFn) -> str:
    """An entry, as a user writes it."""
    law = draw(st.sampled_from(["exponential", "weibull,shape=0.4", "weibull,shape=1.5"]))
    kind = draw(st.sampled_from(["kill", "stop,for=2.5", "slow,factor=4,for=1"]))
    words = [
        f"every={law}",
        f"mtbf={draw(st.integers(5, 500))}",
        f"count={draw(st.integers(1, 40))}",
        f"kind={kind}",
    ]
    words += draw(st.sampled_from([[], ["lemons=1"], ["lemons=2", "lemon=3"]]))
    options = {
        "seed": numbers,
        "until": st.integers(1, 200),
        "together": st.sampled_from([0, 0.5, 1]),
        "per_host": st.integers(1, 3),
        "unit": st.sampled_from(["steps", "seconds"]),
        "phase": st.sampled_from(["idle", "backward", "any"]),
        "microbatches": st.integers(1, 8),
    }
    asked = draw(st.lists(st.sampled_from(list(options)), unique=True))
    return ",".join([*words, *(f"{name}={draw(options[name])}" for name in asked)])
