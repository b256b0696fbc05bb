"""torch's elastic agent, except that a dead rank is replaced and the others are left alone.

From torch: the rendezvous (one machine or many), global ranks, the barrier at the end, and a restart of the
local ranks when a new *node* wants to join. From here: the children, and everything about one rank's death.

    (kernel)  a child's pidfd becomes readable
    (agent)   notice to the coordinator, queued; a warm spare gets the rank; once the job runs again, a new
              spare is started, so that importing torch takes no CPU time from the recovery
    (agent)   a View says FAILED, or fences a child of ours: stops everything, or kills that child
"""

import signal
import sys
import time
from dataclasses import dataclass

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.launch.children import Child, Nursery
from swift.launch.decisions import Action, Verdict, judge_exit
from swift.launch.link import CoordinatorLink
from swift.launch.ranks import Job, Output, make_assignment, rank_env
from swift.launch.signals import SignalGate
from swift.launch.torch_names import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState

SPARE_DELAY_S_MAX = 30.0
"""A new spare is started this long after a death, even if no View says that the job runs again."""
FAILED_GRACE_S = 0.5
"""After a View says FAILED, children may end by themselves this long, and have their last words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the launcher ends."""

    exit_code: int
    line: str = ""


class ReplacingAgent(SimpleElasticAgent):
    """One machine's ranks and spares."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        job: Job,
        output: Output,
        spare_count: int,
        grace_s: float,
        nursery: Nursery,
        link: CoordinatorLink,
        gate: SignalGate,
    ) -> None:
        super().__init__(spec)
        self._job = job
        self._output = output
        self._spare_count = spare_count
        self._grace_s = grace_s
        self._nursery = nursery
        self._link = link
        self._gate = gate
        self._ranks: dict[int, Child] = {}
        """By local rank: its living process. A rank that ended with 0 has none."""
        self._replacements_left = spec.max_restarts
        self._has_run = False
        self._view_revision = 0
        self._last_death: tuple[float, int] | None = None
        """Time and generation of the newest death whose recovery is not over."""
        self.outcome: Outcome | None = None

    # What torch's agent calls.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        for worker in worker_group.workers:
            self._give_rank(worker.local_rank)
        return {local_rank: child.pid for local_rank, child in self._ranks.items()}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        ranks, self._ranks = list(self._ranks.values()), {}
        self._nursery.stop(ranks, signal.SIGTERM, self._grace_s)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        for spare in self._nursery.spares:
            spare.kill_group()
        self._stop_workers(self._worker_group)
        self._nursery.close()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Blocks until something happens, at most for the monitor interval, and deals with it."""
        warmed, ended = self._nursery.wait(worker_group.spec.monitor_interval)
        self._gate.check()
        for child in warmed:
            events.emit("worker_warm", pid=child.pid, rank=child.rank)
        for child in ended:
            self._on_exit(child)
        self._on_view(self._link.view)
        if self.outcome is not None:
            return RunResult(state=WorkerState.FAILED)
        if not self._ranks:
            done = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=done)
        self._top_up_spares()
        return RunResult(state=WorkerState.HEALTHY)

    def _invoke_run(self, role: str = "default") -> RunResult:
        """torch's loop, without its sleep and without a restart of the group for one failed rank."""
        group = self._worker_group
        for _ in range(group.spec.local_world_size + self._spare_count):
            self._spawn()
        with self._gate.raising():
            self._initialize_workers(group)
        while True:
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state == WorkerState.SUCCEEDED:
                with self._gate.raising():
                    self._exit_barrier()  # type: ignore[no-untyped-call]
                self.outcome = Outcome(exit_code=0)
                return result
            if result.state == WorkerState.FAILED:
                self._stop_workers(group)
                return result
            if group.spec.rdzv_handler.num_nodes_waiting() > 0:
                events.emit("membership_change")
                with self._gate.raising():
                    self._restart_workers(group)

    # Ranks and spares.

    def _spawn(self) -> Child:
        child = self._nursery.spawn()
        events.emit("worker_spawned", pid=child.pid, incarnation=child.incarnation)
        return child

    def _give_rank(self, local_rank: int) -> Child:
        spares = self._nursery.spares
        child = spares[0] if spares else self._spawn()
        group = self._worker_group
        env = rank_env(group, local_rank, restart_count=0, job=self._job, incarnation=child.incarnation)
        rank = group.workers[local_rank].global_rank
        child.assign(rank, make_assignment(self._job, self._output, local_rank, env))
        events.emit(
            "spare_assigned", rank=rank, pid=child.pid, incarnation=child.incarnation, warm=child.warm
        )
        self._ranks[local_rank] = child
        group.workers[local_rank].id = child.pid
        return child

    def _top_up_spares(self) -> None:
        if len(self._nursery.spares) < self._spare_count and self._is_quiet():
            self._spawn()

    def _is_quiet(self) -> bool:
        """No recovery is going on, as far as the launcher can tell."""
        if self._last_death is None:
            return True
        died_at, generation = self._last_death
        view = self._link.view
        recovered = view is not None and view.state == pb.RUNNING and view.generation > generation
        if recovered or events.now() - died_at > SPARE_DELAY_S_MAX:
            self._last_death = None
            return True
        return False

    # What happens to them.

    def _on_exit(self, child: Child) -> None:
        assert child.exit_code is not None
        if child.rank is None:
            events.emit("spare_exit", pid=child.pid, code=child.exit_code)
            return
        local_rank = next((local for local, held in self._ranks.items() if held is child), None)
        if local_rank is None:
            return
        del self._ranks[local_rank]
        events.emit("child_exit", rank=child.rank, pid=child.pid, code=child.exit_code)
        verdict = judge_exit(
            child.rank, child.exit_code, replacements_left=self._replacements_left, has_run=self._has_run
        )
        if verdict.action == Action.DONE or self.outcome is not None:
            return
        self._link.notify_exit(child.rank, child.pid, child.exit_code, child.incarnation)
        if verdict.action == Action.STOP:
            self._stop_for(verdict)
            return
        self._replacements_left -= 1
        view = self._link.view
        self._last_death = (events.now(), 0 if view is None else view.generation)
        self._give_rank(local_rank)

    def _stop_for(self, verdict: Verdict) -> None:
        self._link.fail(verdict.reason)
        # Usage errors have said all there is to say.
        line = "" if verdict.exit_code == 2 else f"swift: {verdict.reason}: the job is stopped"
        self.outcome = Outcome(exit_code=verdict.exit_code, line=line)

    def _on_view(self, view: pb.View | None) -> None:
        if view is None or view.revision == self._view_revision or self.outcome is not None:
            return
        self._view_revision = view.revision
        self._has_run = self._has_run or view.state == pb.RUNNING
        if view.state == pb.FAILED:
            self._on_failed(view)
            return
        fenced = {member.incarnation for member in view.fenced}
        for child in self._ranks.values():
            if child.incarnation in fenced:
                events.emit("fenced_kill", rank=child.rank, pid=child.pid)
                print(f"swift: rank {child.rank} (pid {child.pid}) is fenced: killed", file=sys.stderr)
                child.kill_group()

    def _on_failed(self, view: pb.View) -> None:
        deadline = time.monotonic() + FAILED_GRACE_S
        exit_codes = set()
        while self._ranks and (left_s := deadline - time.monotonic()) > 0:
            for child in self._nursery.wait(left_s)[1]:
                self._ranks = {local: held for local, held in self._ranks.items() if held is not child}
                exit_codes.add(child.exit_code)
        if 2 in exit_codes:
            self.outcome = Outcome(exit_code=2)
        else:
            self.outcome = Outcome(exit_code=1, line=f"swift: job failed: {view.reason}")
