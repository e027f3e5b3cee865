"""`python -m retriever_service --help` and the help of its commands: as that of the main command."""

import pytest

from retriever_service.__main__ import main


@pytest.mark.parametrize("words", [(), ("serve",), ("index",), ("index", "build"), ("index", "search")])
def test_a_flag_stands_without_a_type(monkeypatch, capsys, words):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["retriever_service", *words, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "--help" in out and "bool" not in out
    assert ("-o" in out.split()) == (words == ("index", "build"))
