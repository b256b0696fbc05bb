"""Every text and every list of every request has a limit, and the gate holds requests to it."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from swift_ft._pb import coordinator_pb2
from swift_ft.log.protocol import Reason
from swift_ft_services import authorization
from swift_ft_services.authorization import Denied, Gate
from tests.descriptors import is_map, is_repeated, requests_of_methods

REQUESTS = requests_of_methods()
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
Path = tuple[FieldDescriptor, ...]


def paths(descriptor: Descriptor) -> Iterator[Path]:
    """To every text and every list."""
    for field in descriptor.fields:
        if is_repeated(field) or field.type in TEXTS:
            yield (field,)
        if field.message_type is not None and not is_map(field):
            for path in paths(field.message_type):
                yield (field, *path)


CASES = [
    pytest.param(name, path, id=".".join([name.rpartition(".")[2], *(field.name for field in path)]))
    for name, descriptor in REQUESTS.items()
    for path in paths(descriptor)
]


def test_there_is_a_limit_for_each_and_none_for_what_is_not_there() -> None:
    fields = [path[-1] for descriptor in REQUESTS.values() for path in paths(descriptor)]
    assert {field.name for field in fields if not is_repeated(field)} == set(authorization.LENGTHS)
    assert {field.name for field in fields if is_repeated(field)} == set(authorization.ENTRIES)
    for field in fields:
        if is_repeated(field) and (field.type in TEXTS or is_map(field)):
            assert authorization.ENTRIES[field.name][1] > 0, f"{field.full_name}: texts of any length"


def holding(message: Message, path: Path, count: int, length: int) -> None:
    """Sets what the path leads to: so many entries, texts of that length in all."""
    field, *rest = path
    if rest:
        inner = getattr(message, field.name)
        inner = inner.add() if is_repeated(field) else inner
        inner.SetInParent()
        holding(inner, tuple(rest), count, length)
    elif is_map(field):
        for number in range(count):
            getattr(message, field.name)[str(number)] = "x" * (length if number == 0 else 0)
    elif is_repeated(field):
        for number in range(count):
            if field.message_type is not None:
                getattr(message, field.name).add()
            else:
                getattr(message, field.name).append(
                    "x" * (length if number == 0 else 0) if field.type in TEXTS else 1
                )
    else:
        text = "x" * length
        setattr(message, field.name, text if field.type == FieldDescriptor.TYPE_STRING else text.encode())


@pytest.mark.parametrize(("name", "path"), CASES)
def test_what_is_longer_than_its_limit_is_refused_by_name(
    name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authorization, "LENGTHS", dict.fromkeys(authorization.LENGTHS, 50))
    monkeypatch.setattr(authorization, "ENTRIES", dict.fromkeys(authorization.ENTRIES, (5, 50)))
    field = path[-1]
    texts = not is_repeated(field) or field.type in TEXTS or is_map(field)
    for count, length, said in ((5, 45, ""), (6, 1, "has 6 entries"), (1, 51, " long: at most 50")):
        request = GetMessageClass(REQUESTS[name])()
        holding(request, path, count, length)
        wrong = authorization.problem(request)
        if (said.startswith("has") and not is_repeated(field)) or (said.startswith(" long") and not texts):
            said = ""
        assert (said in wrong) if said else wrong == ""
        if said:
            assert wrong.startswith(field.name)
            visit = Gate(None).admit("", ())
            with pytest.raises(Denied) as denied:
                visit.parse(request.SerializeToString(), type(request).FromString)
            assert (denied.value.reason, denied.value.message) == (Reason.OVERSIZE, wrong)


def test_entries_of_one_name_are_counted_over_the_whole_request() -> None:
    request = coordinator_pb2.MeasureRequest()
    most = authorization.ENTRIES["sent"][0]
    for _ in range(3):
        stage = request.measured.stages.add()
        for _ in range(most // 2):
            stage.sent.add()
    assert authorization.problem(request) == f"sent has {3 * (most // 2)} entries: at most {most} are taken"
