"""`data passages` of rows whose columns have names of their own, as `data validate` says of long texts."""

import json

import pytest

from trainer.commands.cli import main

KEYS = ["--text-key", "Story", "--title-key", "Headline", "--id-key", "No"]


@pytest.fixture
def made(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            main(["data", *words])
        out = tmp_path / "p.jsonl"
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return ended.value.code, rows, capsys.readouterr()

    return call


def test_a_corpus_with_long_texts_is_divided_by_the_options_that_validated_it(made, tmp_path):
    long = " ".join(f"Sentence {n} has five words." for n in range(300))
    (tmp_path / "c.csv").write_text(
        f"No,Headline,Story,Year\n7,Alpha,The bridge is long.,1900\n8,Beta,{long},1\n"
    )
    status, _, said = made("validate", "c.csv", *KEYS)
    assert status == 0 and "data passages` divides long texts" in said.out
    status, rows, _ = made("passages", "c.csv", "p.jsonl", *KEYS)
    assert status == 0 and rows[0] == {"id": "7", "contents": '"Alpha"\nThe bridge is long.', "Year": "1900"}
    assert len(rows) > 10 and {row["contents"].splitlines()[0] for row in rows[1:]} == {'"Beta"'}
    assert {row["id"].partition("#")[0] for row in rows[1:]} == {"8"}


def test_what_the_options_do_not_fit_is_told(made, tmp_path):
    (tmp_path / "c.csv").write_text("No,Headline,Story\n7,Alpha,The bridge is long.\n")
    (tmp_path / "a.md").write_text("# A\n\nbridge\n")
    status, rows, said = made("passages", "c.csv", "p.jsonl")
    assert (status, rows) == (2, []) and "got No, Headline, Story; --text-key names a column of" in said.err
    status, _, said = made("passages", "c.csv", "p.jsonl", "--text-key", "Stor")
    columns = "its columns are No, Headline, Story"
    line = f"unspiral: c.csv: has no column 'Stor', the text key; {columns}; did you mean Story?\n"
    assert (status, said.err) == (2, line)
    status, _, said = made("passages", "a.md", "p.jsonl", *KEYS)
    options = "--text-key, --title-key and --id-key"
    assert (status, said.err) == (2, f"unspiral: a.md: holds documents; {options} go with rows\n")
