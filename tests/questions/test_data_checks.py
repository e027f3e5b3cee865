"""`unspiral data validate`, as somebody uses it on data of their own before a run: a corpus, columns of other
names, repeated and damaged rows, answers that no search finds, prompts that are too long."""

import json

import pytest
from command_line import run  # noqa: F401

from services.common.errors import UserError
from services.contracts import Trajectory
from trainer.data.checks.coverage import holds, hops_of
from trainer.data.questions import load_questions

CORPUS = [
    {"id": "0", "contents": '"Italy"\nThe capital of Italy is Rome.'},
    {"id": "1", "contents": '"Peru"\nThe capital of Peru is Lima.'},
    {"id": "2", "contents": '"Chad"\nN\'Djamena lies in Chad.'},
]
QUESTIONS = [
    {"id": "2hop__1", "question": "capital of Italy", "golden_answers": ["Rome"], "data_source": "a"},
    {"id": "3hop__1", "question": "capital of Peru", "golden_answers": ["the Lima"], "data_source": "a"},
    {"id": "3hop__2", "question": "where is Chad", "golden_answers": ["Africa"], "data_source": "b"},
    {"id": "3hop__3", "question": "is Peru in Chad", "golden_answers": ["no"], "data_source": "b"},
]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def index(tmp_path, run):
    jsonl(tmp_path / "corpus.jsonl", CORPUS)
    assert (
        run("index", "build", "--corpus", str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "i"))[0]
        == 0
    )
    return str(tmp_path / "i")


def test_a_corpus_is_told_from_questions_and_its_faults_are_counted(run, tmp_path):
    rows = [*CORPUS, {"id": "3", "contents": CORPUS[0]["contents"]}, {"id": "4", "contents": "cafÃ© au lait"}]
    rows += [{"id": "5", "contents": ""}, {"id": "6", "contents": '"Towers"\n'}]
    file = jsonl(tmp_path / "corpus.jsonl", rows)
    status, out, err = run("data", "validate", file)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"{file}, line 4: the passage '3' has the text of {file}, line 1",
        f"{file}, line 5: the text looks like UTF-8 that was read as another encoding",
        f"{file}, line 6: the passage '5' is empty",
        f"{file}, line 7: the passage '6' has a title and no text",
        f"{file}: a corpus of 7 passages",
        "1 passage is empty",
        "1 passage has a title and no text",
        "1 passage looks like UTF-8 that was read as another encoding",
        "1 passage has the text of another one",
    ]
    file = jsonl(tmp_path / "again.jsonl", [*CORPUS, CORPUS[0]])
    status, _, err = run("data", "validate", file)
    assert status == 2
    assert f"unspiral: {file}: 1 passage has the id of an earlier one; expected unique ids" in err
    file = jsonl(tmp_path / "bad.jsonl", [*CORPUS, {"id": "7"}])
    status, out, err = run("data", "validate", file)
    assert status == 2 and f'{file}, line 4: no "contents"' in out
    assert err == f"unspiral: {file}: 1 of 4 rows are malformed; `index build --skip-bad` leaves these out\n"
    status, _, err = run("data", "validate", file, "--index", "i")
    assert status == 2 and "is a corpus; --index, --config and --against go with questions" in err


def test_all_that_is_wrong_with_a_corpus_is_told_at_once_and_skip_bad_leaves_it_out(run, tmp_path):
    rows = [
        {"id": id, "text": text} for id, text in (("1", "a bridge"), ("1", "a tower"), ("2", ""), ("3", "c"))
    ]
    file = jsonl(tmp_path / "dup.jsonl", [*rows, {"id": "1", "text": "a river"}])
    status, out, err = run("data", "validate", file)
    assert status == 2 and out.splitlines() == [
        f"{file}, line 3: `text` is empty",
        f"{file}, line 2: the passage '1' has the id of {file}, line 1",
        f"{file}, line 5: the passage '1' has the id of {file}, line 1",
        f"{file}: a corpus of 4 passages",
    ]
    assert "1 of 5 rows are malformed" in err and "2 passages have the id of an earlier one" in err
    index = str(tmp_path / "i")
    status, _, err = run("index", "build", "--corpus", file, "--out", index)
    assert status == 2 and "--skip-bad" in err
    status, out, err = run("index", "build", "--corpus", file, "--out", index, "--skip-bad")
    assert status == 0 and "2 passages" in out and "3 lines were left out" in err
    assert f"{file}, line 2: id '1' again; that on line 1 is kept" in err
    assert "a bridge" in run("index", "search", "--index", index, "bridge tower river")[1]
    assert "tower" not in run("index", "search", "--index", index, "tower")[1]


