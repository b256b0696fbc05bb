"""Numbers on the services' command lines with which nothing could work."""

import argparse

import pytest

from swift_ft.errors import UsageError
from swift_ft.tools.doctor import parse as parse_doctor
from swift_ft.tools.inspect import parse as parse_inspect
from swift_ft_services import program
from swift_ft_services.coordinator.__main__ import checked_timing
from swift_ft_services.coordinator.__main__ import parse as parse_coordinator
from swift_ft_services.logserver.__main__ import parse as parse_logserver

HUGE = str(10**30)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--listen", "nonsense", "is not HOST:PORT"),
        ("--listen", "127.0.0.1:99999", "is not HOST:PORT"),
        ("--quota-bytes", "10", "has no room for anything: give at least 65536"),
        ("--quota-bytes", "-1", "has no room for anything"),
        ("--high-water", "0.5", "--low-water 0.6 must be below --high-water 0.5"),
        ("--job-quota-bytes", "65535", "has no room for anything: give at least 65536"),
        ("--segment-bytes", HUGE, "between 4096 and"),
        ("--segment-bytes", "10", "between 4096 and"),
        ("--credit-bytes", HUGE, "between 1 and"),
        ("--credit-bytes", "0", "between 1 and"),
        ("--body-bytes-max", HUGE, "between 1 and"),
        ("--job-bytes-max", "1", "must have room for one writer"),
        ("--fsync-interval", "1e300", "at most 3600 s"),
        ("--fsync-interval", "0", "must be positive"),
        ("--fsync-interval", "nan", "invalid float value"),
        ("--keep-days", "1e-9", "would drop jobs that live: give at least 0.0007"),
        ("--keep-days", "-1", "would drop jobs that live"),
        ("--calls-per-token-s", "0.001", "must be 0, which is any number, or at least 1"),
        ("--calls-per-peer", "0", "at least 1"),
        *((f"--job{name}-max", "0", "at least 1") for name in ("s", "-streams", "-records")),
    ],
)
def test_a_log_server_refuses_them_in_one_line(flag: str, value: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_logserver(["--directory", "x", flag, value])
    assert flag in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--heartbeat-s", "1e300"], "choose 0.01 to 60 s"),
        (["--heartbeat-s", "0.001"], "choose 0.01 to 60 s"),
        (["--heartbeat-s", "0"], "heartbeat of 0 s: choose"),
        (["--lease-s", "1e12", "--step-bound-s", "1e13"], "choose at most 86400 s"),
        (["--heartbeat-s", "1", "--lease-s", "2.9"], "at least 3 heartbeats"),
        (["--lease-s", "10", "--step-bound-s", "19"], "at least 2 leases"),
        (["--log-lost-s", "1e300"], "choose 6 to"),
        (["--listen", "http://10.0.0.5:7300"], "is not HOST:PORT"),
        (["--calls-per-token-s", "1e-300"], "at least 1"),
    ],
)
def test_a_coordinator_too(flags: list[str], words: str) -> None:
    def check(options: argparse.Namespace) -> None:
        checked_timing(options)
        program.protection_of(options)

    options = parse_coordinator(["--directory", "x", *flags])
    with pytest.raises(UsageError, match=words) as caught:
        check(options)
    assert "\n" not in str(caught.value)


def test_and_who_asks_them() -> None:
    with pytest.raises(UsageError, match="at most 3600"):
        parse_inspect(["--server", "h:1", "--timeout-s", "1e300"])
    with pytest.raises(UsageError, match="at most 3600"):
        parse_doctor(["--timeout", "1e300"])
