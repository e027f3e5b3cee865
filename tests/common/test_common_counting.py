"""Numbers in the lines that users read."""

import pytest

from services.common.counting import counted, size_of


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (0, ("step",), "0 steps"),
        (1, ("step",), "1 step"),
        (2000, ("step",), "2,000 steps"),
        (1, ("search", "searches"), "1 search"),
        (2, ("passage is empty", "passages are empty"), "2 passages are empty"),
    ],
)
def test_a_number_goes_with_its_word(number, words, said):
    assert counted(number, *words) == said


def test_a_size_is_said_in_a_unit_that_shows_it():
    sizes = (0, 1 << 20, 99 << 20, 1 << 27, 1 << 30, 5 << 29)
    assert [*map(size_of, sizes)] == ["0 MiB", "1 MiB", "99 MiB", "0.1 GiB", "1.0 GiB", "2.5 GiB"]
