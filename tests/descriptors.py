"""Questions to protobuf's descriptors that old and new versions answer in different ways."""

from google.protobuf.descriptor import FieldDescriptor


def is_repeated(field: FieldDescriptor) -> bool:
    """Returns whether the field is a list or a map."""
    new = hasattr(field, "is_repeated")
    return field.is_repeated if new else field.label == FieldDescriptor.LABEL_REPEATED
