"""The columns that a question is not read from go along with it, bounded, whatever the file's format."""

from __future__ import annotations

import datetime
import decimal
import json
import pickle

import pyarrow
import pytest
from places import ROOT
from pyarrow import feather, parquet
from rollout_fakes import words

from services.common.errors import UserError
from services.common.records.reader import _small_in, read_records
from services.contracts import Action, Question, Trajectory, with_columns
from services.rollout.worker.loop import Prompts
from services.rollout.worker.templates.search_r1 import SearchR1Template
from services.settings import RolloutSettings
from trainer.config.data_settings import DataSettings
from trainer.data.columns import Keys
from trainer.data.cursor import PromptCursor
from trainer.data.named_columns import questions_in
from trainer.data.questions import load_questions
from trainer.rewards import make_reward
from trainer.session.resuming.groups import GROUPS

ROW = {
    "id": "q0",
    "question": "capital of Italy?",
    "golden_answers": ["Rome"],
    "data_source": "hotpot",
    "extra_info": {"split": "train", "index": 7},
    "supporting_facts": [["Italy", "0"], ["Rome", "2"]],
    "level": "hard",
}
OTHERS = {name: ROW[name] for name in ("extra_info", "supporting_facts", "level")}


def write(folder, kind, rows):
    path = folder / f"questions.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "arrow":
        feather.write_feather(pyarrow.Table.from_pylist(rows), path)
    else:
        texts = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows]
        header, *cells = [list(texts[0]), *(list(row.values()) for row in texts)]
        quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in (header, *cells)]
        path.write_text("\n".join(quoted) + "\n")
    return path


def first(path, **keys):
    return load_questions(path, keys=Keys(**keys)).rows[0]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_each_format_carries_them_as_json_has_them(tmp_path, kind):
    assert first(write(tmp_path, kind, [ROW])).columns == OTHERS


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_name_with_a_dot_is_a_name(tmp_path, kind):
    columns = first(write(tmp_path, kind, [ROW | {"meta.level": "hard", "meta": {"level": "easy"}}])).columns
    assert (columns["meta.level"], columns["meta"]) == ("hard", {"level": "easy"})


def test_the_cells_of_a_table_are_texts(tmp_path):
    columns = first(write(tmp_path, "csv", [ROW])).columns
    assert columns["level"] == "hard" and json.loads(columns["extra_info"]) == OTHERS["extra_info"]


def test_what_json_lacks_is_said_in_its_way_or_left_out(tmp_path):
    more = {"born": datetime.date(1990, 2, 3), "price": decimal.Decimal("1.50"), "photo": b"\x00\xff"}
    columns = first(write(tmp_path, "parquet", [ROW | more])).columns
    assert (columns["born"], columns["price"]) == ("1990-02-03", 1.5)
    with pytest.raises(
        KeyError, match=r"column `photo` of question q0 is not kept: it holds what JSON cannot"
    ):
        columns["photo"]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "csv"])
def test_a_long_column_is_left_out_says_so_and_is_kept_where_it_is_named(tmp_path, kind):
    long = [["Italy", "x" * 1500], ["Rome", "y" * 1500]]
    path = write(tmp_path, kind, [ROW | {"context": long}])
    columns = first(path).columns
    assert set(columns) == set(OTHERS) and columns.get("context") is None
    with pytest.raises(KeyError) as error:
        columns["context"]
    assert str(error.value) == (
        "column `context` of question q0 is not kept: it has more than 2,000 characters; data.keep_columns "
        "names those to keep, such as [context]"
    )
    named = first(path, keep=("context", "level")).columns
    assert list(named) == ["context", "level"]
    assert named["context"] == (json.dumps(long) if kind == "csv" else long)
    assert first(path, keep=()).columns == {}


def test_a_key_in_a_column_is_kept_under_the_name_that_was_given(tmp_path):
    path = write(tmp_path, "parquet", [ROW | {"metadata": {"level": "easy", "context": "x" * 5000}}])
    assert first(path, keep=("metadata.level", "question")).columns == {
        "metadata.level": "easy",
        "question": "capital of Italy?",
    }


def test_named_columns_are_bounded_too_and_a_row_as_a_whole(tmp_path):
    path = write(tmp_path, "jsonl", [ROW | {"context": "x" * 100_001}])
    with pytest.raises(
        KeyError, match=r"it has more than 100,000 characters; data.keep_columns may name a key"
    ):
        first(path, keep=("context",)).columns["context"]
    wide = write(tmp_path, "json", [ROW | {f"c{n}": "x" * 1900 for n in range(20)}])
    columns = first(wide).columns
    assert len(json.dumps(columns)) < 21_000
    with pytest.raises(KeyError, match=r"column `c19` .* no room beside the row's others"):
        columns["c19"]


def test_one_that_is_nowhere_is_named_with_those_that_are(tmp_path):
    columns = first(write(tmp_path, "jsonl", [ROW])).columns
    with pytest.raises(KeyError) as error:
        columns["suporting_facts"]
    assert str(error.value) == (
        "question q0 has no other column `suporting_facts`; its columns are extra_info, supporting_facts, "
        "level; did you mean supporting_facts?"
    )


