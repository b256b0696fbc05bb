"""`swift-ft run`, from a LaunchPlan to the job's end."""

import os
import socket
from collections.abc import Callable
from dataclasses import replace

from torch.distributed import DistError

from swift_ft import events
from swift_ft.credentials import VARIABLES
from swift_ft.errors import ServiceError
from swift_ft.launch.agent import ReplacingAgent
from swift_ft.launch.children import Nursery, SignalGate, Signalled
from swift_ft.launch.command import PRELOAD_DEFAULT, LaunchPlan, Meeting
from swift_ft.launch.decisions import Outcome
from swift_ft.launch.link import CoordinatorLink
from swift_ft.launch.rendezvous import (
    LoopbackRendezvous,
    MetRendezvous,
    NotNeeded,
    PlacedRendezvous,
    Rendezvous,
)
from swift_ft.launch.standalone import Services
from swift_ft.text import LAUNCHER_SETTINGS, tell


def _make_rendezvous(plan: LaunchPlan, wake: Callable[[], None], services: Services | None) -> Rendezvous:
    config = plan.config
    ranks = config.nproc_per_node
    match plan.meeting:
        case Meeting.ALONE:
            return LoopbackRendezvous(
                ranks, config.timeout_s, lambda: "" if services is None else services.lost
            )
        case Meeting.COORDINATOR:
            return MetRendezvous(
                plan.job,
                nodes=(config.min_nodes, config.max_nodes),
                ranks=ranks,
                address=config.local_addr or socket.getfqdn(),
                terms=plan.terms,
                wake=wake,
                say=tell,
            )
    address, port = config.endpoint
    return PlacedRendezvous(ranks, config.node_rank, config.max_nodes, address, port)


def _say_unfit(reason: str) -> None:
    tell(
        f"run: --preload: {reason}: ranks are not forked but spawned (--start-method spawn says so beforehand)"
    )


def _summary(plan: LaunchPlan, coordinator: str) -> list[str]:
    assert plan.standalone is not None
    directory, job = f"./{plan.standalone.directory}", plan.job
    count = plan.config.nproc_per_node
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    spares = "1 spare" if plan.spare_count == 1 else f"{plan.spare_count} spares"
    strategy = os.environ.get(LAUNCHER_SETTINGS["strategy"]) or "the script's, or auto"
    where = f"checkpoints and log are in {directory}"
    if job.checkpoint_dir != str(plan.standalone.checkpoints.absolute()):
        where = f"checkpoints are in {job.checkpoint_dir}, the log is in {directory}"
    return [
        f"job {job.name}: {ranks} and {spares} on this machine; strategy: {strategy}",
        f"{where}: the same command, started again, goes on from there",
        f"to watch it: swift-ft status --coordinator {coordinator} --job {job.name}",
    ]


def run(plan: LaunchPlan) -> Outcome:
    """Runs the job's local ranks to the end. Raises ServiceError if the trainers' store fails, or a service of the
    job's own."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(each.name for each in plan.config.signals)
    events.emit("launcher_start", job=plan.job.name)
    if plan.standalone is not None:
        for name in VARIABLES:  # of other services than its own
            os.environ.pop(name, None)
    asked = plan.preload != PRELOAD_DEFAULT
    nursery = Nursery(
        dict(os.environ),
        plan.job.sys_path0(),
        plan.preload,
        fork=plan.fork,
        on_unfit=_say_unfit if asked else lambda reason: None,
    )
    gate = SignalGate(plan.config.signals, nursery.wake)
    services = None if plan.standalone is None else Services(plan.standalone, nursery, tell)
    try:
        if services is not None:
            nursery.tend()  # the modules of ranks are imported meanwhile
            with gate.raising():
                coordinator = services.start()
            for line in _summary(plan, coordinator):
                tell(line)
            plan = replace(plan, job=replace(plan.job, coordinator=coordinator))
        return _run_ranks(plan, nursery, gate, services)
    except Signalled as error:
        return Outcome(exit_code=128 + error.signal, line=f"swift: stopped by {error.signal.name}")
    finally:
        if services is not None:
            services.close()


def _run_ranks(plan: LaunchPlan, nursery: Nursery, gate: SignalGate, services: Services | None) -> Outcome:
    link = CoordinatorLink(plan.job.coordinator, plan.job.name, nursery.wake)
    rendezvous: Rendezvous | None = None
    try:
        with gate.raising():
            rendezvous = _make_rendezvous(plan, nursery.wake, services)
        agent = ReplacingAgent(plan, machines=rendezvous, nursery=nursery, link=link, gate=gate)
        agent.run()
    except NotNeeded as reason:
        return Outcome(exit_code=0, line=f"swift: this machine is not needed: {reason}")
    except Signalled as error:
        link.stop(plan.job.run, f"{error.signal.name} on {socket.gethostname()}")
        raise
    except DistError as error:
        raise ServiceError(f"run: the store for trainers: {' '.join(str(error).split())}") from error
    finally:
        link.close()
        if rendezvous is not None:
            rendezvous.leave()
    assert agent.outcome is not None
    return agent.outcome
