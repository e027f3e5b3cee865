"""`unspiral init` and `doctor --config` on a user's own tables: columns of other names, rows that no run can
read. What init takes and the doctor calls ready, `train` reads."""

import io
import re

import pytest
from command_line import run  # noqa: F401
from rich.console import Console
from test_init import files  # noqa: F401

from services.common.errors import UserError
from trainer.commands.checks import doctor_files
from trainer.commands.checks.doctor import run_doctor
from trainer.config.schema import load_config
from trainer.data import cli as data_cli
from trainer.data.named_columns import keys_of, questions_in
from trainer.session.preflight.corpora import keys_of as columns_of
from trainer.session.preflight.named_files import check_named_files

NAMED = ("--question-key", "Frage", "--answer-key", "Antwort")
COLUMNS = ("--text-key", "Story", "--title-key", "Label", "--id-key", "Light No")


@pytest.fixture
def tables(files, tmp_path):
    """Questions, held-out ones with the usual names, and a corpus, as Excel saves them."""
    bom = {"encoding": "utf-8-sig"}
    (tmp_path / "ask.csv").write_text("Nr;Frage;Antwort\n1;Who kept A?;Anna\n2;Who kept B?;Bob\n", **bom)
    (tmp_path / "held.csv").write_text("question,answers\nWho kept C?,Carla\n")
    (tmp_path / "lights.csv").write_text("Light No;Label;Story\n1;A;Anna kept A.\n2;B;Bob kept B.\n", **bom)
    return ("--model", "model", "--data", "ask.csv", "--eval", "held.csv", "--corpus", "lights.csv")


def doctor(file, *changes):
    """Lines of the doctor by their keys. Without a tokenizer no prompt is made."""
    (file.parent / "model" / "tokenizer.json").unlink(missing_ok=True)
    out = io.StringIO()
    run_doctor(file, Console(file=out, width=600), role="retriever", overrides=list(changes))
    lines = re.sub(r"\n +->", " ->", out.getvalue()).splitlines()
    return {words[1]: line for line in lines if len(words := line.split()) > 1}


def test_columns_of_other_names_are_written_and_read_by_a_run(run, tables, tmp_path):
    status, out, err = run("init", *tables, *NAMED, *COLUMNS)
    assert status == 0 and out.startswith("written to unspiral.yaml; next:"), err
    config = load_config(tmp_path / "unspiral.yaml")
    assert (config.data.question_key, config.data.answer_key) == ("Frage", "Antwort")
    assert columns_of(config.retriever).given == {"text": "Story", "title": "Label", "id": "Light No"}
    check_named_files(config)
    train = questions_in(config.data, "ask.csv").rows
    assert [(row.text, row.golden_answers) for row in train][1] == ("Who kept B?", ("Bob",))
    assert questions_in(config.data, "held.csv").rows[0].golden_answers == ("Carla",)
    config = load_config(tmp_path / "unspiral.yaml", ["data.question_key=Fragen"])
    with pytest.raises(UserError) as told:
        check_named_files(config)
    assert str(told.value) == (
        "data.question_key: ask.csv has no column 'Fragen'; its columns are Nr, Frage, Antwort; did "
        "you mean Frage?"
    )


@pytest.mark.parametrize("given", [(), NAMED], ids=["questions", "corpus"])
def test_a_file_of_which_no_row_can_be_read_is_refused_in_the_words_of_data_validate(
    run,
    tables,
    tmp_path,
    given,
):
    (tmp_path / "lights.csv").write_text("Light No;Story\n1;Anna kept A.\n")
    status, out, err = run("init", *tables, *given)
    assert (status, out) == (2, "") and not (tmp_path / "unspiral.yaml").exists()
    file = "lights.csv" if given else "ask.csv"
    assert err.startswith(f"unspiral: {file}: ")
    if given:
        assert "its columns are Light No, Story" in err and "--text-key, --title-key and --id-key" in err
        assert run("data", "validate", file, "--id-key", "Light No")[2].startswith(
            f"unspiral: {file}: 1 of 1 rows are malformed; the first: {file}, line 2: no "
        )
    else:
        assert "its columns are Nr, Frage, Antwort; columns of other names are given by --question-key" in err
        assert run("data", "validate", file) == (2, "total         0\n", err)


