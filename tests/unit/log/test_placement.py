"""Where streams are placed: stable, balanced, and never two copies on one machine without need."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.log.placement import Sender, machines, place, same_machine

HOSTS = ("node0", "node1", "node2", "node3")
servers_of = st.dictionaries(st.integers(0, 9), st.sampled_from(HOSTS), min_size=1, max_size=8)
hosts_of_ranks = st.lists(st.sampled_from([*HOSTS, "elsewhere"]), min_size=1, max_size=16)


def senders(hosts: list[str], held: dict[int, tuple[int, ...]] | None = None) -> list[Sender]:
    return [Sender(rank=rank, host=host, held=(held or {}).get(rank, ())) for rank, host in enumerate(hosts)]


def test_with_one_server_left_there_is_one_copy_and_without_any_none() -> None:
    assert place(senders(["node0"]), {3: "node1"}, 2) == {0: (3,)}
    assert place(senders(["node0"], {0: (3,)}), {}, 2) == {0: ()}


@given(hosts=hosts_of_ranks, servers=servers_of, copies=st.integers(1, 3))
def test_copies_are_distinct_and_as_many_as_there_can_be(
    hosts: list[str], servers: dict[int, str], copies: int
) -> None:
    for held in place(senders(hosts), servers, copies).values():
        assert len(set(held)) == len(held) == min(copies, len(servers))
        used = machines([servers[server] for server in held])
        assert used == min(copies, machines(list(servers.values())))


@given(hosts=hosts_of_ranks, servers=servers_of, copies=st.integers(1, 2))
def test_a_server_on_the_senders_machine_is_first(
    hosts: list[str], servers: dict[int, str], copies: int
) -> None:
    for rank, held in place(senders(hosts), servers, copies).items():
        if hosts[rank] in servers.values():
            assert servers[held[0]] == hosts[rank]


@given(ranks=st.integers(1, 24), machines_there=st.integers(1, 6), copies=st.integers(1, 2), seed=st.text())
def test_it_is_balanced(ranks: int, machines_there: int, copies: int, seed: str) -> None:
    """One server to a machine, senders elsewhere: nobody keeps more than its share."""
    servers = {server: f"m{server}" for server in range(machines_there)}
    placed = place(senders(["elsewhere"] * ranks), servers, copies, seed)
    copies_there = min(copies, machines_there)
    load = [sum(server in held for held in placed.values()) for server in servers]
    assert max(load) <= math.ceil(ranks * copies_there / machines_there) + copies_there - 1
    first = [sum(held[0] == server for held in placed.values()) for server in servers]
    assert max(first) <= math.ceil(ranks / machines_there)


@given(data=st.data(), hosts=hosts_of_ranks, servers=servers_of, copies=st.integers(1, 2))
def test_losing_a_server_moves_only_what_was_there(
    data: st.DataObject, hosts: list[str], servers: dict[int, str], copies: int
) -> None:
    before = place(senders(hosts), servers, copies)
    lost = data.draw(st.sampled_from(sorted(servers)))
    living = {server: host for server, host in servers.items() if server != lost}
    after = place(senders(hosts, before), living, copies)
    for rank, held in before.items():
        kept = tuple(server for server in held if server != lost)
        assert after[rank][: len(kept)] == kept
        if lost not in held and len(held) == copies:
            assert after[rank] == held
        assert lost not in after[rank]


@given(hosts=hosts_of_ranks, servers=servers_of, copies=st.integers(1, 2), new=st.sampled_from(HOSTS))
def test_a_new_server_takes_only_what_is_missing(
    hosts: list[str], servers: dict[int, str], copies: int, new: str
) -> None:
    before = place(senders(hosts), servers, copies)
    after = place(senders(hosts, before), {**servers, 10: new}, copies)
    for rank, held in before.items():
        assert after[rank][: len(held)] == held
        assert set(after[rank]) <= {*held, 10}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("node1", "node1", True),
        ("node1", "node1.cluster.local", True),
        ("Node1.cluster", "node1", True),
        ("node1", "node10", False),
        ("node1.a", "node1.b", False),
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0", "10.0.0.7", False),
        ("", "", False),
        ("fe80", "fe80::1", False),
    ],
)
def test_names_of_machines(one: str, other: str, same: bool) -> None:
    assert same_machine(one, other) is same_machine(other, one) is same
