"""Columns that a configuration names, where one of its question files is on the Hugging Face hub: a column
counts in the file that has it, as with two files that are here."""

from pathlib import Path

import pytest

from services.common import hub
from services.common.errors import UserError
from trainer.config.data_settings import DataSettings
from trainer.data.named_columns import keys_of, questions_in

OWN = "Frage,Antwort,Satz\nWho kept A?,Anna,own\n"
USUAL = "question,answers\nWho kept C?,Carla\n"
KEYS = {"question_key": "Frage", "answer_key": "Antwort", "source_key": "Satz"}


@pytest.fixture
def on_the_hub(tmp_path, monkeypatch):
    """Puts a file on the hub, and one beside it here; gives what was fetched."""
    monkeypatch.chdir(tmp_path)
    fetched = []

    def fetch(name, what, say=print):
        fetched.append(name.file)
        return tmp_path / "cache" / name.file

    monkeypatch.setattr(hub, "fetched", fetch)

    def put(hubs, here):
        Path("cache").mkdir()
        Path("cache/far.csv").write_text(hubs)
        Path("near.csv").write_text(here)
        return fetched

    return put


@pytest.mark.parametrize("far", ["train", "eval"])
@pytest.mark.parametrize(("hubs", "here"), [(OWN, USUAL), (USUAL, OWN)])
def test_a_column_counts_in_the_file_that_has_it(on_the_hub, far, hubs, here):
    on_the_hub(hubs, here)
    names = {"train": "near.csv", "eval": "near.csv"} | {far: "hf:org/qa/far.csv"}
    data = DataSettings(**names, **KEYS, keep_columns=["Satz"])
    rows = {name: questions_in(data, name).rows[0] for name in names.values()}
    own = rows["hf:org/qa/far.csv" if hubs is OWN else "near.csv"]
    assert (own.text, own.golden_answers, own.data_source) == ("Who kept A?", ("Anna",), "own")
    assert {row.text for row in rows.values()} == {"Who kept A?", "Who kept C?"}


def test_a_column_that_neither_file_has_is_a_mistake(on_the_hub):
    on_the_hub(OWN, USUAL)
    data = DataSettings(train="hf:org/qa/far.csv", eval="near.csv", source_key="Sats")
    for file in (data.train, "near.csv"):
        with pytest.raises(UserError, match="has no column 'Sats'"):
            questions_in(data, file)


def test_nothing_is_fetched_for_a_file_that_has_all_columns_nor_by_a_look(on_the_hub):
    fetched = on_the_hub(USUAL, OWN)
    data = DataSettings(train="near.csv", eval="hf:org/qa/far.csv", **KEYS)
    assert questions_in(data, "near.csv").rows[0].text == "Who kept A?"
    lacking = DataSettings(train="near.csv", eval="hf:org/qa/far.csv", id_key="Nr")
    assert keys_of(lacking, "near.csv").given == {}, "the file on the hub may have it"
    assert not fetched
