"""Two runs -> what the second one is worth. Nothing is run here."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from tests.trainers.harness.run import Outcome

SAME, REFUSED, NAMED, MISS = "same bits", "refused", "named inexact", "miss"
_NAMED = re.compile(r"not exact|inexact", re.IGNORECASE)
_OURS = re.compile(r"^swift: ?(.*)$", re.MULTILINE)
_OF_FAILURES = re.compile(r"rank \d+: killed|the job goes on at step|not exact|refused: .*; restored version")
"""What a run says of its failures before it is refused for what they brought to light."""
USAGE, FAILURE = 2, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    word: str
    why: str = ""
    """One line: what was refused or named, or how it missed."""

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


def said(outcome: Outcome) -> list[str]:
    """The lines of ours on standard error."""
    return _OURS.findall(outcome.stderr)


def of_rehearsals(run: Outcome) -> Verdict:
    """What was known before anything failed. MISS: not all ranks were rehearsed at both checkpoints."""
    rehearsals = run.rehearsals or []
    different = next((each["difference"] for each in rehearsals if each["difference"]), "")
    if different:
        return Verdict(word=NAMED, why=different)
    equal = {(each["rank"], each["version"]) for each in rehearsals if not each["why_not"]}
    lacking = {(rank, version) for rank in range(len(run.ends)) for version in (0, 5)} - equal
    # A rank whose script waits for others by itself cannot be rehearsed, which is said.
    waits = {each["rank"] for each in rehearsals if "stands still" in each["why_not"]}
    if lacking := {(rank, version) for rank, version in lacking if rank not in waits}:
        why = next((each["why_not"] for each in rehearsals if each["why_not"]), "there was no time")
        return Verdict(word=MISS, why=f"not rehearsed (rank, version): {sorted(lacking)}: {why}")
    return Verdict(word=SAME)


def of_undisturbed(run: Outcome) -> Verdict:
    """A run without kills, whose replicas must hold the same."""
    if run.code == USAGE or (run.code == FAILURE and _says_what_to_do(run)):
        return _refusal(run)
    if run.code != 0:
        return Verdict(word=MISS, why=f"undisturbed: {_end(run)}")
    if len(run.plans) > run.ended_early:
        return Verdict(word=MISS, why=f"undisturbed: {len(run.plans)} recoveries though nothing failed")
    if not run.ends:
        return Verdict(word=MISS, why="undisturbed: no rank wrote its end")
    first: dict[int, tuple[str, dict[str, str]]] = {}
    for rank, end in run.ends.items():
        alike = {name: end["digests"][name] for name in end["alike"]}
        other, theirs = first.setdefault(end["place"][0], (rank, alike))
        differing = [name for name in alike if alike[name] != theirs.get(name)]
        if differing and not _is_named(run):
            return Verdict(word=MISS, why=f"undisturbed: {', '.join(differing)} differ on {rank} and {other}")
    return Verdict(word=SAME)


def of_killed(undisturbed: Outcome, killed: Outcome, kills: int, lost: Collection[int] = ()) -> Verdict:
    """A run with kills beside the one without. `lost`: ranks that are not there at the end."""
    if killed.code == USAGE:
        refusal = _refusal(killed)
        if refusal.word == REFUSED and (known := of_rehearsals(undisturbed)).word == NAMED:
            return known  # before anything failed; a failure then brought it to light
        return Verdict(word=NAMED, why=refusal.why) if _is_named(killed) else refusal
    if killed.code != 0:
        return Verdict(word=MISS, why=_end(killed))
    different = _differences(undisturbed, killed, [f"rank{rank}" for rank in lost])
    if undisturbed.rehearsals is not None and (known := of_rehearsals(undisturbed)).word != SAME:
        return known  # before anything failed
    if _is_named(killed):
        line = next((line for line in said(killed) if _NAMED.search(line)), "the plan says so")
        return Verdict(word=NAMED, why=line)
    if different:
        return Verdict(word=MISS, why="silently different: " + ", ".join(different[:4]))
    if len(killed.plans) > 2 * kills + 2:
        return Verdict(word=MISS, why=f"{len(killed.plans)} recoveries for {kills} kills")
    return Verdict(word=SAME)


def of_all_killed(undisturbed: Outcome, killed: Outcome, kills: int, lost: Collection[int] = ()) -> Verdict:
    """As `of_killed`, where each kill has to come about."""
    found = of_killed(undisturbed, killed, kills, lost)
    if found.word == SAME and killed.fired < kills:
        return Verdict(word=MISS, why=f"only {killed.fired} of {kills} kills came about")
    return found


def _differences(undisturbed: Outcome, killed: Outcome, lost: Collection[str]) -> list[str]:
    different = [
        f"{rank} has no end" for rank in undisturbed.ends if rank not in killed.ends and rank not in lost
    ]
    for rank, end in undisturbed.ends.items():
        theirs = killed.ends.get(rank, {}).get("digests", {})
        different += [
            f"{rank} {name}" for name, value in end["digests"].items() if theirs and theirs.get(name) != value
        ]
    for rank, losses in undisturbed.losses.items():
        others = killed.losses.get(rank, {})
        wrong = [step for step, text in others.items() if losses.get(step) != text]
        if wrong:
            different.append(f"{rank} losses from step {min(wrong)}")
    return different + [f"{line} said twice, differently" for line in killed.contradictions[:2]]


def _says_what_to_do(run: Outcome) -> bool:
    """Of a trainer whose exception is no mistake."""
    return any("to end a run before its last step, call session.stop()" in line for line in said(run))


def _is_named(run: Outcome) -> bool:
    return any(_NAMED.search(line) for line in said(run)) or any(
        not plan.get("exact", True) for plan in run.plans
    )


def _refusal(run: Outcome) -> Verdict:
    lines = [line for line in said(run) if not _OF_FAILURES.match(line)]
    if len(lines) != 1:
        return Verdict(word=MISS, why=f"refused in {len(lines)} lines: {_end(run)}")
    if "Traceback" in run.stderr:
        return Verdict(word=MISS, why=f"refused with a traceback: {lines[0]}")
    return Verdict(word=REFUSED, why=lines[0])


def _end(run: Outcome) -> str:
    """How it ended, in one line."""
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    ours = said(run)
    how = "stood still" if run.code is None else f"exit code {run.code}"
    last = (ours or lines or ["nothing on standard error"])[-1]
    return f"{how} after {run.seconds:.0f} s, {len(run.plans)} plans; {last}"