def test_a_name_of_the_configuration_that_no_file_has_is_refused(tmp_path):
    path = write(tmp_path, "jsonl", [ROW])
    data = DataSettings(train=str(path), keep_columns=["levle"])
    with pytest.raises(UserError) as error:
        questions_in(data, str(path))
    assert str(error.value).startswith(
        f"data.keep_columns: {path} has no column 'levle'; its columns are id, "
    )
    assert str(error.value).endswith("; did you mean level?")
    (tmp_path / "held_out.jsonl").write_text(json.dumps(ROW | {"levle": 1}) + "\n")
    both = DataSettings(train=str(path), eval=str(tmp_path / "held_out.jsonl"), keep_columns=["levle"])
    assert questions_in(both, str(path)).rows[0].columns == {}, "the other file has it"
    assert questions_in(both, str(tmp_path / "held_out.jsonl")).rows[0].columns == {"levle": 1}


def test_a_copy_is_the_callers_own_and_goes_from_process_to_process(tmp_path):
    question = first(write(tmp_path, "jsonl", [ROW]))
    question.columns["extra_info"]["index"] = 8
    assert pickle.loads(pickle.dumps(question)).columns == OTHERS
    assert hash(question) == hash(pickle.loads(pickle.dumps(question)))


def test_a_question_that_was_stored_before_there_were_columns_has_none():
    old = Question("q0", "capital of Italy?", ("Rome",), "hotpot")
    del old.__dict__["_kept"]
    assert pickle.loads(pickle.dumps(old)).columns == {}


def test_they_change_no_digest_and_no_equality(tmp_path):
    with_them = load_questions(write(tmp_path, "jsonl", [ROW])).rows
    without = [Question("q0", "capital of Italy?", ("Rome",), "hotpot")]
    assert with_them == without
    states = [PromptCursor(rows, seed=0, shuffle=True).state_dict() for rows in (with_them, without)]
    assert states[0] == states[1]
    assert [group.change for group in GROUPS if "data.keep_columns" in group.keys] == ["free"]


def test_prompts_of_a_template_that_shows_a_column_are_not_mixed_up():
    class Levels(SearchR1Template):
        def prompt_ids(self, question):
            return self.encode(question.columns["level"])

    template = Levels(words(more=("easy", "hard")), RolloutSettings())
    question = Question("q0", "capital of Italy?", ("Rome",), "hotpot")
    known = Prompts()
    shown = [
        template.decode(known.ids(with_columns(question, {"level": level}), template)).strip()
        for level in ("easy", "hard", "easy")
    ]
    assert shown == ["easy", "hard", "easy"]


def test_a_reward_of_verls_form_is_given_extra_info(tmp_path, monkeypatch):

    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    (code,) = [part.split("```")[0] for part in page.split("```python\n") if "import compute_score" in part]
    (tmp_path / "my_verl_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return extra_info['index'] if ground_truth == {'target': ['Rome']} else -1\n"
    )
    (tmp_path / "verls_form.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    question = first(write(tmp_path, "parquet", [ROW]))
    trajectory = Trajectory("u", "g", question, [0], [Action([0], [-1.0], 0, "answer", "x")], "answer")
    assert make_reward("verls_form:reward")(trajectory) == 7.0


def test_a_long_text_that_stands_once_for_all_rows_of_a_file_is_not_read(tmp_path):
    path = tmp_path / "shared.parquet"
    rows = [ROW | {"shared": "x" * 5000} for _ in range(500)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with parquet.ParquetFile(path) as table:
        assert "shared" in _small_in(table.metadata, 2000), "by the sums of the file it is short"
    (record, *_) = read_records(path, Keys().is_wanted, 2000)
    assert "shared" not in record.fields and "shared" in record.names
    with pytest.raises(KeyError, match=r"`shared` .* is not kept: it has more than 2,000 characters"):
        load_questions(path).rows[0].columns["shared"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([2**62, 0], pyarrow.timestamp("us")),
        ([2**30, 0], pyarrow.date32()),
        ([0, 0], pyarrow.timestamp("us", tz="Mars/Base")),
        ([{"at": 2**62}, {"at": 0}], pyarrow.struct([("at", pyarrow.timestamp("us"))])),
    ],
)
def test_a_time_that_python_has_no_form_for_refuses_no_question(tmp_path, kind, values, type_):
    table = pyarrow.Table.from_pylist([ROW, ROW | {"id": "q1", "question": "capital of Spain?"}])
    table = table.append_column("until", pyarrow.array(values, type_))
    path = tmp_path / f"questions.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        feather.write_feather(table, path)
    rows = load_questions(path).rows
    assert [row.text for row in rows] == ["capital of Italy?", "capital of Spain?"]
    assert rows[0].columns["level"] == "hard"
    with pytest.raises(KeyError, match="`until` of question q0 is not kept: it holds what JSON cannot say"):
        rows[0].columns["until"]
