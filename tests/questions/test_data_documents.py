"""`unspiral data passages`: documents of one's own become a corpus that is indexed and searched."""

import json
import tracemalloc

import pytest
from command_line import run  # noqa: F401

from trainer.data.corpora.documents import sections_of
from trainer.data.corpora.taken import Taken

PUMP = """---
author: somebody
---
# The T7 pump

It is made by Alder Works.

## Power

It needs 24 volts.
One line more.

```sh
# no heading
```

## Places

"""
LONG = " ".join(f"Sentence {i} has five words." for i in range(30))


def rows(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    (folder / "more").mkdir(parents=True)
    (folder / "pump.md").write_text(PUMP)
    (folder / "more" / "café.txt").write_bytes("Basin 4\r\n\r\nholds  two\tpumps.".encode("utf-16"))
    (folder / "blank.txt").write_text(" \n\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.md").write_text("secret")
    return folder


def test_a_folder_of_documents_becomes_passages_below_their_headings(notes, tmp_path, run):
    out = tmp_path / "corpus.jsonl"
    status, said, err = run("data", "passages", str(notes), str(out))
    assert (status, err) == (0, "")
    assert said.splitlines() == [
        f"{notes / 'blank.txt'}: no text",
        f"{notes / 'picture.png'}: left out, no document (.md, .rst, .txt)",
        f"3 passages of 3 documents written to {out}: 6 words at the median, 12 at most",
    ]
    assert rows(out) == [
        {"id": "more/café.txt", "contents": '"café"\nBasin 4\nholds two pumps.', "source": "more/café.txt"},
        {"id": "pump.md#0", "contents": '"The T7 pump"\nIt is made by Alder Works.', "source": "pump.md"},
        {
            "id": "pump.md#1",
            "contents": '"The T7 pump, Power"\nIt needs 24 volts. One line more.\n```sh # no heading ```',
            "source": "pump.md",
        },
    ]
    assert run("index", "build", "--corpus", str(out), "--out", str(tmp_path / "i"))[0] == 0
    status, said, _ = run("index", "search", "--index", str(tmp_path / "i"), "which works makes the pump")
    assert status == 0 and said.startswith('1. "The T7 pump"  (id pump.md#0')


def test_a_passage_has_whole_paragraphs_or_whole_sentences_as_far_as_they_fit(tmp_path, run):
    text = tmp_path / "long.txt"
    text.write_text(f"{LONG}\n\nA short one.\n\n{'word ' * 130}")
    out = tmp_path / "corpus.jsonl"
    status, said, _ = run("data", "passages", str(text), str(out), "--words", "52")
    assert status == 0 and "52 at most" in said
    found = [row["contents"].split("\n", 1)[1] for row in rows(out)]
    sizes = [len(text.split()) for text in found]
    assert sizes == [50, 50, 50, 3, 52, 52, 26]
    assert found[0].startswith("Sentence 0") and found[0].endswith("Sentence 9 has five words.")
    assert " ".join(found).split() == text.read_text().split(), "no word is lost, and none comes twice"


def test_rows_are_cut_too_and_keep_their_other_columns(tmp_path, run):
    table = tmp_path / "pumps.tsv"
    table.write_text("title\ttext\tyear\nT7\tMade by Alder Works.\t1999\n\tIn basin 4.\t\n")
    out = tmp_path / "corpus.jsonl"
    assert run("data", "passages", str(table), str(out))[0] == 0
    assert rows(out) == [
        {"id": "pumps_0", "contents": '"T7"\nMade by Alder Works.', "year": "1999"},
        {"id": "pumps_1", "contents": "In basin 4."},
    ]
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"_id": 7, "body": LONG, "url": "https://example.org"}) + "\n")
    assert run("data", "passages", str(own), str(out), "--words", "100", "--overwrite")[0] == 0
    assert [(row["id"], row["url"]) for row in rows(out)] == [
        ("7#0", "https://example.org"),
        ("7#1", "https://example.org"),
    ]


def test_what_cannot_be_read_is_named_and_nothing_is_written(notes, tmp_path, run):
    out = tmp_path / "corpus.jsonl"
    for source, name, said in (
        (b"caf\xe9", "latin.txt", "latin.txt, line 1: not UTF-8 text; save the file as UTF-8"),
        (b'{"id": 1, "title": "x"}\n', "x.jsonl", "line 1: no text; expected one of contents, content, text"),
        (b"", "empty.md", "empty.md: holds no text; expected documents (.markdown, .md, .rst"),
    ):
        file = tmp_path / name
        file.write_bytes(source)
        status, _, err = run("data", "passages", str(file), str(out))
        assert status == 2 and said in err, err
    for to, said in ((notes / "c.jsonl", "lies in the folder"), (tmp_path / "latin.txt", "is the source")):
        source = notes if to.parent == notes else to
        status, _, err = run("data", "passages", str(source), str(to))
        assert status == 2 and said in err
    assert run("data", "passages", str(tmp_path / "none"), str(out))[0] == 2
    assert not out.exists() and list(tmp_path.glob(".*tmp")) == []
    status, _, err = run("index", "build", "--corpus", str(notes), "--out", str(tmp_path / "i"))
    assert status == 2 and "`unspiral data passages` makes a corpus of its documents" in err


