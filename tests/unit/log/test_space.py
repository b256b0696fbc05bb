"""Accounts and alarms: when they begin, when they end, and that they do not flap."""

from swift_ft.log.protocol import Reason
from swift_ft_services.logserver.quotas import Alarm, DiskState, Notice, Space, SpaceConfig

MB = 1 << 20


def space(**config: float) -> Space:
    return Space(SpaceConfig(**config))  # type: ignore[arg-type]


def names(news: list[Notice]) -> list[tuple[str, str, str]]:
    return [
        (notice.event, str(notice.fields.get("job", "")), str(notice.fields.get("alarm", "")))
        for notice in news
    ]


def hold(counted: Space, job: str, used: int) -> None:
    counted.added(job, used - counted.job(job).used_bytes)


def test_an_alarm_begins_at_the_high_mark_and_ends_below_the_low_one() -> None:
    counted = space(job_quota_bytes=100)
    hold(counted, "a", 79)
    assert counted.observe(None, 0.0) == []
    hold(counted, "a", 80)
    assert names(counted.observe(None, 0.0)) == [("space_alarm", "a", "HIGH")]
    for used in (79, 60, 85, 60):  # between the lines nothing is said again
        hold(counted, "a", used)
        assert counted.observe(None, 0.0) == []
        assert counted.job("a").alarm is Alarm.HIGH
    hold(counted, "a", 59)
    assert names(counted.observe(None, 0.0)) == [("space_alarm", "a", "NONE")]
    hold(counted, "a", 79)
    assert counted.observe(None, 0.0) == []


def test_a_checkpoint_is_wanted_above_the_high_mark_only() -> None:
    counted = space(job_quota_bytes=100)
    hold(counted, "a", 80)
    counted.observe(None, 0.0)
    assert "job a keeps 80 bytes of the 100" in counted.wants_checkpoint("a")
    assert counted.wants_checkpoint("b") == ""
    hold(counted, "a", 70)  # the alarm goes on; one more checkpoint would free nothing that this one did not
    counted.observe(None, 0.0)
    assert counted.job("a").alarm is Alarm.HIGH
    assert counted.wants_checkpoint("a") == ""


def test_a_full_quota_refuses_that_job_until_a_tenth_is_free() -> None:
    counted = space(job_quota_bytes=100)
    hold(counted, "a", 95)
    assert counted.refuses("a", 5) is None
    refusal = counted.refuses("a", 6)
    assert refusal is not None
    assert refusal.reason is Reason.OVER_QUOTA
    assert "job a keeps 95 bytes" in refusal.message
    assert names(counted.observe(None, 0.0)) == [("space_alarm", "a", "FULL")]
    assert counted.refuses("b", 50) is None
    assert counted.takes_appends
    for used, taken in ((91, False), (90, True)):
        hold(counted, "a", used)
        counted.observe(None, 0.0)
        assert (counted.refuses("a", 1) is None) is taken
    assert counted.job("a").alarm is Alarm.HIGH


def test_the_quota_of_the_server_is_for_all_jobs() -> None:
    counted = space(quota_bytes=100)
    hold(counted, "a", 50)
    hold(counted, "b", 45)
    refusal = counted.refuses("c", 6)
    assert refusal is not None
    assert refusal.reason is Reason.OVER_QUOTA
    assert not counted.takes_appends
    counted.observe(None, 0.0)
    assert counted.wants_checkpoint("a")
    assert counted.wants_checkpoint("b")
    assert not counted.wants_checkpoint("c"), "it keeps nothing that a trim could drop"


def test_the_disk_is_a_limit_where_there_is_no_quota() -> None:
    counted = space()
    hold(counted, "a", 80 * MB)
    assert counted.observe(21 * MB, 0.0) == []
    assert names(counted.observe(20 * MB, 0.0)) == [("space_alarm", "", "HIGH")]
    assert counted.server.limit_bytes == 100 * MB
    assert counted.refuses("a", 30 * MB) is None, "only the disk itself says that it is full"
    assert names(counted.observe(60 * MB, 0.0)) == [("space_alarm", "", "NONE")]


def test_the_smaller_of_quota_and_disk_counts() -> None:
    counted = space(quota_bytes=50 * MB)
    hold(counted, "a", 10 * MB)
    counted.observe(100 * MB, 0.0)
    assert counted.server.limit_bytes == 50 * MB
    counted.observe(2 * MB, 0.0)
    assert counted.server.limit_bytes == 12 * MB


def test_a_full_disk_is_left_by_itself_when_there_is_space() -> None:
    counted = space()
    hold(counted, "a", 90 * MB)
    assert names(counted.disk_is_full("no space left", 10.0)) == [("disk_full", "", "")]
    refusal = counted.refuses("a", 0)
    assert refusal is not None
    assert refusal.reason is Reason.FULL
    assert "disk is full" in counted.wants_checkpoint("a")
    counted.observe(50 * MB, 10.5)  # not at once
    assert counted.disk is DiskState.FULL
    counted.observe(9 * MB, 12.0)  # not before a tenth is free
    assert counted.disk is DiskState.FULL
    counted.observe(11 * MB, 12.0)
    assert counted.disk is DiskState.TRYING
    assert counted.refuses("a", 1) is None
    assert not counted.takes_appends, "not healthy before it has proved to be"
    assert counted.observe(11 * MB, 13.9) == []
    assert ("disk_has_space", "", "") in names(counted.observe(11 * MB, 14.0))
    assert counted.takes_appends


def test_a_write_that_goes_well_ends_the_trial() -> None:
    counted = space()
    counted.disk_is_full("no space left", 0.0)
    counted.observe(None, 1.0)
    assert names(counted.disk_took()) == [("disk_has_space", "", "")]
    assert counted.disk_took() == []


def test_a_disk_that_is_still_full_is_tried_more_seldom_and_told_once() -> None:
    """A file system's own quota shows free space where there is none."""
    counted = space()
    now, waits = 0.0, []
    news = counted.disk_is_full("quota exceeded", now)
    for _ in range(6):
        began = now
        while counted.disk is DiskState.FULL:
            now += 0.5
            news += counted.observe(1 << 40, now)
        waits.append(now - began)
        news += counted.disk_is_full("quota exceeded", now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0]
    assert names(news) == [("disk_full", "", "")]


def test_files_that_are_removed_end_the_pause() -> None:
    counted = space()
    counted.disk_is_full("no space left", 0.0)
    counted.files_removed(0.1)
    counted.observe(100 * MB, 0.1)
    assert counted.disk is DiskState.TRYING


def test_alarms_and_marks_are_of_each_account() -> None:
    counted = space(quota_bytes=1000, job_quota_bytes=100)
    hold(counted, "a", 85)
    hold(counted, "b", 7)
    counted.observe(5000, 0.0)
    assert counted.high_mark_bytes() == 800
    assert [counted.job(job).alarm for job in "ab"] == [Alarm.HIGH, Alarm.NONE]
    counted.disk_is_full("no space left", 1.0)
    assert counted.server_alarm is Alarm.FULL, "whatever the quota says"
    assert counted.job("b").alarm is Alarm.NONE


def test_the_limit_follows_the_disk_where_there_is_no_quota() -> None:
    counted = space()
    hold(counted, "a", 100)
    assert counted.server.limit_bytes == 0
    counted.observe(900, 0.0)
    assert (counted.server.limit_bytes, counted.server.quota_bytes) == (1000, 0)
    assert counted.job("a").limit_bytes == 0
