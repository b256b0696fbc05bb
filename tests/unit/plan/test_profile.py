"""The profile: everything that is wrong with one is one line that names the field."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.lab.plan.profile import Cap, Profile, parse
from tests.unit.plan.profiles import profile, profiles


def document(**changes: Any) -> dict[str, Any]:
    """A profile as a person writes it; a change to None leaves the field out."""
    fields: dict[str, Any] = {
        "profile": 1,
        "name": "job",
        "stages": 4,
        "microbatches": 8,
        "forward_s": 0.25,
        "backward_s": [0.5, 0.5, 0.5, 1],
        "forward_bytes": 1000,
        "backward_bytes": [1000, 1000, 2000],
        "machines": {"count": 2, "ranks_per_machine": 2},
        "log": {"write_bytes_per_s": 1e9, "read_bytes_per_s": 2e9},
        "checkpoint": {"interval_steps": 100, "bytes": 5000, "bytes_per_s": 1e9},
        "failures": {"machine_mtbf_s": 1e6},
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def test_one_number_stands_for_every_entry() -> None:
    found = parse(json.dumps(document()))
    assert found.forward_s == (0.25,) * 4
    assert found.backward_s == (0.5, 0.5, 0.5, 1)
    assert found.forward_bytes == (1000, 1000, 1000)
    assert found.backward_bytes == (1000, 1000, 2000)
    assert found.machine_of_stage == (0, 0, 1, 1)
    assert found.machine_mtbf_s == (1e6, 1e6)
    assert (found.step_s, found.copies_max, found.cap, found.fixed_s) == (None, 1, None, 0.0)


def test_machines_may_have_different_numbers_of_stages() -> None:
    found = parse(json.dumps(document(machines={"of_stage": [0, 1, 1, 1]})))
    assert found.machine_of_stage == (0, 1, 1, 1)
    assert found.machines == 2


def test_a_cap_and_parallel_replay_are_read() -> None:
    text = json.dumps(
        document(
            cap={"recovery_s": 30},
            parallel={"copies_max": 3, "gradient_bytes": [1, 2, 3, 4]},
            network_bytes_per_s=1e9,
        )
    )
    found = parse(text)
    assert found.cap == Cap(kind="recovery_s", value=30)
    assert (found.copies_max, found.gradient_bytes) == (3, (1, 2, 3, 4))


@settings(max_examples=50, deadline=None)
@given(profiles())
def test_what_a_program_writes_is_read_again(drawn: Profile) -> None:
    assert parse(json.dumps(drawn.document())) == drawn


def test_a_cap_survives_being_written() -> None:
    capped = profile(cap=Cap(kind="storage_bytes", value=10**12), step_s=40.0, checkpoint_stall_s=0.0)
    assert parse(json.dumps(capped.document())) == capped


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("profile: must be 1", {"profile": None}),
    ("profile: must be 1", {"profile": 2}),
    ("name: is missing", {"name": None}),
    ("name: must be one line", {"name": "two\nlines"}),
    ("name: must be one line", {"name": 5}),
    ("stages: must be a whole number", {"stages": 4.0}),
    ("microbatches: must be from 1", {"microbatches": 0}),
    ("forward_s: must be a number or a list", {"forward_s": "fast"}),
    ("forward_s[2]: must be a number", {"forward_s": [1, 1, "1", 1]}),
    ("forward_s[1]: must be from 0", {"forward_s": [1, -1, 1, 1]}),
    ("forward_s: must have an entry for every stage: 4 stages, not 3", {"forward_s": [1, 1, 1]}),
    ("stage 1 computes nothing", {"forward_s": 0, "backward_s": [1, 0, 1, 1]}),
    ("forward_bytes: must have an entry for every boundary: 3 boundaries", {"forward_bytes": [1] * 4}),
    ("backward_bytes[2]: must be from 0", {"backward_bytes": [1, 1, -1]}),
    ("nothing crosses boundary 1", {"forward_bytes": [1, 0, 1], "backward_bytes": 0}),
    ("other_bytes: is missing", {"other_bytes": "null"}),
    ("step_s: must be from", {"step_s": 0}),
    ("machines: 3 machines of 2 ranks are not 4", {"machines": {"count": 3, "ranks_per_machine": 2}}),
    ("machines.count: is missing", {"machines": {"ranks_per_machine": 2}}),
    ("machines.ranks: there is no such field", {"machines": {"of_stage": [0, 0, 1, 1], "ranks": 2}}),
    ("machines.of_stage: must be a list", {"machines": {"of_stage": 2}}),
    ("stage 2 is on machine 0 after machine 1", {"machines": {"of_stage": [0, 1, 0, 1]}}),
    ("stage 1 is on machine 2 after machine 0", {"machines": {"of_stage": [0, 2, 2, 2]}}),
    ("machines.of_stage[1]: must be a whole number", {"machines": {"of_stage": [0, "1", 1, 1]}}),
    ("machines: must be an object", {"machines": [0, 0, 1, 1]}),
    ("log.write_bytes_per_s: is missing", {"log": None}),
    ("log.speed: there is no such field", {"log": {**document()["log"], "speed": 1}}),
    (
        "failures.machine_mtbf_s: must have an entry for every machine",
        {"failures": {"machine_mtbf_s": [1e6]}},
    ),
    ("failures.machine_mtbf_s[0]: must be from", {"failures": {"machine_mtbf_s": 0}}),
    ("parallel.copies_max: must be from 1", {"parallel": {"copies_max": 0, "gradient_bytes": 1}}),
    ("network_bytes_per_s: is missing", {"parallel": {"copies_max": 2, "gradient_bytes": 1}}),
    ("cap: give one of", {"cap": {}}),
    ("cap: give one of", {"cap": {"storage_bytes": 1, "recovery_s": 1}}),
    ("cap: there is no", {"cap": {"time": 1}}),
    ("cap.storage_bytes: must be a whole number", {"cap": {"storage_bytes": 1.5}}),
    ("cap.worst_recovery_s: must be from", {"cap": {"worst_recovery_s": -1}}),
]


@pytest.mark.parametrize(("words", "changes"), WRONG, ids=[f"{n}-{w}" for n, (w, _) in enumerate(WRONG)])
def test_a_fault_is_named_in_one_line(words: str, changes: dict[str, Any]) -> None:
    text = json.dumps(document(**changes)).replace('"null"', "null")
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("not JSON: line 1, column 1", b""),
        ("not JSON: line 2, column 1", b'{"profile": 1,\n'),
        ("not UTF-8 at byte 1", b"\x22\xff\x22"),
        ("must be an object, not a list of 0", b"[]"),
        ("must be an object, not null", b"null"),
        ("NaN is no number", b'{"forward_s": NaN}'),
        ("-Infinity is no number", b'{"forward_s": -Infinity}'),
        ("name: comes twice", b'{"name": "a", "name": "b"}'),
        ("nested too deeply", b"[" * 100_000),
        ("too many digits", b'{"stages": ' + b"9" * 5000 + b"}"),
    ],
)
def test_what_is_no_profile_at_all_is_said_in_one_line(words: str, text: bytes) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse(text)
    assert str(caught.value).isprintable()


def test_an_infinite_number_that_json_allows_is_refused() -> None:
    with pytest.raises(UsageError, match="1e999 is too large a number"):
        parse(json.dumps(document()).replace("0.25", "1e999"))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_field_there_is_a_profile_or_one_line(data: st.DataObject) -> None:
    fields = document(cap={"recovery_s": 1}, parallel={"copies_max": 1, "gradient_bytes": 1})
    name = data.draw(st.sampled_from(sorted(fields)))
    inner = fields[name]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        fields[name] = {**inner, data.draw(st.sampled_from([*inner, "extra"])): data.draw(JUNK)}
    else:
        fields[name] = data.draw(JUNK)
    message = ""
    try:
        parse(json.dumps(fields))
    except UsageError as error:
        message = str(error)
    assert message == "" or message.isprintable()