def test_rows_at_which_a_run_would_stop_are_told_and_nothing_is_written(run, tables, tmp_path):
    assert run("init", *tables, *NAMED, *COLUMNS, "--out", "earlier.yaml")[0] == 0
    with (tmp_path / "ask.csv").open("a") as ask, (tmp_path / "lights.csv").open("a") as lights:
        ask.write("3;Who kept C?;\n4;who kept A;Dirk\n5;Who kept D?;Anna; \n")
        lights.write("3;C;\n1;A;Once more.\n")
    status, _, err = run("init", *tables, *NAMED, *COLUMNS)
    assert status == 2 and err.splitlines() == [
        "unspiral: ask.csv: 2 of 5 rows are malformed; the first: ask.csv, line 4: `Antwort` is empty; "
        "expected an answer",
        "lights.csv: 1 of 4 rows are malformed; the first: lights.csv, line 4: `Story` is empty; 1 "
        "passage has the id of an earlier one; expected unique ids",
        "note: 1 question contradicts an earlier one; the first: ask.csv, line 5: the same question as "
        "ask.csv, line 2, with another answer (Dirk; there Anna): who kept A",
        "mend these rows, or give --skip-bad; nothing is written",
    ]
    assert not (tmp_path / "unspiral.yaml").exists()
    (tmp_path / "earlier.yaml").rename(tmp_path / "unspiral.yaml")
    lines = doctor(tmp_path / "unspiral.yaml")
    lists = "unspiral data validate"
    assert lines["data.train"].split(None, 2)[0::2] == [
        "BAD",
        "ask.csv: 3 questions in 5 rows -> ask.csv, line 4: `Antwort` is empty; expected an answer; 2 of its "
        f"5 rows are malformed; 1 question contradicts an earlier one; {lists} ask.csv --question-key Frage "
        "--answer-key Antwort lists all; data.skip_bad=true leaves such rows out",
    ]
    assert lines["retriever.corpus"].split(None, 2)[0::2] == [
        "BAD",
        "lights.csv: 2 passages in 4 rows -> lights.csv, line 4: `Story` is empty; 1 of its 4 rows is "
        f"malformed; 1 row has the id of an earlier one; {lists} lights.csv --text-key Story --title-key "
        "Label --id-key 'Light No' lists all; retriever.skip_bad=true leaves such rows out",
    ]
    lines = doctor(tmp_path / "unspiral.yaml", "data.skip_bad=true", "retriever.skip_bad=true")
    assert lines["data.train"].startswith("note") and "left out by data.skip_bad" in lines["data.train"]
    corpus = lines["retriever.corpus"]
    assert corpus.startswith("note") and "left out by retriever.skip_bad" in corpus


def test_the_doctor_reads_behind_the_first_rows_and_says_where_it_stopped(
    run,
    tables,
    tmp_path,
    monkeypatch,
):
    assert run("init", *tables, *NAMED, *COLUMNS)[0] == 0
    file = tmp_path / "unspiral.yaml"
    assert doctor(file)["retriever.corpus"].split(None, 2)[0::2] == ["ok", "lights.csv: 2 passages in 2 rows"]
    monkeypatch.setattr(doctor_files, "LOOKED_AT", 1)
    lines = doctor(file)
    assert lines["retriever.corpus"].endswith("lights.csv: 1 passage in its first 1 rows, which were read")
    assert lines["data.train"].endswith("ask.csv: 1 question in its first 1 rows, which were read")
    (tmp_path / "lights.csv").write_text("Light No;Label;Story\n1;A;\n")
    corpus = doctor(file, "retriever.skip_bad=true")["retriever.corpus"]
    assert corpus.startswith("BAD"), "nothing would be left"


