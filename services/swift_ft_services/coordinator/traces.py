"""Traces of recoveries, for OpenTelemetry: a span of the recovery, in it a span of each state that the job goes through
(FENCING, PLANNING, RECOVERING), and in these a span of each rank for which that state waited.

A recovery begins and ends as in `metrics`. Its spans are made when it is over, with the times that were noted
meanwhile. They are sent by a thread of OpenTelemetry's, which drops what it cannot send. This module is loaded only if
the environment names where to.
"""

import asyncio
import importlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, StatusCode, Tracer, set_span_in_context

from swift_ft_services.coordinator.job_record import JobRow, State

PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PHASES_MAX = 64
"""Of one recovery; older ones are left out."""
SPANS_MAX = 1 << 14
"""That wait to be sent; more are dropped."""
FLUSH_S = 1.0
_PHASES = (State.FENCING, State.PLANNING, State.RECOVERING)


@dataclass(slots=True)
class _Phase:
    state: State
    generation: int
    began: int
    ranks: list[tuple[int, str, int]] = field(default_factory=list)
    """(rank, what it did, when)"""


@dataclass(slots=True)
class _Recovery:
    """All times are nanoseconds since 1970 by the clock at its beginning: a clock that is set changes no duration."""

    reason: str
    offset: int
    phases: list[_Phase] = field(default_factory=list)
    seen: Mapping[str, set[int]] = field(default_factory=dict)
    """What ranks do -> those that have done it in this generation."""

    def now(self) -> int:
        return self.offset + time.monotonic_ns()


class RecoveryTraces:
    """Used on the driver's loop."""

    def __init__(self, tracer: Tracer, flush: Callable[[], object]) -> None:
        self._tracer = tracer
        self._flush = flush
        self._recoveries: dict[str, _Recovery] = {}

    def after_durable(self, row: JobRow) -> None:
        recovery = self._recoveries.get(row.job)
        if recovery is None and row.state not in _PHASES:
            return
        if recovery is None:
            recovery = _Recovery(row.reason, time.time_ns() - time.monotonic_ns())
            self._recoveries[row.job] = recovery
        done: Mapping[str, Collection[int]] = {
            "joins": row.holders,
            "reports": row.reports,
            "is ready": row.ready,
        }
        at = recovery.now()
        phase = recovery.phases[-1] if recovery.phases else None
        if phase is None or phase.generation != row.generation:
            recovery.seen = {what: set(ranks) for what, ranks in done.items()}
        else:  # what ends a phase was done in it
            for what, ranks in done.items():
                new = sorted(set(ranks) - recovery.seen[what])
                recovery.seen[what].update(new)
                phase.ranks += [(rank, what, at) for rank in new]
        if row.state not in _PHASES:
            self._end(row, self._recoveries.pop(row.job), at)
        elif phase is None or (phase.state, phase.generation) != (row.state, row.generation):
            recovery.phases.append(_Phase(row.state, row.generation, at))
            del recovery.phases[:-PHASES_MAX]

    def _end(self, row: JobRow, recovery: _Recovery, ended: int) -> None:
        """Makes the spans in another thread, since there may be thousands."""
        told = {"swift.job": row.job, "swift.generation": row.generation, "swift.reason": recovery.reason}
        strategies: Mapping[int, str] = {}
        if row.plan is not None:
            told |= {"swift.plan": row.plan.reason, "swift.version": row.plan.target_version}
            told["swift.exact"] = row.plan.exact
            strategies = {each.rank: str(each.strategy) for each in row.plan.ranks}
        error = "" if row.state is State.RUNNING else f"{row.state}: {row.reason}"
        asyncio.get_running_loop().run_in_executor(None, self._make, recovery, ended, told, strategies, error)

    def _make(
        self,
        recovery: _Recovery,
        ended: int,
        told: Mapping[str, Any],
        strategies: Mapping[int, str],
        error: str,
    ) -> None:
        """`strategies`: those of the last generation, by rank. `error`: why the recovery has failed, or empty."""
        phases, job = recovery.phases, {"swift.job": told["swift.job"]}
        root = self._span("recovery", None, phases[0].began, told)
        if error:
            root.set_status(StatusCode.ERROR, error)
        for phase, end in zip(phases, [*(each.began for each in phases[1:]), ended], strict=True):
            span = self._span(
                str(phase.state), root, phase.began, job | {"swift.generation": phase.generation}
            )
            is_last = phase.generation == told["swift.generation"]
            for rank, what, at in phase.ranks:
                planned = {"swift.strategy": strategies[rank]} if is_last and rank in strategies else {}
                one = self._span(
                    f"rank {rank} {what}", span, phase.began, job | {"swift.rank": rank} | planned
                )
                one.end(at)
            span.end(end)
        root.end(ended)

    def _span(self, name: str, parent: Span | None, began: int, attributes: Mapping[str, Any]) -> Span:
        within = Context() if parent is None else set_span_in_context(parent, Context())
        return self._tracer.start_span(name, within, start_time=began, attributes=attributes)

    def forget_recoveries(self) -> None:
        """(the store is lost) Another coordinator may end them."""
        self._recoveries.clear()

    def close(self) -> None:
        """Sends what is left, for at most FLUSH_S."""
        thread = threading.Thread(target=self._flush, name="traces", daemon=True)
        thread.start()
        thread.join(FLUSH_S)


def from_environment() -> RecoveryTraces:
    """Returns what sends to the endpoint that the environment names. Raises ImportError without the packages for it,
    and whatever OpenTelemetry makes of variables of its own."""
    protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "grpc").partition("/")[0]
    exporter = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter")
    named = Resource.create({"service.name": "swift-coordinator"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter.OTLPSpanExporter(), max_queue_size=SPANS_MAX))
    return RecoveryTraces(provider.get_tracer("swift_ft"), provider.shutdown)
