"""What `scripts/soak` makes of what it has seen. Real soaks: `test_soak.py`."""

import math
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.log import admin
from swift_ft.log.record import RecordKey
from tests.soak import soak
from tests.soak.memory import Rule, Sample, judge, verdict
from tests.soak.ranks import FLUSH_STEPS, RECORD_BYTES, Bodies, same, sequence_of
from tests.soak.soak import Account, Kill, Soak, limit

MIB = 1 << 20
RULE = Rule()


def life(pid: int, begin_s: float, end_s: float, mib_at: Any) -> list[Sample]:
    """Samples every half second; `mib_at` of the age."""
    count = int((end_s - begin_s) * 2)
    return [Sample(begin_s + n / 2, pid, int(mib_at(n / 2) * MIB)) for n in range(count)]


def filling(age_s: float) -> float:
    """A process that fills its queues once."""
    return 300 + 100 * (1 - math.exp(-age_s / 5))


def test_restarts_bursts_and_first_fillings_are_flat() -> None:
    samples = [s for n in range(6) for s in life(n, 50 * n, 50 * n + 48, filling)]
    bursts = [
        Sample(s.at_s, s.pid, s.bytes + (200 * MIB if i % 20 == 0 else 0)) for i, s in enumerate(samples)
    ]
    for found in (samples, bursts):
        judged = judge("log server", found, RULE)
        assert judged.flat is True
        assert abs(judged.percent_per_minute) < 1
        assert judged.lives == 6


def test_a_leak_is_seen_through_restarts() -> None:
    """Four percent a minute, in processes none of which lives for two minutes."""
    samples = [
        s for n in range(6) for s in life(n, 100 * n, 100 * n + 98, lambda age: filling(age) + age * 16 / 60)
    ]
    judged = judge("log server", samples, RULE)
    assert judged.percent_per_minute == pytest.approx(16 / 410 * 100, rel=0.1)
    assert judged.flat is False
    half = judge("log server", samples, Rule(percent_per_minute_max=8))
    assert half.flat is True


def test_what_grows_from_life_to_life_is_seen() -> None:
    samples = [s for n in range(6) for s in life(n, 100 * n, 100 * n + 98, lambda age, n=n: 300 + 30 * n)]
    judged = judge("log server", samples, RULE)
    assert judged.percent_per_minute == 0
    assert judged.thirds_percent > RULE.thirds_percent_max
    assert judged.flat is False


def test_too_little_is_no_verdict() -> None:
    assert judge("x", life(1, 0, 80, filling), RULE).flat is None
    assert judge("x", [], RULE).flat is None
    flat, unseen = judge("x", life(1, 0, 100, filling), RULE), judge("y", [], RULE)
    grows = judge("z", life(1, 0, 100, lambda age: 100 + age), RULE)
    assert verdict([flat, flat]) is True
    assert verdict([flat, unseen]) is None
    assert verdict([flat, unseen, grows]) is False
    assert verdict([]) is None


def test_the_rule_says_its_numbers() -> None:
    words = Rule(warm_up_s=7, percent_per_minute_max=2.5, thirds_percent_max=11, observed_s_min=13).words()
    assert all(number in words for number in ("first 7 s", "2.5 %", "11 %", "13 s"))


def an_account(**changes: Any) -> Account:
    account = Account(seconds=200.0, compared_bytes=MIB, compared_records=5, acked_bytes=MIB)
    account.kills = [Kill(10.0, "server"), Kill(30.0, "writer")]
    account.memory["log server"] = life(1, 0, 200, filling)
    for name, value in changes.items():
        setattr(account, name, value)
    return account


CONFIG = soak.SoakConfig(seconds=200, kill_every_s=20)


def judged(account: Account, broken: str = "") -> tuple[str, str]:
    result = soak.judge(CONFIG, account, broken)
    said = soak.table({"machine": "a machine", **result})
    assert said.endswith(f"{result['verdict']}: {result['reason']}")
    assert RULE.words() in said
    return result["verdict"], result["reason"]


def test_verdicts() -> None:
    assert judged(an_account())[0] == "PASS"
    assert judged(an_account(), "s0.F step 3 is gone") == ("FAIL", "s0.F step 3 is gone")
    grows = an_account(memory={"log server": life(1, 0, 200, lambda age: 100 + age)})
    assert judged(grows)[0] == "FAIL"
    assert "log server" in judged(grows)[1]
    assert judged(an_account(memory={"log server": life(1, 0, 20, filling)}))[0] == "INCONCLUSIVE"
    assert judged(an_account(compared_bytes=0)) == ("INCONCLUSIVE", "nothing was compared")
    assert judged(an_account(kills=[Kill(1.0, "writer")]))[1].startswith("no server was killed")
    assert judged(an_account(kills=[]))[1].startswith("no server and no writer was killed")
    assert judged(an_account(kills=[Kill(1.0, "server and writer")]))[0] == "PASS"
    assert {soak.EXIT_CODES[word] for word in ("PASS", "FAIL", "INCONCLUSIVE")} == {0, 1, 3}