def test_a_folder_of_rows_with_a_readme_is_not_taken_for_its_readme(tmp_path, run):
    folder = tmp_path / "wiki"
    folder.mkdir()
    (folder / "README.md").write_text("Where the rows come from.")
    out = tmp_path / "corpus.jsonl"
    row = '{"id": "0", "contents": "Alder Works makes it."}'
    for name, text in (
        ("part-0.jsonl", row),
        ("a.csv", "id,text\n0,Alder Works makes it.\n"),
        ("b.json", f"[{row}]"),
    ):
        file = folder / name
        file.write_text(text)
        status, said, _ = run("data", "passages", str(folder), str(out))
        assert status == 0 and f"{folder / 'README.md'}: left out, no data file" in said
        assert rows(out) == [{"id": "0", "contents": "Alder Works makes it."}]
        (folder / "notes.md").write_text("Something else.")
        out.unlink()
        status, _, err = run("data", "passages", str(folder), str(out))
        assert (
            status == 2 and f"{folder}: holds both documents (README.md and 1 more) and rows ({name})" in err
        )
        assert "give the file itself" in err and not out.exists()
        (folder / "notes.md").unlink()
        file.unlink()
    (folder / "package.json").write_text('{"name": "docs"}')
    assert run("data", "passages", str(folder), str(out))[0] == 0, "a tool's setting is no rows"


def test_rows_with_the_same_id_get_ids_of_their_own(tmp_path, run):
    corpus = tmp_path / "dup.jsonl"
    given = [("1", "a b"), ("1", LONG), ("dup_3", "c"), ("1", "d"), ("2#0", "e"), ("2", LONG)]
    corpus.write_text("".join(json.dumps({"id": id, "text": text}) + "\n" for id, text in given))
    out = tmp_path / "dup2.jsonl"
    status, said, _ = run("data", "passages", str(corpus), str(out))
    assert status == 0 and f"{corpus}, line 2: the id '1' stands before; now 'dup_1'\n" in said
    assert "3 rows have the id of an earlier one" in said
    ids = [row["id"] for row in rows(out)]
    assert ids == ["1", "dup_1#0", "dup_1#1", "dup_3", "dup_3_2", "2#0", "dup_5#0", "dup_5#1"]
    assert run("index", "build", "--corpus", str(out), "--out", str(tmp_path / "i"))[0] == 0


def test_the_ids_of_a_large_corpus_take_few_bytes_each():
    tracemalloc.start()
    try:
        taken = Taken()
        for i in range(30_000):
            taken.add(f"document_{i}")
            taken.add(f"document_{i // 2}")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 24 * 30_000
    assert all(f"document_{i}" in taken for i in range(30_000))
    assert not any(f"document_{i}" in taken for i in range(30_000, 60_000))


def test_what_cannot_be_read_is_left_out_with_skip_bad_and_counted(notes, tmp_path, run):
    (notes / "more" / "latin one.md").write_bytes(b"caf\xe9")
    out = tmp_path / "corpus.jsonl"
    status, _, err = run("data", "passages", str(notes), str(out))
    mend = f"iconv -f latin1 -t utf-8 '{notes}/more/latin one.md' > NEW"
    assert status == 2 and mend in err and "--skip-bad" in err and not out.exists()
    assert "; 1 of its 4 documents is malformed: --skip-bad leaves it out" in err
    status, _, err = run("data", "passages", str(notes), str(out), "--skip-bad")
    assert status == 0 and mend in err and "1 document was left out, malformed:" in err
    assert len(rows(out)) == 3
    table = tmp_path / "rows.jsonl"
    table.write_text('{"id": 1, "year": 1999}\n{"id": 2, "text": "In basin 4."}\n{broken\n')
    status, _, err = run("data", "passages", str(table), str(out), "--overwrite")
    assert status == 2 and "; 2 of its 3 rows are malformed: --skip-bad leaves these 2 out" in err
    status, _, err = run("data", "passages", str(table), str(out), "--skip-bad", "--overwrite")
    assert status == 0 and [row["id"] for row in rows(out)] == ["2"]
    said = err.splitlines()
    assert said[0] == "2 rows were left out, malformed:"
    assert [line.split(":")[0] for line in said[1:]] == [f"{table}, line 1", f"{table}, line 3"]