def test_a_key_that_only_one_of_both_files_has_counts_there(tables, tmp_path):
    text = "{model: {path: model}, retriever: {url: 'http://127.0.0.1:1'}, data: {train: %s, eval: %s, "
    (tmp_path / "c.yaml").write_text(text % ("held.csv", "ask.csv") + "question_key: Frage}}")
    data = load_config(tmp_path / "c.yaml").data
    assert keys_of(data, "held.csv").question is None and keys_of(data, "ask.csv").question == "Frage"


def test_columns_of_a_corpus_go_with_a_corpus(run, tables):
    status, _, err = run("init", *tables[:4], *NAMED, "--url", "http://127.0.0.1:1", "--text-key", "Story")
    assert (status, err) == (
        2,
        "unspiral: init: --text-key, --title-key and --id-key are of a corpus; they go with --corpus\n",
    )


def test_data_validate_reads_questions_by_the_columns_of_a_configuration(run, tables, monkeypatch):
    assert run("init", *tables, *NAMED, *COLUMNS)[0] == 0
    monkeypatch.setattr(data_cli, "_look_up", lambda *given: None)  # the model has no tokenizer
    status, out, err = run("data", "validate", "ask.csv", "--config", "unspiral.yaml")
    assert (status, err) == (0, "") and out.endswith("total         2\n")


def test_rows_that_are_left_out_are_so_by_the_configuration_too(run, tables, tmp_path):
    for file, row in (("ask.csv", "3;;\n"), ("lights.csv", "3;C;\n")):
        with (tmp_path / file).open("a") as more:
            more.write(row)
    status, _, err = run("init", *tables, *NAMED, *COLUMNS)
    assert status == 2 and err.count("mend these rows, or give --skip-bad; nothing is written") == 1, err
    status, _, err = run("init", *tables, *NAMED, *COLUMNS, "--skip-bad")
    assert status == 0 and "mend these" not in err, err
    assert "left out by data.skip_bad" in err and "left out by retriever.skip_bad" in err
    config = load_config(tmp_path / "unspiral.yaml")
    assert (config.data.skip_bad, config.retriever.skip_bad) == (True, True)
    check_named_files(config)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (
            "Key,Heading,Body",
            "no column is called title or id; --title-key and --id-key (of a run: retriever.title_key and "
            "retriever.id_key) may name one of the others: Key, Heading",
        ),
        (
            "id,Heading,text",
            "no column is called title; --title-key (of a run: retriever.title_key) may name one of the "
            "others: Heading",
        ),
        ("Key,title,contents", "no column is called id; --id-key (of a run: retriever.id_key) may name one"),
        ("id,title,text", None),
        ("id,Heading,contents", None),
    ],
)
def test_a_title_and_an_id_by_other_names_are_asked_for(run, tables, tmp_path, head, says):
    (tmp_path / "c.csv").write_text(f"{head}\na,Rome,Rome is in Italy.\n")
    told = "" if says is None else f"c.csv: {says}"
    outs = [run("data", "validate", "c.csv"), run("index", "build", "c.csv", "--out", "index")]
    outs.append(run("init", *tables[:4], "--corpus", "c.csv", *NAMED))
    for status, out, err in outs:
        assert status == 0 and told in out + err, err
        assert says is not None or "no column is called" not in out + err
    if says and "title or id" in says:
        named = ("--title-key", "Heading", "--id-key", "Key")
        assert "no column is called" not in "".join(map(str, run("data", "validate", "c.csv", *named)))


def test_a_column_of_the_questions_ids_is_told_its_option(run, tables):
    url = (*tables[:4], "--url", "http://127.0.0.1:1")
    assert run("init", *url, *NAMED, "--id-key", "Nr") == (
        2,
        "",
        "unspiral: init: --text-key, --title-key and --id-key are of a corpus; they go with --corpus; the "
        "questions' ids are named by --question-id-key Nr\n",
    )
    status, _, err = run("init", *tables, *NAMED, *COLUMNS[:-1], "Nr")
    assert status == 2 and err.endswith("; ask.csv has it: --question-id-key Nr\n"), err