def test_columns_of_other_names_are_read_by_key_and_a_missing_one_is_named(run, tmp_path):
    rows = [{"frage": "Hauptstadt von Peru?", "meta": {"antwort": 1535}, "answer": "wrong"}]
    file = jsonl(tmp_path / "q.jsonl", rows)
    keys = ("--question-key", "frage", "--answer-key", "meta.antwort")
    status, out, _ = run("data", "validate", file, *keys)
    assert status == 0 and out.split() == ["q", "1", "total", "1"]
    status, _, err = run("data", "convert", file, str(tmp_path / "out.jsonl"), *keys)
    assert (status, err) == (0, "")
    made = json.loads((tmp_path / "out.jsonl").read_text())
    assert (made["question"], made["golden_answers"]) == ("Hauptstadt von Peru?", ["1535"])
    status, _, err = run("data", "validate", file, "--question-key", "fragen")
    assert (
        status == 2 and "--question-key fragen: nothing is there; the columns are frage, meta, answer" in err
    )


def test_columns_of_other_names_are_both_told_at_once_with_the_options_that_read_them(run, tmp_path):
    file = tmp_path / "q.csv"
    file.write_text("Frage;Antwort\nHauptstadt von Peru?;Lima\n", encoding="utf-8")
    status, _, err = run("data", "validate", str(file))
    assert status == 2 and "it has neither, its columns are Frage, Antwort; columns of other names are" in err
    keys = "--question-key COLUMN --answer-key COLUMN"
    assert err.endswith(
        f" by {keys} (of a run: data.question_key and data.answer_key); if it is a corpus, name its columns "
        "by --text-key, --title-key and --id-key\n"
    )
    assert run("data", "validate", str(file), "--question-key", "Frage", "--answer-key", "Antwort")[0] == 0
    err = run("data", "validate", str(file), "--question-key", "Frage")[2]
    assert "--answer-key COLUMN" in err and "--question-key" not in err
    err = run("data", "validate", str(file), "--answer-key", "Antwort")[2]
    assert "--question-key COLUMN" in err and "--answer-key" not in err


def test_a_corpus_given_as_questions_and_questions_given_as_a_corpus_are_told(run, tmp_path):
    corpus = jsonl(tmp_path / "corpus.jsonl", [{"id": "1", "title": "Peru", "text": "Lima."}])
    questions = jsonl(tmp_path / "q.jsonl", QUESTIONS)
    with pytest.raises(
        UserError, match=r"columns of a corpus, not of questions: id, title, text; .*retriever"
    ):
        load_questions(corpus)
    status, _, err = run("index", "build", "--corpus", questions, "--out", str(tmp_path / "i"))
    assert status == 2 and "`question` makes it a question, and no passage; questions go to data.train" in err


def test_repeated_questions_and_damaged_texts_are_reported(run, tmp_path):
    rows = [{"question": q, "answer": "x"} for q in ("Who is it?", "who is it", "Wo liegt MÃ¼nchen?")]
    file = jsonl(tmp_path / "q.jsonl", rows)
    status, out, _ = run("data", "validate", file)
    assert status == 0 and f"{file}, line 2: the same question as {file}, line 1: who is it" in out
    assert "1 question repeats one that stands before" in out
    assert "1 row looks like UTF-8 that was read as another encoding" in out
    assert "in 3 rows the question was read from `question` and the answers from `answer`" in out


def test_ids_that_stand_twice_are_reported_and_each_row_is_a_question_of_its_own(run, tmp_path):
    pytest.importorskip("ray")  # which the command imports
    from trainer.commands.work.evaluate import keep_answers

    rows = [
        {"id": id, "question": q, "golden_answers": ["x"], "data_source": s}
        for id, q, s in (("q7", "who?", "a"), ("q7", "where?", "a"), ("q7", "when?", "b"))
    ]
    file = jsonl(tmp_path / "q.jsonl", rows)
    status, out, err = run("data", "validate", file)
    assert (status, err) == (0, "")
    assert f"{file}, line 2: the id 'q7' is that of {file}, line 1 too\n" in out
    assert "1 question has the id of an earlier one; a run takes each row for a question of its own" in out
    assert "line 3" not in out

    trajectories = [
        Trajectory(f"eval-{n}", f"eval-{n}", question, [], [], "answer")
        for n, question in enumerate(load_questions(file).rows)
    ]
    keep_answers(trajectories, tmp_path / "answers.jsonl")
    kept = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(row["key"], row["id"], row["question"]) for row in kept] == [
        ("q7", "q7", "who?"),
        ("q7#2", "q7", "where?"),
        ("q7#3", "q7", "when?"),
    ]