def test_every_record_has_bytes_of_its_own() -> None:
    bodies = Bodies(0, "s0.F")
    keys = [RecordKey(step, microbatch, 0) for step in range(50) for microbatch in range(len(RECORD_BYTES))]
    sizes = [bodies.of(key).nbytes for key in keys]
    assert sizes == [*RECORD_BYTES] * 50
    starts = {bytes(bodies.of(key)[:64]) for key in keys if RECORD_BYTES[key.microbatch]}
    assert len(starts) == 50 * (len(RECORD_BYTES) - 1)
    assert bytes(Bodies(1, "s0.F").of(keys[0])) != bytes(bodies.of(keys[0]))
    assert bytes(Bodies(0, "s1.F").of(keys[0])) != bytes(bodies.of(keys[0]))
    assert sorted(sequence_of(key.step, key.microbatch) for key in keys) == list(range(len(keys)))


def test_no_reader_is_sent_to_steps_that_writers_may_not_write() -> None:
    window = 12 * FLUSH_STEPS
    for trimmed in range(3 * FLUSH_STEPS):  # a trim stops at any step, in front of a reading
        written = 0
        while written + FLUSH_STEPS <= limit(trimmed, window):  # as a writer does
            written += FLUSH_STEPS
        assert written == limit(trimmed, window) > trimmed + window - FLUSH_STEPS


class Forwarding:
    """A reader as the soak sees it, and a log that goes on with a trim as soon as nobody is in its way."""

    def __init__(self, soak_run: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
        self.soak, self.trimmed, self.wanted, self.orders = soak_run, 0, 0, list[dict[str, int]]()
        self.name, self.killed = "reader s0.F", False
        monkeypatch.setattr(admin, "trim", self.trim)

    def trim(self, _address: str, _job: str, below_step: int, _timeout_s: float) -> int:
        self.wanted = max(self.wanted, below_step)
        return self.trimmed

    def tell(self, **order: int) -> None:
        self.orders.append(order)

    def answer(self) -> dict[str, object]:
        order = self.orders.pop(0)
        if order["from"] < self.trimmed:
            return {"overtaken": order["from"], "reason": "trimmed", "records": 0}
        return {"read": order["to"], "records": (order["to"] - order["from"]) * len(RECORD_BYTES)}


def test_a_trim_that_the_server_goes_on_with_by_itself_ends_no_soak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for while a reader was there, and carried out when nobody asked any more: all is compared again then."""
    config = soak.SoakConfig(seconds=1, kill_every_s=1, streams=1)
    run = Soak(config, tmp_path, Account())
    log: Any = Forwarding(run, monkeypatch)
    (stream,) = run._streams
    stream.reader, stream.acked, stream.compared = log, 4 * FLUSH_STEPS, 3 * FLUSH_STEPS
    run._checkpoints, run._stopping = [2 * FLUSH_STEPS, 4 * FLUSH_STEPS], True
    run._trim()
    assert (log.wanted, run._trimmed) == (2 * FLUSH_STEPS, 0)
    run._compare_again()
    log.trimmed = log.wanted
    for _ in range(10):
        run._trim()
        run._read_on(stream)
        if log.orders:
            run._take(log, log.answer())
    assert (stream.compared, run._trimmed) == (stream.acked, 2 * FLUSH_STEPS)


def test_one_bit_is_a_difference() -> None:
    body = Bodies(0, "s0.F").of(RecordKey(3, 1, 0))
    copied = bytearray(body)
    assert same(memoryview(copied), body)
    copied[-1] ^= 1
    assert not same(memoryview(copied), body)
    assert not same(memoryview(copied)[:-8], body)
    assert same(memoryview(b""), memoryview(b""))


@pytest.mark.parametrize(
    "words",
    [
        ["--minutes", "0"],
        ["--kill-every", "-1"],
        ["--writers", "0"],
        ["--disk-mib", "100"],
        ["--json", "/no/x"],
    ],
)
def test_bad_arguments_are_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        soak.main([*words, "--directory", str(tmp_path)])
