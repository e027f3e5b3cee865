"""`data validate`: a long reason, such as one that lists columns, is told once and the rows by their
places."""

import pytest

from trainer.commands.cli import main

REASON = (
    "expected `question` (or query, problem, prompt, ...) and `golden_answers` (or answers, answer, ...); "
)


def validated(capsys, file):
    with pytest.raises(SystemExit) as ended:
        main(["data", "validate", str(file)])
    return ended.value.code, *capsys.readouterr()


def test_a_file_whose_columns_have_other_names_is_told_so_once_with_its_rows(tmp_path, capsys):
    file = tmp_path / "corpus.csv"
    file.write_text("No,Headline,Story\n" + "".join(f"{n},title,a story\n" for n in range(4)))
    status, out, err = validated(capsys, file)
    assert (status, out) == (2, "total         0\n")
    assert err.count(REASON) == 1 and err.startswith(
        f"unspiral: {file}: 4 of 4 rows are malformed: {REASON}it has neither, its columns are "
        "No, Headline, Story; "
    )


def test_some_rows_with_one_long_reason_are_told_by_their_places(tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    good = '{"question": "who?", "golden_answers": ["a"]}\n'
    file.write_text(good + '{"Ask": 1}\n' * 2 + good.replace("who", "when") + '{"Other": 2, "More": 3}\n' * 2)
    status, out, err = validated(capsys, file)
    lines = out.splitlines()
    assert status == 2 and err.count(REASON) == 1 and "its columns are Ask;" in err
    assert lines[:2] == [f"{file}, line {n}: malformed, as the last line says" for n in (2, 3)]
    assert lines[2].startswith(f"{file}, line 5: {REASON}it has neither, its columns are Other, More;")
    assert lines[3] == f"{file}, line 6: the same"


def test_short_reasons_stay_beside_their_rows(tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "who?", "golden_answers": ["a"]}\n[1]\n[2]\n')
    _, out, err = validated(capsys, file)
    reason = err.rpartition("are malformed: ")[2].strip()
    assert reason and out.splitlines()[:2] == [f"{file}, line {n}: {reason}" for n in (2, 3)]