def test_answers_that_stand_in_an_index_are_counted_by_source_and_hops_with_misses_to_read(
    run, tmp_path, index
):
    file = jsonl(tmp_path / "q.jsonl", QUESTIONS)
    status, out, err = run("data", "validate", file, "--index", index, "--topk", "2")
    assert (status, err) == (0, "")
    assert out.splitlines()[3:] == [
        f"an answer stands in the best 2 passages of {index} for 2 of 3 questions (66.7%)",
        "  1 question is answered by yes or no, which no passage shows",
        "  a       2 of 2 (100.0%)",
        "  b       0 of 1 (0.0%)",
        "  2 hops  1 of 1 (100.0%)",
        "  3 hops  1 of 2 (50.0%)",
        "  the first such passage: 2 at place 1",
        "  missed, for example:",
        '    where is Chad -> Africa  (best: "Chad")',
    ]


def test_a_prompt_is_shown_and_what_is_too_long_or_cut_is_counted(run, tmp_path, index):
    pytest.importorskip("torch")
    from rollout_models import tiny_model

    tiny_model(tmp_path / "model")
    config = {
        "model": {"path": str(tmp_path / "model")}, "data": {"train": "t"}, "retriever": {"index": index},
        "rollout": {"max_prompt_tokens": 4, "max_obs_tokens": 16, "template": "lab"},
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    file = jsonl(tmp_path / "q.jsonl", QUESTIONS)
    status, out, err = run("data", "validate", file, "--index", index, "--config", str(tmp_path / "c.yaml"))
    assert status == 0, err
    shown = out.partition("the first prompt:\n")[2]
    assert shown.splitlines() == [
        "<bos> <unk> <unk> <unk>",
        "prompts: 4 tokens at the median, 5 at most; 1 of 4 are longer than rollout.max_prompt_tokens allows "
        "(4)",
        "search results: 17 tokens at the median, 18 at most; 50.0% are cut at rollout.max_obs_tokens=16",
    ]


def test_hops_are_read_where_data_sets_keep_them():
    assert hops_of({"id": "2hop__1_2"}) == "2 hops"
    assert hops_of({"question_decomposition": [{}, {}, {}]}) == "3 hops"
    assert hops_of({"metadata": {"type": "bridge"}}) == "bridge"
    assert hops_of({"hops": 2, "type": "bridge"}) == "2 hops"
    assert hops_of({"id": "x"}) is None


def test_an_answer_is_found_word_by_word_as_exact_match_reads_it():
    assert holds("It was The Beatles, in 1962.", ["Beatles"]) and holds("in 1962.", ["x", "1962"])
    assert not holds("Romeo and Juliet", ["Rome"]) and not holds("anything", ["A"])


def test_questions_that_carry_a_passage_are_questions(run, tmp_path):
    row = {"id": "1", "question": "who?", "golden_answers": [], "text": "a passage"}
    status, out, err = run("data", "validate", jsonl(tmp_path / "q.jsonl", [row]))
    assert status == 2 and "1 of 1 rows are malformed: expected `golden_answers`" in err
    assert "golden_answers" not in out, "of the only row it is told once, by the last line"


def test_a_malformed_row_is_none_of_those_that_are_looked_up(run, tmp_path, index):
    file = tmp_path / "q.jsonl"
    file.write_text("{broken\n" + json.dumps(QUESTIONS[0]) + "\n", encoding="utf-8")
    out = run("data", "validate", str(file), "--index", index, "--limit", "1")[1]
    assert "for 1 of 1 questions" in out


@pytest.mark.parametrize("command", ["convert", "passages"])
def test_a_file_that_is_there_is_replaced_on_request_alone(run, tmp_path, command):
    source, out = tmp_path / "q.jsonl", tmp_path / "out.jsonl"
    row = {"question": "who?", "answer": "Ada"} if command == "convert" else {"id": "a", "text": "b c"}
    source.write_text(json.dumps(row) + "\n")
    out.write_text("mine")
    status, _, err = run("data", command, str(source), str(out))
    assert (status, err) == (2, f"unspiral: {out}: is there already; --overwrite replaces it\n")
    assert out.read_text() == "mine"
    assert run("data", command, str(source), str(out), "--overwrite")[0] == 0
    assert json.loads(out.read_text())["id"]
    status, _, err = run("data", command, str(source), str(source))
    assert status == 2 and "is the source itself" in err


def test_the_columns_that_are_told_are_those_of_the_file(run, tmp_path):
    file = tmp_path / "q.csv"
    file.write_text("Frage;Antwort\nWer?;Ada\n")
    for keys in (("Frage", "Antwrt"), ("Frag", "Antwort"), ("Frage", None)):
        options = [
            part for pair in zip(("--question-key", "--answer-key"), keys, strict=True) for part in pair
        ]
        status, _, err = run("data", "validate", str(file), *(options if keys[1] else options[:2]))
        assert status == 2 and "columns are Frage, Antwort" in err and "question;" not in err
        assert "Antwort, " not in err
