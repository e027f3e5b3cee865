"""Columns of sources and ids with names of their own: `data validate`, `data convert`, `init`, the suite and
a run's configuration."""

import json

import pytest
from command_line import run  # noqa: F401

from services.common.errors import UserError
from trainer.commands.checks.doctor_files import _questions_of
from trainer.config.aliases import meant_by
from trainer.config.data_settings import DataSettings
from trainer.config.schema import load_config
from trainer.data.columns import Keys
from trainer.data.cursor import PromptCursor
from trainer.data.named_columns import questions_in
from trainer.data.questions import load_questions
from trainer.suite.sets import read_suite

TABLE = "Nr;Frage;Antwort;Thema\na1;Wer?;Ada;Berge\na2;Wo?;Rom;\na3;Wann?;1955;Meer\n"
NAMED = ("--question-key", "Frage", "--answer-key", "Antwort", "--source-key", "Thema")
KEYS = Keys("Frage", "Antwort", "thema", "NR")


@pytest.fixture
def table(tmp_path):
    (tmp_path / "mine.csv").write_text(TABLE)
    return str(tmp_path / "mine.csv")


def named(path, keys=KEYS):
    return [(q.id, q.data_source) for q in load_questions(path, keys=keys).rows]


def test_questions_are_counted_and_named_by_their_own_columns(run, table):
    status, out, err = run("data", "validate", table, *NAMED, "--id-key", "Nr")
    assert (status, err) == (0, "")
    assert out.split() == ["Berge", "1", "Meer", "1", "mine", "1", "total", "3"]
    assert named(table) == [("a1", "Berge"), ("a2", "mine"), ("a3", "Meer")]


def test_a_file_in_the_usual_form_is_written_with_them(run, table, tmp_path):
    out = str(tmp_path / "out.jsonl")
    assert run("data", "convert", table, out, *NAMED, "--id-key", "Nr")[0] == 0
    assert named(out, Keys()) == named(table)


def test_they_count_before_columns_of_the_usual_names_and_may_be_numbers(tmp_path):
    row = {
        "id": "x",
        "data_source": "y",
        "question": "who?",
        "answer": "Ada",
        "year": 1955,
        "meta": {"no": 7.0},
    }
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert named(file, Keys(source="year", id="meta.no")) == [("7", "1955")]
    file.write_text(json.dumps(row | {"year": [1]}) + "\n")
    with pytest.raises(UserError, match="line 1: expected `year`: a text or a number, got a list"):
        named(file, Keys(source="year"))


def test_a_column_that_is_not_there_is_told(run, table, tmp_path):
    status, _, err = run("data", "validate", table, *NAMED[:-1], "Tema")
    told = "--source-key Tema: nothing is there; the columns are Nr, Frage, Antwort, Thema; did "
    told += "you mean Thema?\n"
    assert status == 2 and err.endswith(told)
    data = DataSettings(train=table, question_key="Frage", answer_key="Antwort", id_key="No")
    with pytest.raises(UserError, match=r"data\.id_key: .* has no column 'No'; its columns are Nr, Frage"):
        questions_in(data, table)


def test_an_id_key_is_of_the_kind_of_file_that_it_is_given_with(run, tmp_path):
    (tmp_path / "q.csv").write_text("Nr,question,answer,text\n5,who?,Ada,Ada did.\n5,when?,1955,In 1955.\n")
    (tmp_path / "c.csv").write_text("Nr,text\n5,Ada did.\n")
    _, out, _ = run("data", "validate", str(tmp_path / "q.csv"), "--id-key", "Nr")
    assert "the id '5' is that of" in out and "total         2" in out
    status, out, _ = run("data", "validate", str(tmp_path / "c.csv"), "--id-key", "Nr")
    assert status == 0 and out == f"{tmp_path / 'c.csv'}: a corpus of 1 passage\n"
    keys = ("--text-key", "text", "--source-key", "Nr")
    assert run("data", "validate", str(tmp_path / "q.csv"), *keys) == (
        2,
        "",
        "unspiral: data validate: --text-key and --title-key are of a corpus; --question-key, --answer-key "
        "and --source-key are of questions\n",
    )


def test_a_run_weighs_its_sources_by_them(table):
    data = DataSettings(
        train=table, question_key="Frage", answer_key="Antwort", source_key="Thema", id_key="Nr"
    )
    rows = questions_in(data, table).rows
    cursor = PromptCursor(rows, seed=0, shuffle=False, weights={"Berge": 2, "mine": 0, "Meer": 1})
    assert sorted(q.id for q in cursor.take(3)) == ["a1", "a1", "a3"]


def test_init_writes_them_and_the_doctor_gives_them_to_data_validate(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(TABLE + "a4;Warum?;;Meer\n")
    given = ("--model", "lab:0", "--data", "mine.csv", "--url", "http://127.0.0.1:1")
    status, _, err = run("init", *given, *NAMED, "--question-id-key", "Nr", "--skip-bad")
    assert status == 0 and "1 of 4 rows are malformed" in err
    config = load_config(tmp_path / "unspiral.yaml")
    assert (config.data.source_key, config.data.id_key) == ("Thema", "Nr")
    found = _questions_of(config, "data.train", "mine.csv")
    keys = " ".join((*NAMED, "--id-key", "Nr"))
    assert f"unspiral data validate mine.csv {keys} lists all" in str(found)


def test_a_suite_takes_them_from_files_that_have_them(tmp_path):
    (tmp_path / "mixed.csv").write_text(TABLE.replace("Berge", "nq").replace("Meer", "popqa"))
    (tmp_path / "bamboogle.jsonl").write_text('{"id": "t", "question": "who?", "answer": "Ada"}\n')
    suite = read_suite(tmp_path, keys=KEYS, say=lambda text: None)
    assert [item.key for item in suite.items] == ["nq/a1", "popqa/a3", "bamboogle/t"]
    assert suite.left_out == {"mixed": 1}


@pytest.mark.parametrize(
    ("rows", "keys", "names"),
    [
        ([{"Frage": "a?", "Antwort": "b"}], NAMED[:4], ("Frage", "Antwort")),
        ([{"Frage": "a?", "answer": "b"}], ("--question-key", "frage"), ("Frage", "answer")),
        ([{"q": {"x": "a?"}, "target": "b"}], ("--question-key", "q.x"), ("q.x", "target")),
        ([{"question": "a?", "A": ["b"]}], ("--answer-key", "A"), ("question", "A")),
    ],
)
def test_json_names_the_files_own_columns(run, tmp_path, rows, keys, names):
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = json.loads(run("data", "validate", str(file), *keys, "--json")[1])
    assert found["read_from"] == [{"question": names[0], "answers": names[1], "rows": 1}]


def test_what_is_wrong_with_a_named_column_is_told_by_its_name(run, tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text('{"Frage": ["a"], "Antwort": "b"}\n{"Frage": "a", "Antwort": true}\n')
    _, out, _ = run("data", "validate", str(file), *NAMED[:4])
    assert f"{file}, line 1: expected `Frage`: a text, got a list" in out
    assert f"{file}, line 2: `Antwort` is true; expected a text" in out


def test_other_trainers_names_of_columns_lead_to_ours():
    assert meant_by("data.reward_fn_key") == meant_by("source_key") == ("data.source_key",)
    assert meant_by("id_key") == ("data.id_key", "retriever.id_key")
