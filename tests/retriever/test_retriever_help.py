"""`python -m retriever_service --help` and the help of its commands: as that of the main command."""

import pytest
import typer

from retriever_service.__main__ import app, main
from retriever_service.cli import index_app


@pytest.mark.parametrize("words", [(), ("serve",), ("index",), ("index", "build"), ("index", "search")])
def test_a_flag_stands_without_a_type(monkeypatch, capsys, words):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["retriever_service", *words, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "--help" in out and "bool" not in out
    assert ("-o" in out.split()) == (words == ("index", "build"))


def test_every_command_names_the_encoder_alike():
    """Who has built an index by `--model` and `--family` serves it by them; upstream's names work too."""
    commands = {**typer.main.get_command(app).commands, **typer.main.get_command(index_app).commands}
    spelt = {
        name: {
            frozenset(one.opts) for one in command.params if "--model" in one.opts or "--family" in one.opts
        }
        for name, command in commands.items()
    }
    both = {
        frozenset({"--model", "--retriever-model", "--retriever_model"}),
        frozenset({"--family", "--retriever-name", "--retriever_name"}),
    }
    assert {name for name, found in spelt.items() if found} == {"build", "convert", "search", "serve"}
    assert all(found in (set(), both) for found in spelt.values())
