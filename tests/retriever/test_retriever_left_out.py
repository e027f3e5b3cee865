"""Lines that `index build --skip-bad` leaves out: how many of them are shown, and what their file expects."""

import pytest

from retriever_service.index_folder.corpus import read_corpus
from services.common.errors import UserError
from trainer.commands.cli import main

LEFT_OUT = "left out, malformed or with the id of an earlier one, which is kept"


def built(capsys, corpus):
    with pytest.raises(SystemExit) as ended:
        main(["index", "build", "--corpus", str(corpus), "--out", f"{corpus}.index", "--skip-bad"])
    return ended.value.code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("bad", "says"), [(2, ":"), (3, ":"), (4, "; the first 3:")])
def test_the_heading_counts_what_it_shows(tmp_path, capsys, bad, says):
    corpus = tmp_path / "c.csv"
    corpus.write_text("id,title,text\n1,a,bridge\n" + "".join(f"{n},b,\n" for n in range(2, 2 + bad)))
    status, (heading, *shown) = built(capsys, corpus)
    assert (status, heading) == (0, f"{bad} lines were {LEFT_OUT}{says}")
    assert shown == [
        f"{corpus}, line {n}: `text` is empty; expected a row with an id and a text, such as the columns id, "
        "title, text"
        for n in range(3, 3 + min(bad, 3))
    ]


def test_a_file_of_json_is_told_of_json(tmp_path, capsys):
    expected = 'expected {"id": "0", "contents": "\\"Title\\"\\ntext"}'
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"id": "1", "contents": "bridge"}\n{"id": "2"}\n')
    status, (heading, shown) = built(capsys, lines)
    assert (status, heading) == (0, f"1 line was {LEFT_OUT}:") and shown.endswith(expected)
    whole = tmp_path / "c.json"
    whole.write_text('[{"id": "1", "contents": "bridge"}, {"id": "2"}]')
    with pytest.raises(UserError) as told:
        list(read_corpus(whole))
    assert expected in str(told.value)
