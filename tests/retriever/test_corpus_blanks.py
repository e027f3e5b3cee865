"""Blanks around a passage's id and title, as a table written with `, ` has them, do not count."""

from __future__ import annotations

import json

from retriever_service.index_folder.corpus import read_corpus

TABLE = "id; title; text\n 1; Paris ;a city of light\n2\u00a0;\tRome; of seven hills\n"


def test_of_a_table_and_of_lines(tmp_path):
    table, lines = tmp_path / "c.csv", tmp_path / "c.jsonl"
    table.write_text(TABLE)
    lines.write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in (
                {"id": " 1", "title": " Paris ", "text": "a city of light"},
                {"id": "2", "title": "\tRome", "text": " of seven hills"},
            )
        )
    )
    expected = [("1", '"Paris"\na city of light'), ("2", '"Rome"\n of seven hills')]
    for file in (table, lines):
        assert [(passage.id, passage.contents) for passage in read_corpus(file)] == expected


def test_contents_in_the_papers_form_stay_as_they_are(tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"id": "1", "contents": '" Paris"\n a city '}) + "\n")
    assert [passage.contents for passage in read_corpus(file)] == ['" Paris"\n a city ']


def test_ids_that_differ_by_blanks_are_one_and_blanks_alone_are_none(tmp_path):
    file = tmp_path / "c.csv"
    file.write_text("id,text\n1,a\n1 ,b\n")
    assert [passage.id for passage in read_corpus(file)] == ["1", "1"]
    file = tmp_path / "d.jsonl"
    file.write_text('{"id": "1", "text": "a"}\n{"id": "  ", "text": "b"}\n')
    assert [(passage.id, passage.placed) for passage in read_corpus(file)] == [("1", False), ("row_1", True)]
