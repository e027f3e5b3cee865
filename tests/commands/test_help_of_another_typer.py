"""A version of Typer that calls its parts otherwise changes the look of a help page, and ends no command."""

import pytest
import typer.core
from command_line import run  # noqa: F401


@pytest.mark.parametrize("name", ["_get_number_range_help_str", "display_type_rich"])
def test_a_help_page_without_typers_own_names_is_typers(run, monkeypatch, name):
    from services.common.printing import help_pages

    seen = []
    monkeypatch.setattr(help_pages, "_is_known", lambda parameter: seen.append(hasattr(parameter, name)))
    status, out, err = run("index", "build", "--help")
    assert (status, err) == (0, "") and all(seen) and seen
    assert "--skip-bad" in out and "--text-key" in out


def test_what_is_looked_for_is_what_is_used():
    from services.common.printing.help_pages import _is_known, as_shown

    class Bare:
        param_type_name = "option"
        opts = ("--flag",)

    assert not _is_known(Bare())
    with pytest.raises(AttributeError):
        as_shown(Bare())
    assert all(
        hasattr(typer.core.TyperOption, name) for name in ("_get_number_range_help_str", "display_type_rich")
    )
