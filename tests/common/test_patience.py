"""The limit of a start: progress counts by the processor time that it takes, the rest by the clock."""

from __future__ import annotations

import pytest

from services.common.processes.patience import Patience


def seconds_until_over(limit: float, share: float, look: float = 0.5) -> float:
    """By the clock, of a process that gets a share of a core all the time."""
    now = [0.0]
    patience = Patience(limit, lambda: share * now[0], lambda: now[0])
    while not patience.over():
        now[0] += look
    return now[0]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, 60.0),  # it hangs
        (0.005, 60.0),  # as a server's own loop does while it waits
        (0.1, 600.0),  # starved
        (0.05, 600.0),  # ten times the limit at most
        (0.5, 120.0),
        (1.0, 60.0),  # it works without end
        (4.0, 60.0),  # on several cores
    ],
)
def test_a_start_has_as_long_as_its_work_takes(share, expected):
    assert seconds_until_over(60.0, share) == expected


def test_a_short_limit_is_kept():
    assert seconds_until_over(2.0, 0.0, look=0.01) == pytest.approx(2.0, abs=0.05)


def test_what_has_ended_since_is_no_progress():
    now, used = [0.0], [50.0]
    patience = Patience(20.0, lambda: used[0], lambda: now[0])
    now[0], used[0] = 10.0, 0.0
    assert not patience.over()
    now[0] = 20.0
    assert patience.over()


def test_the_clock_is_told_where_it_says_more_than_the_limit():
    now = [0.0]
    patience = Patience(60.0, lambda: 0.0, lambda: now[0])
    now[0] = 61.0
    assert str(patience) == ""
    now[0] = 98.0
    assert str(patience) == ", 98 s by the clock"
