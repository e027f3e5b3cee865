"""Cells of a table of one's own: blanks around a source or an id, TRUE as an answer, an id in two sources."""

import json

import pytest

from services.common.errors import UserError
from trainer.commands.cli import main
from trainer.data.columns import Keys, question_of


@pytest.mark.parametrize(
    ("cells", "kept"),
    [
        ({"id": " 7 ", "data_source": " paris"}, ("7", "paris")),
        ({"id": "7\u00a0", "data_source": "paris\t"}, ("7", "paris")),
        ({"id": "a 7", "data_source": "new york"}, ("a 7", "new york")),
        ({"id": "  ", "data_source": "  "}, ("quiz_row_4", "quiz")),
    ],
)
def test_blanks_around_a_source_and_an_id_do_not_count(cells, kept):
    question = question_of({"question": "where?", "answer": "here", **cells}, 4, "quiz").question
    assert (question.id, question.data_source) == kept


def test_blanks_around_a_named_source_and_id_do_not_count():
    keys = Keys(source="Herkunft", id="Nr")
    row = keys.applied({"question": "where?", "answer": "here", "Nr": " 7", "Herkunft": "paris "})
    question = question_of(row, 4, "quiz").question
    assert (question.id, question.data_source) == ("7", "paris")


def test_true_in_a_table_is_a_text_and_a_boolean_is_refused():
    found = question_of({"question": "is it so?", "answer": "TRUE"}, 0, "quiz")
    assert found.question.golden_answers == ("TRUE",)
    with pytest.raises(UserError):
        question_of({"question": "is it so?", "answer": True}, 0, "quiz")


def test_an_id_that_stands_twice_is_told_within_a_source_only(tmp_path, capsys):
    file = tmp_path / "quiz.csv"
    file.write_text(
        "id,question,answer,data_source\n1,what is a?,x,paris\n1,what is b?,y, paris\n1,what is c?,z,navy\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["data", "validate", str(file), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert told["same_ids"] == [f"{file}, line 3: the id '1' is that of {file}, line 2 too"]
