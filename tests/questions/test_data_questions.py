"""Question files: what is read, what is refused and in which words, and what a conversion keeps."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import UserError
from services.contracts import Question
from trainer.commands.cli import main
from trainer.data import convert, load_questions, validate

GOOD = {"id": "a", "question": "who?", "golden_answers": ["x", "y"], "data_source": "nq"}


def jsonl(path, *rows):
    path.write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8"
    )
    return path


def search_r1_row(i, source="nq", target=("x", "y"), **more):
    return {
        "id": f"test_{i}",
        "question": "who?",
        "golden_answers": list(target),
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Answer the given question. Question: who {i}?\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(target)}},
        "extra_info": {"split": "test", "index": i},
        "metadata": {"context": ["long"], "type": "bridge"},
        **more,
    }


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_plain_jsonl(tmp_path):
    found = load_questions(
        jsonl(
            tmp_path / "q.jsonl", {**GOOD, "kind": "single-hop"}, "", GOOD | {"id": 7, "golden_answers": "x"}
        )
    )
    assert found.skipped == 0
    assert found.rows == [Question("a", "who?", ("x", "y"), "nq"), Question("7", "who?", ("x",), "nq")]


def test_flash_rag_jsonl_takes_its_source_from_the_file(tmp_path):
    row = {"id": "test_0", "question": "who?", "golden_answers": ["x"], "metadata": {}}
    (tmp_path / "hotpotqa").mkdir()
    assert load_questions(jsonl(tmp_path / "hotpotqa" / "dev.jsonl", row)).rows[0].data_source == "hotpotqa"
    assert load_questions(jsonl(tmp_path / "musique.jsonl", row)).rows[0].data_source == "musique"


def test_search_r1_parquet_keeps_its_prompt_word_for_word(tmp_path):
    rows = [search_r1_row(0), search_r1_row(0, "hotpotqa")]
    found = load_questions(parquet(tmp_path / "test.parquet", rows)).rows
    assert found[0] == Question(
        "test_0", "who?", ("x", "y"), "nq", "Answer the given question. Question: who 0?\n"
    )
    assert [q.data_source for q in found] == ["nq", "hotpotqa"]


def test_search_r1_parquet_with_the_five_columns_alone(tmp_path):
    five = ("data_source", "prompt", "ability", "reward_model", "extra_info")
    rows = [{k: search_r1_row(i)[k] for k in five} for i in range(2)]
    found = load_questions(parquet(tmp_path / "train.parquet", rows)).rows
    assert [(q.id, q.text, q.golden_answers) for q in found] == [
        ("nq_test_0", "who 0?", ("x", "y")),
        ("nq_test_1", "who 1?", ("x", "y")),
    ]


def test_the_answers_that_search_r1_scores_by_come_first(tmp_path):
    target = {"style": "rule", "ground_truth": {"target": ["scored"]}}
    rows = [search_r1_row(0, reward_model=target), search_r1_row(1, reward_model=None)]
    found = load_questions(parquet(tmp_path / "q.parquet", rows)).rows
    assert [q.golden_answers for q in found] == [("scored",), ("x", "y")]


def test_a_parquet_file_as_pandas_writes_it(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "train.parquet"
    pandas.DataFrame([search_r1_row(0)]).to_parquet(path)
    back = pandas.read_parquet(path)
    assert type(back["golden_answers"][0]).__name__ == "ndarray"
    back.to_parquet(path)  # once more, from arrays
    assert load_questions(path).rows[0].golden_answers == ("x", "y")


def test_gzip_a_byte_order_mark_and_a_missing_last_newline(tmp_path):
    path = tmp_path / "q.jsonl.gz"
    path.write_bytes(
        gzip.compress(b"\xef\xbb\xbf" + json.dumps(GOOD | {"question": "où ?"}, ensure_ascii=False).encode())
    )
    assert load_questions(path).rows[0].text == "où ?"


BAD = [
    ('{"question": "who?"', "expected a JSON object"),
    ("[1]", "expected a JSON object, got a list"),
    (
        {"question": "who?"},
        "reward_model.ground_truth): a list of texts; it has none, its columns are question",
    ),
    ({"question": "who?", "golden_answers": []}, "a list of at least one text, got none"),
    ({"question": "who?", "golden_answers": [" "]}, "a list of at least one text, got none"),
    (
        {"question": "who?", "golden_answers": [True]},
        '`golden_answers` is true; expected a text, such as "yes"',
    ),
    ({"question": "who?", "golden_answers": [float("nan")]}, "`golden_answers` is nan, which is no number"),
    ({"question": "who?", "golden_answers": {"a": 1}}, "a list of texts, got an object with a"),
    ({"question": "who?", "golden_answers": "['Rome', 'Roma]"}, "a list written as text that can't be read"),
    ({"question": " ", "golden_answers": ["x"]}, "expected `question`: a text"),
    ({"golden_answers": ["x"]}, "expected `question`: a text"),
    ({**GOOD, "data_source": 3}, "expected `data_source`: a text, got a number"),
    ({**GOOD, "prompt": [{"role": "system", "content": "be brief"}]}, "expected `prompt`: one user turn"),
    (
        {**GOOD, "prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        "one user turn",
    ),
    ({**GOOD, "answerable": False}, "is marked as not answerable"),
    ({"question": "who?", "reward_model": {"ground_truth": {"target": []}}}, "at least one text, got none"),
    ({"question": "who?", "reward_model": {"ground_truth": {"target": [" "]}}}, "at least one text"),
]


@pytest.mark.parametrize(("row", "says"), BAD)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, row, says):
    path = jsonl(tmp_path / "q.jsonl", GOOD, "", row)
    with pytest.raises(UserError) as e:
        load_questions(path)
    assert str(e.value).startswith(f"{path}, line 3: ")
    assert says in str(e.value)
    assert "\n" not in str(e.value)
    assert e.value.exit_code == 2


@pytest.mark.parametrize(("row", "says"), BAD)
def test_malformed_rows_are_left_out_and_counted_on_request(tmp_path, row, says):
    found = load_questions(jsonl(tmp_path / "q.jsonl", row, GOOD, row), skip_bad=True)
    assert ([q.id for q in found.rows], found.skipped) == (["a"], 2)


def test_a_line_that_is_no_utf8_is_named(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"question": "caf\xe9", "golden_answers": ["x"]}\n')
    with pytest.raises(UserError, match=r"q\.jsonl, line 2: not UTF-8 text; save the file as UTF-8"):
        load_questions(path)


def test_a_parquet_row_without_answers_is_named(tmp_path):
    path = parquet(tmp_path / "q.parquet", [search_r1_row(0), search_r1_row(1, target=())])
    with pytest.raises(
        UserError,
        match=r"q\.parquet, row 2: expected `golden_answers`: a list of at least one text, got none",
    ):
        load_questions(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("q.jsonl", b"", "empty; expected at least one question"),
        ("q.jsonl", b"\n \n", "empty; expected at least one question"),
        ("q.jsonl", b"{}\n[]\n", "none of its 2 rows is good; the first: "),
        ("q.parquet", b"PAR1 no", "not a readable parquet file"),
        ("q.parquet", b"", "empty; expected at least one question"),
        ("q.jsonl.gz", b"not gzip", "neither JSON, CSV, TSV, Parquet nor Arrow: it begins with 'not gzip'"),
        ("q.csv", b"a,b", "empty; expected at least one question"),
        ("q.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-9], "damaged gzip file: "),
    ],
)
def test_a_file_with_nothing_in_it_is_refused(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as e:
        load_questions(path, skip_bad=True)
    assert str(e.value).startswith(str(path))
    assert says in str(e.value)
    assert "\n" not in str(e.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises(UserError, match="no such file or folder; expected questions as JSON Lines"):
            load_questions(tmp_path / name)
    with pytest.raises(UserError, match=r"folder\.jsonl: a folder without data files"):
        load_questions(tmp_path / "folder.jsonl")


def test_a_parquet_file_of_another_kind_is_told_by_its_columns(tmp_path):
    path = parquet(tmp_path / "q.parquet", [{"text": "a", "label": 1}])
    with pytest.raises(
        UserError,
        match=r"row 1: these are columns of a corpus, not of questions: text, label; a corpus goes to "
        r"retriever\.corpus or .* columns of other names are given by --question-key COLUMN "
        r"--answer-key COLUMN",
    ):
        load_questions(path)
    empty = pa.table(
        {"question": pa.array([], pa.string()), "golden_answers": pa.array([], pa.list_(pa.string()))}
    )
    pq.write_table(empty, path)
    with pytest.raises(UserError, match="empty"):
        load_questions(path)


def test_validate_counts_each_source_and_lists_what_is_wrong(tmp_path):
    path = jsonl(tmp_path / "q.jsonl", GOOD, {**GOOD, "data_source": "popqa"}, {"question": "who?"}, GOOD)
    report = validate(path)
    assert dict(report.sources) == {"nq": 2, "popqa": 1}
    assert (report.good, len(report.problems)) == (3, 1)
    assert report.problems[0].startswith(f"{path}, line 3: ")


def same(a, b):
    return [(q.id, q.text, q.golden_answers, q.data_source) for q in a] == [
        (q.id, q.text, q.golden_answers, q.data_source) for q in b
    ]


def test_jsonl_to_parquet_gives_search_r1s_columns_and_prompt(tmp_path):
    source = jsonl(
        tmp_path / "q.jsonl",
        {**GOOD, "question": "who", "metadata": {}, "hops": 2, "support_docs": ["1", "2"]},
        GOOD,
    )
    convert(source, tmp_path / "q.parquet")
    table = pq.read_table(tmp_path / "q.parquet")
    row = table.to_pylist()[0]
    assert table.column_names[:5] == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": ["x", "y"]}}
    assert row["extra_info"] == {"split": "train", "index": 0}
    assert [turn["role"] for turn in row["prompt"]] == ["user"]
    assert row["prompt"][0]["content"].startswith(
        "Answer the given question. You must conduct reasoning inside <think>"
    )
    assert row["prompt"][0]["content"].endswith("For example, <answer> Beijing </answer>. Question: who?\n")
    assert (row["metadata"], row["hops"], row["support_docs"]) == ("{}", 2, ["1", "2"])
    assert same(load_questions(source).rows, load_questions(tmp_path / "q.parquet").rows)


def test_parquet_to_jsonl_and_back_loses_nothing(tmp_path):
    source = parquet(
        tmp_path / "q.parquet", [search_r1_row(i, s) for s in ("nq", "musique") for i in range(3)]
    )
    convert(source, tmp_path / "q.jsonl.gz")
    convert(tmp_path / "q.jsonl.gz", tmp_path / "again.parquet")
    assert load_questions(source).rows == load_questions(tmp_path / "again.parquet").rows
    assert pq.read_table(tmp_path / "again.parquet").to_pylist()[0]["metadata"] == {
        "context": ["long"],
        "type": "bridge",
    }
    first = json.loads(gzip.decompress((tmp_path / "q.jsonl.gz").read_bytes()).splitlines()[0])
    assert list(first)[:3] == ["id", "question", "golden_answers"]
    assert first["prompt"] == [{"role": "user", "content": "Answer the given question. Question: who 0?\n"}]


def test_a_prompt_that_the_template_writes_is_left_out_of_jsonl(tmp_path):
    convert(jsonl(tmp_path / "a.jsonl", GOOD), tmp_path / "a.parquet")
    convert(tmp_path / "a.parquet", tmp_path / "b.jsonl")
    assert json.loads((tmp_path / "b.jsonl").read_text()) == GOOD


def test_a_failed_conversion_leaves_the_old_file(tmp_path):
    source, target = jsonl(tmp_path / "q.jsonl", GOOD, {}), jsonl(tmp_path / "out.jsonl", "old")
    with pytest.raises(UserError, match=r"q\.jsonl, line 2"):
        convert(source, target)
    with pytest.raises(UserError, match="is the source itself"):
        convert(source, source)
    with pytest.raises(UserError, match="unknown kind"):
        convert(source, tmp_path / "out.csv")
    assert target.read_text() == "old\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "q.jsonl"]
    assert convert(source, target, skip_bad=True).skipped == 1


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize("place", ["{}/folder", "/proc/x", "{}/file/x", "{}/" + "n" * 250])
def test_a_path_that_nothing_can_be_written_to_is_the_users_mistake(tmp_path, capsys, place, ending):
    source = jsonl(tmp_path / "q.jsonl", GOOD)
    (tmp_path / f"folder{ending}").mkdir()
    (tmp_path / "file").touch()
    target = place.format(tmp_path) + ending
    with pytest.raises(SystemExit) as e:
        main(["data", "convert", str(source), target])
    (line,) = capsys.readouterr().err.splitlines()
    assert e.value.code == 2 and f"{target}: " in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", f"folder{ending}", "q.jsonl"]


def test_the_commands_print_counts_and_exit_with_2_on_a_malformed_row(tmp_path, capsys):
    good = jsonl(tmp_path / "good.jsonl", GOOD, {**GOOD, "data_source": "2wikimultihopqa"})
    bad = jsonl(tmp_path / "bad.jsonl", GOOD, {"question": "who?"})
    with pytest.raises(SystemExit) as e:
        main(["data", "validate", str(good)])
    out = capsys.readouterr().out
    assert e.value.code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["2wikimultihopqa", "1"],
        ["nq", "1"],
        ["total", "2"],
    ]
    with pytest.raises(SystemExit) as e:
        main(["data", "validate", str(bad)])
    out, err = capsys.readouterr()
    reason = (
        "expected `golden_answers` (or answers, answer, possible_answers, ground_truth, "
        "reward_model.ground_truth): "
    )
    reason += "a list of texts; it has none, its columns are question"
    assert (e.value.code, err) == (2, f"unspiral: {bad}: 1 of 2 rows are malformed\n")
    assert f"{bad}, line 2: {reason}\n" in out
    with pytest.raises(SystemExit) as e:
        main(["data", "convert", str(bad), str(tmp_path / "x.parquet"), "--skip-bad"])
    assert e.value.code == 0
    assert capsys.readouterr().out.startswith("1 question written to ")
