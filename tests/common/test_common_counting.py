"""Numbers in the lines that users read."""

import pytest

from services.common.counting import counted


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
