"""Questions to protobuf's descriptors, some of which old and new versions answer in different ways."""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from swift_ft._pb import coordinator_pb2, log_pb2
from swift_ft.tokens import COORDINATOR, LOG


def is_repeated(field: FieldDescriptor) -> bool:
    """Returns whether the field is a list or a map."""
    new = hasattr(field, "is_repeated")
    return field.is_repeated if new else field.label == FieldDescriptor.LABEL_REPEATED


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def requests_of_methods() -> dict[str, Descriptor]:
    """Method of both services -> what its request is."""
    services = ((LOG, log_pb2, "Log"), (COORDINATOR, coordinator_pb2, "Coordinator"))
    return {
        prefix + method.name: method.input_type
        for prefix, module, service in services
        for method in module.DESCRIPTOR.services_by_name[service].methods
    }
