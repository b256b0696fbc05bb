"""Rows as the store keeps them."""

from collections.abc import Mapping
from dataclasses import fields

from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import TABLE_FIELDS, Changes, JobRow, Table, decode


def read(parts: Mapping[str, str]) -> JobRow:
    """The row of whatever job these parts are of."""
    return decode(next(iter(parts)).split("/")[1], parts)


def encode(row: JobRow) -> dict[str, str]:
    """All parts of the row."""
    copy = JobRow(**{field.name: getattr(row, field.name) for field in fields(row) if field.init})
    for name in TABLE_FIELDS:  # a copy: the row's own change sets must stay for its own `Changes`
        setattr(copy, name, Table(getattr(row, name)))
    changes = Changes(copy)
    changes.detect()
    return changes.drain()[0]


def copy_of(row: JobRow) -> JobRow:
    """As a coordinator that begins anew reads it."""
    return read(encode(row))


def write_changes(job: Job, stored: dict[str, str]) -> None:
    """As the driver: what has changed, and with it all of the row is there."""
    puts, deletes = job.changes.drain()
    stored.update(puts)
    for key in deletes:
        stored.pop(key, None)
    whole = encode(job.row)
    assert stored == whole, {key for key in {*stored, *whole} if stored.get(key) != whole.get(key)}
