"""Every layout that docs/data.md shows, read as it says; and the same rows however a file holds them."""

import bz2
import gzip
import json
import lzma
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from places import ROOT

from retriever_service.index_folder.corpus import checksum, read_corpus
from retriever_service.indexing.build import build_index
from retriever_service.indexing.convert import read_questions
from services.common.errors import UserError
from trainer.commands.cli import main
from trainer.data import load_questions, validate
from trainer.data.lists_in_texts import list_in

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```(questions|corpus)-(\w+)\n(.*?)^```\n\n((?:    [^\n]*\n)+)", PAGE, re.M | re.S)
ROWS = [{"id": str(i), "question": f"où est {i} ?", "golden_answers": [f"là {i}", "ici"]} for i in range(3)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
READ = [(row["id"], row["question"], tuple(row["golden_answers"])) for row in ROWS]


def written(folder, kind, text):
    """An example as a file whose name says nothing of its layout."""
    path = folder / "questions"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([json.loads(line) for line in text.splitlines()]), path)
    else:
        path.write_text(text, encoding="utf-8")
    return path


def shown(question):
    prompt = "" if question.prompt is None else " (with its prompt)"
    if question.system is not None:
        prompt = f' (with its prompt, after "{question.system}")'
    return f"{question.id}: {question.text} -> {' | '.join(question.golden_answers)}{prompt}"


@pytest.mark.parametrize(("what", "kind", "text", "expected"), EXAMPLES, ids=lambda v: str(v)[:30])
def test_an_example_of_the_page_is_read_as_it_says(tmp_path, what, kind, text, expected):
    path = written(tmp_path, kind, text)
    if what == "questions":
        found = [shown(question) for question in load_questions(path).rows]
    else:
        found = [f"{passage.id}: {passage.contents.replace(chr(10), ' / ')}" for passage in read_corpus(path)]
    assert found == [line.strip() for line in expected.splitlines()]


def test_the_page_shows_an_example_of_each_kind():
    assert len(EXAMPLES) == PAGE.count("```questions-") + PAGE.count("```corpus-") >= 13
    assert {kind for _, kind, _, _ in EXAMPLES} == {"jsonl", "json", "csv", "tsv", "parquet"}


def held(path):
    return [(q.id, q.text, q.golden_answers) for q in load_questions(path).rows]


