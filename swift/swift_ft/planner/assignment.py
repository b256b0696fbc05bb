"""Placement of the work in one generation (`Assignment`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

# Placement in one generation: which member holds each slot, and which slot computes each microbatch.
#
# A job has *slots*, numbered permanently as torch's DeviceMesh (pipeline, data) numbers the ranks of the full world.
# Names that outlast a generation (streams, checkpoints, reports, plans, placement) use the slot. A *member* is a
# process, with an id that is never reused. A slot is held by a member, or *vacant*.
#
# A *rank number* is a place in the process groups of one generation: the index among the held slots. In a full world it
# is the slot's number.
#
# An *origin* is the data-parallel rank to whose batch a microbatch belongs, wherever it is computed. Its *owner* at a
# stage is its own slot; where that is vacant, the slot that has adopted the microbatch; else there is none. A mean over
# origins is divided by `contributions`, never by the size of a group.
#
# Invariants, checked on random histories in tests/unit/recovery/test_assignment.py: rank numbers are 0 to n - 1 without
# a gap; no member holds two slots; an owner is held by a member and runs the stage; a stage adopts from vacant slots
# only.


class Slot(NamedTuple):
    stage_group: int
    """Slots of one stage group run the same stages, each with batches of its own."""
    dp_rank: int
    """Its index in the stage group."""
    shard: int = 0
    """The part of the stages' state that it holds. Slots of a stage group with the same shard are replicas."""


