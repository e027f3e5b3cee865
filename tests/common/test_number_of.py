"""Numbers of files and requests that others write."""

import math

import pytest

from services.common.validation import number_of
from services.control.ended import recorded


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (0, 0.0),
        (-0.5, -0.5),
        (True, None),
        (None, None),
        ("3", None),
        ([3], None),
        (math.nan, None),
        (-math.inf, None),
        (10**400, None),
    ],
)
def test_what_counts_as_a_number(value, number):
    assert number_of(value) == number


def test_the_status_of_an_ended_run_leaves_out_what_is_no_number(tmp_path):
    lines = [
        f'{{"step": 1, "reward/mean": 1{"0" * 400}, "time/sync": NaN}}',
        '{"step": 2, "reward/mean": 0.5}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    status = recorded(tmp_path)
    assert (status.step, status.rewards, status.last_sync_seconds) == (2, [None, 0.5], None)
