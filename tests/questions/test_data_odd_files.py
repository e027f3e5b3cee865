"""Files that a newcomer gives as data: a table of one column, a workbook of Excel, a pipe."""

import os
import zipfile

import pytest
from command_line import run  # noqa: F401


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("header", ["contents", '"Text"', "\N{BYTE ORDER MARK}passage"])
def test_a_table_of_one_column_is_a_text_a_line_with_commas_or_not(run, tmp_path, header):
    text = f'{header}\nAnna, of Rome; kept it.\n"Bob said ""no"", twice"\n\nCarla\n'
    (tmp_path / "c.csv").write_text(text, encoding="utf-8")
    status, out, err = run("data", "validate", "c.csv")
    assert (status, err) == (0, "") and out.startswith("c.csv: a corpus of 3 passages\n")
    assert run("index", "build", "c.csv", "-o", "i")[0] == 0
    assert 'Bob said "no", twice' in run("index", "search", "i", "twice")[1]
    assert "Anna, of Rome; kept it." in run("index", "search", "i", "Rome")[1]


def test_a_table_of_one_column_with_another_name_says_which_name_is_read(run, tmp_path):
    (tmp_path / "c.csv").write_text("Story\nAnna kept it.\n")
    status, _, err = run("data", "validate", "c.csv")
    says = "; a table of one column, one text a line, is read where its first line is `contents`\n"
    assert status == 2 and "it begins with 'Story'" in err and err.endswith(says)
    (tmp_path / "c.csv").write_text("question\nwho?\n")
    assert "it has none, its columns are question" in run("data", "validate", "c.csv")[2]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["[Content_Types].xml", "xl/workbook.xml"], "an Excel workbook (.xlsx); save its sheet as CSV"),
        (["rows.csv"], "a zip archive; unpack it and give the folder"),
    ],
)
@pytest.mark.parametrize("command", [("data", "validate", "x"), ("index", "build", "x", "-o", "i")])
def test_a_workbook_is_told_from_an_archive(run, tmp_path, names, says, command):
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        for name in names:
            archive.writestr(name, "<xml/>")
    status, _, err = run(*command)
    assert status == 2 and err.startswith(f"unspiral: x: {says}")


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"\xd0\xcf\x11\xe0\xa1\xb1", "an Excel workbook of the old kind (.xls); save its sheet as CSV"),
        (b"%PDF-1.7\n", "a PDF; convert it to text first"),
    ],
)
def test_other_kinds_of_file_are_named(run, tmp_path, head, says):
    (tmp_path / "x").write_bytes(head + bytes(range(200)))
    status, _, err = run("data", "validate", "x")
    assert status == 2 and err.startswith(f"unspiral: x: {says}")


@pytest.mark.parametrize(
    "command",
    [
        ("data", "validate", "{}"),
        ("data", "convert", "{}", "o.jsonl"),
        ("data", "passages", "{}", "o.jsonl"),
        ("index", "build", "{}", "-o", "i"),
    ],
)
@pytest.mark.parametrize("given", ["-", "pipe"])
def test_a_pipe_is_told_as_one(run, tmp_path, command, given):
    os.mkfifo(tmp_path / "pipe")
    status, _, err = run(*(word.format(given) for word in command))
    assert status == 2 and err == (
        f"unspiral: {given}: a pipe or a device, which can be read once; data are read more than once, so "
        "write them to a file first\n"
    )


def test_a_message_has_the_name_of_the_users_own_column(run, tmp_path):
    (tmp_path / "c.csv").write_text("Nr;Story\n1;Anna kept it.\n2;\n;Bob kept it.\n")
    keys = ("--text-key", "Story", "--id-key", "Nr")
    assert run("data", "validate", "c.csv", *keys)[1].splitlines()[:2] == [
        "c.csv, line 3: `Story` is empty",
        "c.csv, line 4: no id; its place names it 'row_2'",
    ]
    status, _, err = run("index", "build", "c.csv", "-o", "i", *keys)
    assert status == 2 and err.startswith(
        "unspiral: c.csv, line 3: `Story` is empty; 1 of its 3 rows is malf"
    )


def test_two_reasons_are_told_by_the_first_row_and_rows_are_no_documents(run, tmp_path):
    (tmp_path / "q.csv").write_text("question,answers\nwho?,\n,Ada\nwhere?,here\n")
    says = (
        "unspiral: q.csv: 2 of 3 rows are malformed; the first: q.csv, line 2: `answers` is empty; expected"
    )
    assert run("data", "validate", "q.csv")[2] == f"{says} an answer\n"
    (tmp_path / "c.csv").write_text("id,text\n1,Anna kept it.\n")
    assert run("data", "passages", "c.csv", "o.jsonl")[1].startswith("1 passage of 1 row written to o.jsonl:")