def test_the_same_rows_are_read_however_a_file_holds_them_and_whatever_it_is_called(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    files = {
        "plain.bin": LINES.encode(),
        "gzip.jsonl": gzip.compress(LINES.encode()),
        "zstd.jsonl": pa.compress(LINES.encode(), codec="zstd", asbytes=True),
        "bzip2.csv": bz2.compress(LINES.encode()),
        "xz.parquet": lzma.compress(LINES.encode()),
        "mark.json": b"\xef\xbb\xbf" + LINES.encode(),
        "utf16.jsonl": LINES.encode("utf-16"),
        "utf16-big.jsonl": b"\xfe\xff" + LINES.encode("utf-16-be"),
        "list.jsonl": json.dumps(ROWS).encode(),
        "pretty.jsonl": json.dumps(ROWS, indent=2).encode(),
        "object.jsonl": json.dumps({"version": 2, "rows": ROWS}).encode(),
        "pretty-object.txt.json": json.dumps({"version": 2, "rows": ROWS}, indent=1).encode("utf-16"),
        "one-after-the-other": "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
        "crlf": LINES.replace("\n", "\r\n").encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(table, tmp_path / "table.jsonl")
    with (
        pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    with pa.OSFile(str(tmp_path / "feather"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for path in sorted(tmp_path.iterdir()):
        assert held(path) == READ, path.name


def test_a_long_list_is_read_piece_by_piece_and_what_is_damaged_is_said(tmp_path):
    many = [row | {"id": str(i), "text": "x" * (i % 7) * 1000} for i, row in enumerate(ROWS * 200)]
    path = tmp_path / "q"
    path.write_text(json.dumps(many), encoding="utf-8")
    assert [q.id for q in load_questions(path).rows] == [str(i) for i in range(600)]
    for damage, says in (
        (json.dumps(many)[:-3], "damaged JSON"),
        (json.dumps(ROWS) + "{}", "something stands behind the end of its list"),
        ("[" + json.dumps(ROWS[0]), "it ends in the middle"),
    ):
        path.write_text(damage, encoding="utf-8")
        with pytest.raises(UserError, match=says):
            load_questions(path)
    path.write_text(json.dumps({"train": ROWS, "test": ROWS}), encoding="utf-8")
    with pytest.raises(UserError, match="several lists of rows"):
        load_questions(path)


def test_a_folder_is_read_whole_and_one_with_train_and_test_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".gitattributes").write_text("x")
    (tmp_path / "train-00000-of-00002.jsonl").write_text(LINES)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train-00001-of-00002.parquet")
    assert held(tmp_path) == READ * 2
    (tmp_path / "test.jsonl").write_text(LINES)
    with pytest.raises(UserError, match=r"questions to train on .* and held-out ones"):
        load_questions(tmp_path)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("['Frank Lowy']", ["Frank Lowy"]),
        ('["Rome", "Roma"]', ["Rome", "Roma"]),
        ("['Rome' 'Roma']", ["Rome", "Roma"]),
        ("['a\\'b', \"c\"]", ["a'b", "c"]),
        ("(\"a\", 'b')", ["a", "b"]),
        ("[1955, 2.5]", [1955, 2.5]),
        ("[citation needed]", None),
        ("[['a']]", ["a"]),
        ('[["a"], ["b"]]', ["a", "b"]),
        ('["a", null]', None),
        ("['a', b]", None),
        ("['a'", None),
    ],
)
def test_a_list_written_as_text(text, items):
    assert list_in(text) == items


def test_validate_says_from_which_columns_it_read_and_repeats_the_commonest_reason(tmp_path, capsys):
    path = tmp_path / "q.csv"
    lines = ["problem,answer,level", "who?,Rome,1", "where?,A,2", "when?,,3", "why?,,3", ",Lima,3"]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(SystemExit) as e:
        main(["data", "validate", str(path)])
    out, err = capsys.readouterr()
    assert e.value.code == 2
    assert f"{path}, line 4: `answer` is empty; expected an answer" in out
    assert (
        f"{path}, line 6: expected `question`: a text" in out
        and "its columns are problem, answer, level" in out
    )
    assert f"{path}, line 3: of the answer 'A' scoring by em, f1 and subem leaves nothing" in out
    assert "in 2 rows the question was read from `problem` and the answers from `answer`" in out
    reason = "`answer` is empty; expected an answer"
    assert err == f"unspiral: {path}: 3 of 5 rows are malformed, 2 of them: {reason}\n"
    assert len(validate(path).emptied) == 1


def test_a_corpus_in_a_folder_of_several_layouts_makes_the_index_of_one_file(tmp_path):
    rows = [{"id": str(i), "title": f"T{i}", "text": f"word{i} common"} for i in range(30)]
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(rows[:10]))
    (folder / "b.tsv").write_text(
        "id\ttext\ttitle\n" + "".join(f"{r['id']}\t{r['text']}\t{r['title']}\n" for r in rows[10:20])
    )
    pq.write_table(pa.Table.from_pylist(rows[20:]), folder / "more" / "c.parquet")
    single = tmp_path / "all.jsonl"
    single.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-16")
    assert [(p.id, p.contents) for p in read_corpus(folder)] == [
        (p.id, p.contents) for p in read_corpus(single)
    ]
    made, other = build_index(folder, tmp_path / "i"), build_index(single, tmp_path / "j")
    assert made.passages == 30 and made.corpus_sha256 == checksum(folder)
    assert made.files["documents.jsonl"] == other.files["documents.jsonl"]
    assert build_index(folder, tmp_path / "i") == made  # the same again is kept
    assert [p.id for p in read_corpus(folder, start=17)] == [str(i) for i in range(17, 30)]


def test_questions_to_measure_recall_with_are_records_or_lines(tmp_path):
    path = tmp_path / "q"
    path.write_text("Who, in 1990, was it?\n\nWhere?\n")
    assert read_questions(path, 10) == ["Who, in 1990, was it?", "Where?"]
    path.write_text("id,query\n1,who?\n2,where?\n")
    assert read_questions(path, 10) == ["who?", "where?"]
    path.write_text(LINES)
    assert read_questions(path, 2) == ["où est 0 ?", "où est 1 ?"]