Adopted = Mapping[tuple[int, int], tuple[int, ...]]
"""(stage, origin) of a vacant slot -> the slots that compute its microbatches, in turn, in the order of these."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The placement of one generation. Raises ValueError if it breaks an invariant."""

    slots: tuple[Slot, ...]
    """Indexed by slot number."""
    group_stages: tuple[tuple[int, ...], ...]
    """The stages of each stage group; empty for ranks without stages."""
    members: Mapping[int, int]
    """Slot -> the id of the member that holds it. A slot without an entry is vacant."""
    adopted: Adopted = field(default_factory=dict)
    tensor: int = 1
    """Neighbouring slots that compute the same batch together (tensor parallelism). Each has a place of its own in the
    stage group, and so streams of its own."""

    stages: Mapping[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    """Slot -> its stages; held or vacant."""
    occupied: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The held slots, ascending: indexed by rank number."""
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

    # --- construction ---

    @classmethod
    def grid(cls, num_slots: int, *, replicas: int = 1, shards: int = 1, tensor: int = 1) -> "Assignment":
        """Returns a full world of `num_slots`, before ranks have reported their stages: each stage group counts as one
        stage.

        A replica is `shards` times `tensor` neighbouring slots, each of which holds a part of their stages' state.
        Raises ValueError if `num_slots` is no positive multiple of the slots of all replicas of a stage.
        """
        parts = shards * tensor
        size = replicas * parts
        if num_slots < 1 or num_slots % size:
            of = (f" of {shards} shards" if shards > 1 else "") + (
                f" of {tensor} ranks" if tensor > 1 else ""
            )
            raise ValueError(
                f"{num_slots} ranks cannot be {replicas} replicas{of}; start a multiple of {size}"
            )
        return cls(
            slots=tuple(Slot(n // size, n % size, n % parts) for n in range(num_slots)),
            group_stages=tuple((group,) for group in range(num_slots // size)),
            members={number: number for number in range(num_slots)},
            tensor=tensor,
        )

    @classmethod
    def from_reports(
        cls,
        *,
        num_stages: int,
        stages: Mapping[int, Sequence[int]],
        shards: Mapping[int, int] = MappingProxyType({}),
        members: Mapping[int, int] | None = None,
    ) -> "Assignment":
        """Returns the assignment for the stages and shards that the ranks of a full world have reported (shard 0 if
        missing). `members`: None for a full world.

        Raises ValueError, in one line, if they form no valid pipeline.
        """
        named = {number: tuple(stages[number]) for number in sorted(stages)}
        if list(named) != list(range(len(named))):
            raise ValueError(f"ranks {_listed(list(named))} have named their stages, and not those between")
        if problem := _problem(num_stages, named):
            raise ValueError(problem)
        by_stages: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for number, mine in named.items():  # a rank without stages is a group of its own
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
        """Returns the same job in another generation, without adoptions. `members`: slot -> the id of its member."""
        return replace(self, members=dict(members), adopted={})

    def adopting(self, adopted: Adopted) -> "Assignment":
        return replace(self, adopted=dict(adopted))

    def redistributed(self) -> "Assignment":
        """Gives the batches of data-parallel ranks with a vacant slot to complete ones, in turn: a vacant slot's stages
        are computed by the same stages of the adopter. So an adopter has all of its own neighbours. Raises ValueError
        if no data-parallel rank is complete and some slot is vacant."""
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
        """Gives the microbatches of each vacant slot to its peers, in turn; several vacant slots start with different
        ones. Raises ValueError if a stage group has no held slot."""
        adopted: dict[tuple[int, int], tuple[int, ...]] = {}
        for group, stages in enumerate(self.group_stages):
            if not self._groups[group]:
                raise ValueError(f"nobody is left of stage group {group}")
            lost = [origin for origin in range(self.dp_size) if self.at(group, origin) not in self.members]
            for turn, origin in enumerate(lost):
                peers = self.peers(self.at(group, origin))
                begin = turn // self.shards % len(peers)
                adopted |= {(stage, origin): (*peers[begin:], *peers[:begin]) for stage in stages}
        return self.adopting(adopted)

    def representatives(self, shard: int) -> tuple[int, ...]:
        """Returns the first held slot with this shard of each stage group that has any."""
        firsts = (next((n for n in group if self.slots[n].shard == shard), None) for group in self._groups)
        return tuple(first for first in firsts if first is not None)

    def whole_origins(self) -> tuple[int, ...]:
        """Returns the data-parallel ranks without a vacant slot, ascending."""
        lacking = {self.slots[number].dp_rank for number in self.vacant}
        return tuple(origin for origin in range(self.dp_size) if origin not in lacking)

    def pipeline(self, origin: int) -> tuple[int, ...]:
        """Returns the slots that compute the origin's first microbatch, by stage group: its own, or an adopter. Stage
        groups without an owner are left out."""
        owners = (self.owner(stages[0], origin, 0) for stages in self.group_stages)
        return tuple(owner for owner in owners if owner is not None)

    def adopted_by(self, slot: int) -> tuple[int, ...]:
        """Returns the origins that a slot computes in addition to its own, ascending."""
        return tuple(sorted({origin for (_, origin), owners in self.adopted.items() if slot in owners}))

    def in_cells(self) -> "Assignment":
        """Returns the same work with each cell as one slot (of number `slot // shards`), and each replica as one origin
        (`dp_rank // shards`)."""
        parts = self.shards
        if parts == 1:
            return self
        heads = [slot for slot in self.slots if slot.shard == 0]
        return Assignment(
            slots=tuple(Slot(slot.stage_group, slot.dp_rank // parts) for slot in heads),
            group_stages=self.group_stages,
            members={n // parts: member for n, member in self.members.items() if n % parts == 0},
            adopted={
                (stage, origin // parts): tuple(owner // parts for owner in owners)
                for (stage, origin), owners in self.adopted.items()
                if origin % parts == 0
            },
        )

    # --- slots and members ---

    def rank(self, slot: int) -> int:
        """Returns the rank number of a held slot. Raises KeyError for a vacant one."""
        return self._ranks[slot]

    @property
    def num_stages(self) -> int:
        return len(self._group_of_stage)

    @property
    def stage_groups(self) -> int:
        return len(self.group_stages)

    @property
    def dp_size(self) -> int:
        """Slots in a stage group, held or vacant; equal to the number of origins (times `tensor`)."""
        return max(slot.dp_rank for slot in self.slots) + 1

    @property
    def shards(self) -> int:
        """Parts of a replica's state, those of tensor parallelism among them."""
        return max(slot.shard for slot in self.slots) + 1

    @property
    def replicas(self) -> int:
        """Slots that hold the same state, in a full world."""
        return self.dp_size // self.shards

    def at(self, stage_group: int, dp_rank: int) -> int:
        return self._places[stage_group, dp_rank]

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the held slots, ascending, of each stage group that has any."""
        return tuple(group for group in self._groups if group)

    def group(self, slot: int) -> tuple[int, ...]:
        """Returns the held slots of the slot's stage group, ascending."""
        return self._groups[self.slots[slot].stage_group]

    def cell(self, slot: int) -> tuple[int, ...]:
        """Returns the slots, held or vacant, that hold one replica of the slot's stages together, ascending. If one of
        them is vacant, so are the others."""
        own = self.slots[slot]
        first = own.dp_rank - own.dp_rank % self.shards
        return tuple(self.at(own.stage_group, first + part) for part in range(self.shards))

    def data(self, slot: int) -> tuple[int, ...]:
        """Returns the held slots of the slot's stage group with the same place among the ranks that compute one batch
        together, ascending."""
        place = self.slots[slot].dp_rank % self.tensor
        return tuple(n for n in self.group(slot) if self.slots[n].dp_rank % self.tensor == place)

    def peers(self, slot: int) -> tuple[int, ...]:
        """Returns the other held slots with the same state, ascending."""
        shard = self.slots[slot].shard
        return tuple(peer for peer in self.group(slot) if peer != slot and self.slots[peer].shard == shard)

    def process_groups(self, slot: int) -> dict[str, tuple[int, ...]]:
        """Returns name -> the held slots, ascending, of each process group that a slot is in.

        ``world``: all. ``pipeline``: those with its place in their stage groups. ``tensor`` (only with tensor
        parallelism): those with the same batch. ``data``: those of its stage group with the same place in ``tensor``.
        ``replicate`` and ``shard`` (only with shards): the two dimensions of the data group.
        """
        own, parts, tensor = self.slots[slot], self.shards, self.tensor
        group = self.group(slot)
        data = self.data(slot)
        groups = {
            "world": self.occupied,
            "pipeline": tuple(n for n in self.occupied if self.slots[n].dp_rank == own.dp_rank),
            "data": data,
        }
        if parts > tensor:
            replica = own.dp_rank // parts
            groups["replicate"] = tuple(n for n in data if self.slots[n].shard == own.shard)
            groups["shard"] = tuple(n for n in data if self.slots[n].dp_rank // parts == replica)
        if tensor > 1:
            batch = own.dp_rank // tensor
            groups["tensor"] = tuple(n for n in group if self.slots[n].dp_rank // tensor == batch)
        return groups

    # --- stages and owners ---

    def holders(self, stage: int) -> tuple[int, ...]:
        """Returns the held slots that run the stage, ascending."""
        return self._groups[self._group_of_stage[stage]]

    def slot_at(self, stage: int, origin: int) -> int:
        """Returns the slot, held or vacant, that computes the stage for this origin in a full world."""
        return self._places[self._group_of_stage[stage], origin]

    def owner(self, stage: int, origin: int, microbatch: int) -> int | None:
        """Returns the slot that computes this microbatch of the origin's batch. None: no slot does."""
        own = self.slot_at(stage, origin)
        if own in self.members:
            return own
        adopted = self.adopted.get((stage, origin))
        if adopted is None:
            return None
        return adopted[microbatch % len(adopted)]

    def origins(self, stage: int) -> tuple[int, ...]:
        """Returns the origins whose batches are computed at the stage, ascending."""
        return tuple(
            origin
            for origin in range(self.dp_size)
            if self.slot_at(stage, origin) in self.members or (stage, origin) in self.adopted
        )

    def contributions(self, stage_group: int) -> int:
        """Returns the divisor for a mean over the origins of a stage group's gradients."""
        return len(self.origins(self.group_stages[stage_group][0])) // self.tensor

    def lost_stages(self) -> tuple[int, ...]:
        """Returns the stages without a member; their state cannot be rebuilt."""
        return tuple(stage for stage in range(self.num_stages) if not self.holders(stage))


def _problem(num_stages: int, stages: Mapping[int, tuple[int, ...]]) -> str:
    """Returns why these stages form no valid pipeline; empty if they do. `stages`: the stages of each slot, by
    number."""
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
