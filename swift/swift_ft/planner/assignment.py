"""Who does what in one generation (`Assignment`), and how long a job waits for a process before it does without.

For how long a job waits for a process that may take a lost rank's place, before the others go on without it.

Nobody knows when one comes. To wait costs the time that it takes. To go on costs two more generations (one now, and one
when a process has come), and steps that take longer until then. The rule is that of renting or buying (Karlin, Manasse,
Rudolph, Sleator 1988: "Competitive snoopy caching"): wait until waiting has cost as much as going on at once would have
cost until then. Whenever the process comes, not more than twice the least possible time is lost.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from swift_ft.planner.types import RankMeasured

# Who does what in one generation: which member holds each slot, and which slot computes each microbatch.
#
# A job has *slots*, numbered for good as torch's DeviceMesh (pipeline, data) numbers the ranks of the full world. What
# outlasts a generation (streams, checkpoints, reports, plans, placement) is named by slot. A *member* is a process,
# with an id that is never used again. A slot is held by a member, or *vacant*.
#
# A *rank number* is a place in the process groups of one generation: the index among the slots that are held. In a full
# world it is the slot's number.
#
# An *origin* is the data-parallel rank to whose batch a microbatch belongs, whoever computes it. Its *owner* at a stage
# is its own slot; where that is vacant, the slot that has adopted the microbatch; without one, nobody. A mean over
# origins is divided by `contributions`, never by the size of a group.
#
# Invariants, which tests/unit/recovery/test_assignment.py draws histories against: rank numbers are 0 to n - 1
# without a gap; no member holds two slots; an owner is held by a member and runs the stage; a stage adopts from
# vacant slots only.


class Slot(NamedTuple):
    """A place in the job."""

    stage_group: int
    """Slots of one stage group run the same stages, each with batches of its own."""
    dp_rank: int
    """Its index in the stage group."""
    shard: int = 0
    """Which part of the stages' state it holds. Slots of a stage group with the same shard are replicas."""


