"""A message for programs: numbers are numbers, and every field is there.

protobuf's own JSON leaves out what is zero and writes 64-bit integers as strings.
"""

import math
from typing import Any

from google.protobuf.message import Message


def as_json(message: Message) -> dict[str, Any]:
    """By field names as in the .proto; enums by name (by number those that only a newer service knows), keys of maps as
    strings; None: an optional field is not set, or a number is none."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    of = field.message_type
    if of is not None and of.GetOptions().map_entry:
        to = of.fields_by_name["value"]
        return {str(key): _value(value[key], to) for key in sorted(value)}
    if field.is_repeated:
        return [_value(item, field) for item in value]
    return _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value if not isinstance(value, float) or math.isfinite(value) else None