def test_a_passage_in_the_form_of_search_r1_gives_its_title_to_all_that_is_made_of_it(tmp_path, run):
    corpus = tmp_path / "wiki.jsonl"
    made = [f'"Alder "Works" (firm)"\n{LONG}', '"Only a title"', "No title\nat all."]
    corpus.write_text("".join(json.dumps({"id": i, "contents": c}) + "\n" for i, c in enumerate(made)))
    out = tmp_path / "corpus.jsonl"
    assert run("data", "passages", str(corpus), str(out), "--words", "100")[0] == 0
    half = LONG.index("Sentence 20")
    assert [(row["id"], row["contents"]) for row in rows(out)] == [
        ("0#0", f'"Alder "Works" (firm)"\n{LONG[:half].strip()}'),
        ("0#1", f'"Alder "Works" (firm)"\n{LONG[half:]}'),
        ("1", '"Only a title"'),
        ("2", "No title at all."),
    ]


@pytest.mark.parametrize("text", [{"text": " "}, {"Text": None}])
def test_a_row_whose_text_is_empty_is_named_and_the_others_are_written(tmp_path, run, text):
    corpus = tmp_path / "notes.jsonl"
    corpus.write_text(json.dumps({"id": "a", **text}) + '\n{"id": "b", "text": "In basin 4."}\n')
    out = tmp_path / "corpus.jsonl"
    status, said, err = run("data", "passages", str(corpus), str(out))
    assert (status, err) == (0, "") and said.startswith(f"{corpus}, line 1: no text\n1 passage")
    assert rows(out) == [{"id": "b", "contents": "In basin 4."}]


def test_a_document_without_a_title_has_its_names_and_a_second_heading_is_a_section():
    assert [s.title for s in sections_of("Text.\n# One\nMore.", "name")] == ["name", "name, One"]
    assert [s.title for s in sections_of("# One\n# One\nText.", "name")] == ["One"]


@pytest.mark.parametrize("form", ["tsv", "jsonl", "json"])
def test_a_corpus_without_a_column_for_ids_is_numbered(tmp_path, run, form):
    corpus = tmp_path / f"pumps.{form}"
    made = [{"title": f"T{i}", "text": f"Made by works number {i}."} for i in range(3)]
    if form == "tsv":
        corpus.write_text("title\ttext\n" + "".join(f"{r['title']}\t{r['text']}\n" for r in made))
    elif form == "json":
        corpus.write_text(json.dumps(made))
    else:
        corpus.write_text("".join(json.dumps(r) + "\n" for r in made))
    said = run("data", "validate", str(corpus))[1].splitlines()
    assert said[-2] == f"{corpus}: a corpus of 3 passages"
    assert "no ids and are numbered from 0" in said[-1] and "--question-key" in said[-1]
    index = str(tmp_path / "i")
    assert run("index", "build", "--corpus", str(corpus), "--out", index)[0] == 0
    status, said, _ = run("index", "search", "--index", index, "T2 works")
    assert status == 0 and said.startswith('1. "T2"  (id 2, ')


def test_only_a_corpus_whose_first_row_has_no_id_is_numbered(tmp_path, run):
    corpus = tmp_path / "mixed.jsonl"
    corpus.write_text('{"text": "a"}\n{"id": "0", "text": "b"}\n')
    status, _, err = run("index", "build", "--corpus", str(corpus), "--out", str(tmp_path / "i"))
    assert status == 2 and "0" in err and "id" in err, "the number of the one is the id of the other"
    corpus.write_text('{"id": "0", "text": "b"}\n{"text": "a"}\n')
    status, _, err = run("index", "build", "--corpus", str(corpus), "--out", str(tmp_path / "i"))
    assert status == 0 and "mixed.jsonl, line 2: no id; its place names it 'row_1'" in err


def test_numbers_of_rows_are_those_of_their_lines_and_come_to_a_broken_first_line_too(tmp_path, run):
    corpus = tmp_path / "blank.jsonl"
    corpus.write_text('{"text": "a"}\n\n{"text": "b", "id": "2"}\n')
    assert run("data", "validate", str(corpus))[0] == 0
    corpus.write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": "c", "id": "2"}\n')
    assert run("data", "validate", str(corpus))[0] == 2
    status, _, err = run("index", "build", "--corpus", str(corpus), "--out", str(tmp_path / "i"))
    assert status == 2 and "id '2'" in err
    corpus.write_text('{broken\n{"text": "b"}\n')
    out = str(tmp_path / "j")
    status, said, err = run("index", "build", "--skip-bad", "--corpus", str(corpus), "--out", out)
    assert status == 0 and "1 passage" in said + err


def test_rows_without_ids_are_not_added_to_an_index(tmp_path, run):
    first = tmp_path / "first.jsonl"
    first.write_text('{"text": "old stone bridge"}\n')
    index = str(tmp_path / "i")
    made = run("index", "build", "--corpus", str(first), "--out", index, "--postings", "packed")
    assert made[0] == 0, made
    second = tmp_path / "second.jsonl"
    second.write_text('{"text": "new iron bridge"}\n')
    status, _, err = run("index", "add", index, "--corpus", str(second))
    assert status == 2 and "its rows have no ids" in err and "data passages" in err, err