Adopted = Mapping[tuple[int, int], tuple[int, ...]]
"""(stage, origin) of a vacant slot -> the slots that compute its microbatches, in turn, in the order of these."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Of one generation. Raises ValueError where it breaks an invariant."""

    slots: tuple[Slot, ...]
    """By number."""
    group_stages: tuple[tuple[int, ...], ...]
    """The stages of each stage group; none, for ranks that name none."""
    members: Mapping[int, int]
    """Slot -> the id of the member that holds it. Who is not named is vacant."""
    adopted: Adopted = field(default_factory=dict)

    stages: Mapping[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    """Slot -> its stages; of every slot."""
    occupied: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The slots that a member holds, ascending: by rank number."""
    vacant: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _ranks: Mapping[int, int] = field(init=False, repr=False, compare=False)
    _groups: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _places: Mapping[tuple[int, int], int] = field(init=False, repr=False, compare=False)
    _group_of_stage: Mapping[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = range(len(self.slots))
        occupied = tuple(number for number in numbers if number in self.members)
        groups: list[list[int]] = [[] for _ in self.group_stages]
        for number in occupied:
            groups[self.slots[number].stage_group].append(number)
        derived = {
            "stages": {number: self.group_stages[self.slots[number].stage_group] for number in numbers},
            "occupied": occupied,
            "vacant": tuple(number for number in numbers if number not in self.members),
            "_ranks": {number: rank for rank, number in enumerate(occupied)},
            "_groups": tuple(map(tuple, groups)),
            "_places": {(slot.stage_group, slot.dp_rank): n for n, slot in enumerate(self.slots)},
            "_group_of_stage": {stage: g for g, stages in enumerate(self.group_stages) for stage in stages},
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if strangers := sorted(set(self.members) - set(range(len(self.slots)))):
            raise ValueError(f"slot {strangers[0]} is not one of 0 to {len(self.slots) - 1}")
        if len(set(self.members.values())) < len(self.members):
            raise ValueError(f"a member holds two slots: {dict(self.members)}")
        for (stage, origin), owners in self.adopted.items():
            if self.slot_at(stage, origin) in self.members:
                raise ValueError(f"stage {stage} of origin {origin} is not vacant, and cannot be adopted")
            if not owners or not set(owners) <= set(self.holders(stage)):
                raise ValueError(f"slots {list(owners)} adopt from stage {stage}, which not all of them run")

    # --- how it comes about ---

    @classmethod
    def grid(cls, num_slots: int, *, replicas: int = 1, shards: int = 1) -> "Assignment":
        """A full world of `num_slots`, before ranks have named their stages: each stage group counts as one.

        Of `shards` neighbouring slots each holds a part of their stages' state. Raises ValueError.
        """
        dp_size = replicas * shards
        if num_slots < 1 or num_slots % dp_size:
            of = f" of {shards} shards" if shards > 1 else ""
            raise ValueError(
                f"{num_slots} ranks cannot be {replicas} replicas{of}; start a multiple of {dp_size}"
            )
        return cls(
            slots=tuple(Slot(n // dp_size, n % dp_size, n % shards) for n in range(num_slots)),
            group_stages=tuple((group,) for group in range(num_slots // dp_size)),
            members={number: number for number in range(num_slots)},
        )

    @classmethod
    def told(
        cls,
        *,
        num_stages: int,
        stages: Mapping[int, Sequence[int]],
        shards: Mapping[int, int] = MappingProxyType({}),
        members: Mapping[int, int] | None = None,
    ) -> "Assignment":
        """From what the ranks of a full world have said of themselves: their stages, and their shard (0 for who is not
        named). `members`: None for a full world.

        Raises ValueError, in one line, if nothing can be built on it.
        """
        named = {number: tuple(stages[number]) for number in sorted(stages)}
        if list(named) != list(range(len(named))):
            raise ValueError(f"ranks {_listed(list(named))} have named their stages, and not those between")
        if problem := _problem(num_stages, named):
            raise ValueError(problem)
        by_stages: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for number, mine in named.items():  # who names no stage is like nobody else
            by_stages.setdefault((mine, -1 if mine else number), []).append(number)
        slots: dict[int, Slot] = {}
        for group, key in enumerate(sorted(by_stages)):
            for dp_rank, number in enumerate(by_stages[key]):
                slots[number] = Slot(group, dp_rank, shards.get(number, 0))
        return cls(
            slots=tuple(slots[number] for number in range(len(slots))),
            group_stages=tuple(mine for mine, _ in sorted(by_stages)),
            members={number: number for number in slots} if members is None else dict(members),
        )

    def held_by(self, members: Mapping[int, int]) -> "Assignment":
        """The same job in another generation: slot -> the id of the member that holds it. Nothing is adopted."""
        return replace(self, members=dict(members), adopted={})

    def adopting(self, adopted: Adopted) -> "Assignment":
        return replace(self, adopted=dict(adopted))

    def redistributed(self) -> "Assignment":
        """The batches of data-parallel ranks that lack a slot go to those that are whole, in turn: where one lacks a
        stage, the same stage of the other one computes it. So whoever adopts has all of its own neighbours. Raises
        ValueError if none is whole and some slot is vacant."""
        whole = self.whole_origins()
        broken = [origin for origin in range(self.dp_size) if origin not in whole]
        if broken and not whole:
            raise ValueError("no pipeline is whole")
        adopted: dict[tuple[int, int], tuple[int, ...]] = {}
        for turn, origin in enumerate(broken):
            adopter = whole[turn % len(whole)]
            for group, stages in enumerate(self.group_stages):
                if self.at(group, origin) not in self.members:
                    adopted |= {(stage, origin): (self.at(group, adopter),) for stage in stages}
        return self.adopting(adopted)

    def rerouted(self) -> "Assignment":
        """The microbatches of each vacant slot go to all that are left of its stage group, in turn; of several such
        slots, each begins with another one. Raises ValueError if nobody is left of a stage group."""
        adopted: dict[tuple[int, int], tuple[int, ...]] = {}
        for group, stages in enumerate(self.group_stages):
            left = self._groups[group]
            if not left:
                raise ValueError(f"nobody is left of stage group {group}")
            lost = [origin for origin in range(self.dp_size) if self.at(group, origin) not in self.members]
            for turn, origin in enumerate(lost):
                begin = turn % len(left)
                adopted |= {(stage, origin): (*left[begin:], *left[:begin]) for stage in stages}
        return self.adopting(adopted)

    def representatives(self) -> tuple[int, ...]:
        """The first slot that is held, of each stage group that has any."""
        return tuple(group[0] for group in self._groups if group)

    def whole_origins(self) -> tuple[int, ...]:
        """The data-parallel ranks of which no slot is vacant, ascending."""
        lacking = {self.slots[number].dp_rank for number in self.vacant}
        return tuple(origin for origin in range(self.dp_size) if origin not in lacking)

    def pipeline(self, origin: int) -> tuple[int, ...]:
        """The slots that compute the origin's batches, by stage group; those of their own data-parallel rank, or who
        has adopted from it. Shorter where nobody does."""
        owners = (self.owner(stages[0], origin, 0) for stages in self.group_stages)
        return tuple(owner for owner in owners if owner is not None)

    def adopted_by(self, slot: int) -> tuple[int, ...]:
        """The origins that a slot computes besides its own, ascending."""
        return tuple(sorted({origin for (_, origin), owners in self.adopted.items() if slot in owners}))

    # --- slots and members ---

    def rank(self, slot: int) -> int:
        """The rank number of a slot that is held. Raises KeyError for a vacant one."""
        return self._ranks[slot]

    @property
    def num_stages(self) -> int:
        return len(self._group_of_stage)

    @property
    def stage_groups(self) -> int:
        return len(self.group_stages)

    @property
    def dp_size(self) -> int:
        """Slots in a stage group, held or vacant: as many origins are there."""
        return max(slot.dp_rank for slot in self.slots) + 1

    @property
    def shards(self) -> int:
        return max(slot.shard for slot in self.slots) + 1

    @property
    def replicas(self) -> int:
        """Slots that hold the same state, in a full world."""
        return self.dp_size // self.shards

    def at(self, stage_group: int, dp_rank: int) -> int:
        """The number of a slot."""
        return self._places[stage_group, dp_rank]

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The slots that are held, ascending, of each stage group that has any."""
        return tuple(group for group in self._groups if group)

    def group(self, slot: int) -> tuple[int, ...]:
        """The slots that are held in its stage group, ascending."""
        return self._groups[self.slots[slot].stage_group]

    def peers(self, slot: int) -> tuple[int, ...]:
        """The other slots that are held and have the same state, ascending."""
        shard = self.slots[slot].shard
        return tuple(peer for peer in self.group(slot) if peer != slot and self.slots[peer].shard == shard)

    def process_groups(self, slot: int) -> dict[str, tuple[int, ...]]:
        """Name -> the slots of each process group that a slot is in, ascending: those of them that are held.

        ``world``: all. ``pipeline``: those of its dp_rank. ``data``: its stage group. ``replicate`` and ``shard`` (only
        with shards): the two sides of the data group.
        """
        own, shards = self.slots[slot], self.shards
        data = self.group(slot)
        groups = {
            "world": self.occupied,
            "pipeline": tuple(n for n in self.occupied if self.slots[n].dp_rank == own.dp_rank),
            "data": data,
        }
        if shards > 1:
            replica = own.dp_rank // shards
            groups["replicate"] = tuple(n for n in data if self.slots[n].shard == own.shard)
            groups["shard"] = tuple(n for n in data if self.slots[n].dp_rank // shards == replica)
        return groups

    # --- stages and owners ---

    def holders(self, stage: int) -> tuple[int, ...]:
        """The slots that are held and run the stage, ascending."""
        return self._groups[self._group_of_stage[stage]]

    def slot_at(self, stage: int, origin: int) -> int:
        """The slot, held or vacant, that computes the stage for this origin in a full world."""
        return self._places[self._group_of_stage[stage], origin]

    def owner(self, stage: int, origin: int, microbatch: int) -> int | None:
        """The slot that computes this microbatch of the origin's batch. None: nobody does."""
        own = self.slot_at(stage, origin)
        if own in self.members:
            return own
        adopted = self.adopted.get((stage, origin))
        if adopted is None:
            return None
        return adopted[microbatch % len(adopted)]

    def origins(self, stage: int) -> tuple[int, ...]:
        """Those whose batches are computed at the stage, ascending."""
        return tuple(
            origin
            for origin in range(self.dp_size)
            if self.slot_at(stage, origin) in self.members or (stage, origin) in self.adopted
        )

    def contributions(self, stage_group: int) -> int:
        """What a mean over the origins of a stage group's gradients is divided by."""
        return len(self.origins(self.group_stages[stage_group][0]))

    def lost_stages(self) -> tuple[int, ...]:
        """The stages that no member runs: nobody could even rebuild them."""
        return tuple(stage for stage in range(self.num_stages) if not self.holders(stage))


def _problem(num_stages: int, stages: Mapping[int, tuple[int, ...]]) -> str:
    """Why nothing can be built on it; empty: it is sane. `stages`: of each slot, by number."""
    running = {stage: [n for n, mine in stages.items() if stage in mine] for stage in range(num_stages)}
    missing = [stage for stage, numbers in running.items() if not numbers]
    if missing:
        return f"no rank runs stage {missing[0]} of {num_stages}"
    idle = [number for number, mine in stages.items() if num_stages and not mine]
    if idle:
        return f"rank {idle[0]} runs none of the {num_stages} stages"
    for stage, (first, *others) in running.items():
        for other in others:
            if stages[other] != stages[first]:
                return (
                    f"ranks {first} and {other} both run stage {stage}, but rank {first} runs stages "
                    f"{_listed(stages[first])} and rank {other} {_listed(stages[other])}: "
                    "replicas run the same stages"
                )
        if len(others) != len(running[0]) - 1:
            return (
                f"stage 0 runs on {len(running[0])} ranks and stage {stage} on {len(others) + 1}: "
                "every stage needs as many replicas"
            )
    return ""


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


GENERATION_S = 0.5
"""What all ranks take to stop, agree and connect again, without the copy of a state. `swift-ft drill` prints what it
took; on two cores it is 0.2 to 0.4 s."""
COPY_BYTES_PER_S = 1e9
"""At which a replica's state comes to another rank, if nobody has measured it."""


def worth_waiting_s(measured: Iterable[RankMeasured], *, replicas: int, reroutes: bool) -> float | None:
    """Seconds. None: no rank has measured its steps yet. `replicas`: of each stage, in a full world. `reroutes`: the
    peers of a lost rank share its microbatches; else one of them computes all of its batch."""
    known = list(measured)
    if not known:
        return None
    return two_generations_s(known) * slower(replicas, reroutes=reroutes)


def two_generations_s(known: Sequence[RankMeasured]) -> float:
    """What it costs to go on without a rank and to take one back. `known`: at least one rank's."""
    step_s = max(rank.step_s for rank in known)
    copy_s = max((rank.state_bytes or 0) for rank in known) / COPY_BYTES_PER_S
    stall_s = max((rank.checkpoint_stall_s or 0.0) for rank in known)
    # Each generation cuts a step short. Behind the second one a checkpoint is made: the log lacks steps.
    return 2 * (GENERATION_S + step_s) + copy_s + stall_s


def quickest(pipeline_ranks: int, replicas: int) -> str:
    """The `lost_shard` with which a step takes least while a rank is missing (`slower`)."""
    return "reroute" if pipeline_ranks > 1 and replicas > 1 else "redistribute"


def slower(replicas: int, *, reroutes: bool) -> float:
    """How many times as long a step takes while one rank is missing, at best. A second costs then what it costs to wait
    for a second, less what is trained in it."""
    return replicas / (replicas - 1) if reroutes and replicas > 1 else 2.0
