"""How tests find the part of a page that they read."""

import pytest
from page_parts import between, code_block, rows, section

PAGE = """# Page
| **all** | 1 |
## One
a
### Within
| **all** | 2 |
## Two words
```sh
# no heading
```
| **all** | 3 |
"""


def test_a_section_ends_at_the_next_heading_of_its_level_or_above():
    assert section(PAGE, "One") == "a\n### Within\n| **all** | 2 |"
    assert rows(section(PAGE, "Within"), "| **all**") == [["**all**", "2"]]
    assert code_block(section(PAGE, "Two words"), "sh") == "# no heading\n"


def test_a_part_that_is_not_there_once_is_an_error():
    for ask in (
        lambda: section(PAGE, "Three"),
        lambda: section(PAGE + "## One\n", "One"),
        lambda: between(PAGE, "| **all**", "## One"),
        lambda: code_block(PAGE, "yaml"),
    ):
        with pytest.raises((ValueError, AssertionError)):
            ask()
