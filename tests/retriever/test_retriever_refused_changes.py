"""A change of an index that is refused says what makes it possible, and leaves nothing beside the index."""

import shlex

import pytest
from command_line import run  # noqa: F401


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my corpus.csv").write_text("Nr,Story\n1,Anna kept the light.\n2,Bob kept it.\n3,\n")
    (tmp_path / "more.csv").write_text("Nr,Story\n4,Carla kept it.\n")
    return tmp_path


KEYS = ("--text-key", "Story", "--id-key", "Nr")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), ""),
        (
            ("--language", "german", "--no-stem", "--no-stop-words", "--k1", "1.2"),
            " --language german --no-stem --no-stop-words --k1 1.2",
        ),
    ],
)
def test_an_index_that_takes_no_additions_names_the_command_that_makes_it_one(run, corpora, options, told):
    build = ("index", "build", "my corpus.csv", "--out", "i", "--skip-bad", *KEYS, *options)
    assert run(*build)[0] == 0
    for change in (("add", "i", "more.csv"), ("delete", "i", "--id", "1"), ("merge", "i")):
        status, _, err = run("index", *change)
        assert status == 2 and "only bm25 indexes of packed postings" in err, err
        command = err.split("`")[1]
        assert command == (
            f"unspiral index build '{corpora}/my corpus.csv' --out i --postings packed --overwrite "
            f"--skip-bad --text-key Story --id-key Nr{told}"
        )
        assert sorted(path.name for path in corpora.iterdir()) == ["i", "more.csv", "my corpus.csv"]
    assert run(*shlex.split(command)[1:])[0] == 0
    status, out, err = run("index", "add", "i", "more.csv")
    assert status == 0 and out.startswith("i: 3 passages, bm25"), err
    assert "4" in run("index", "search", "i", "Carla")[1]


@pytest.mark.parametrize(
    "change",
    [
        ("add", "i", "nowhere.csv"),
        ("add", "i", "ids.csv"),
        ("add", "i", "my corpus.csv"),
        ("add", "i", "usual.csv"),
        ("delete", "i", "--id", "17"),
    ],
)
def test_what_is_refused_leaves_nothing_beside_the_index(run, corpora, change):
    (corpora / "ids.csv").write_text("Story,Place\nno ids,here\n")
    (corpora / "usual.csv").write_text("id,text\n8,Dirk kept it.\n")
    assert run("index", "build", "more.csv", "--out", "i", "--postings", "packed", *KEYS)[0] == 0
    before = sorted(path.name for path in corpora.iterdir())
    status, _, err = run("index", *change)
    assert status == 2
    if "usual.csv" in change:
        assert "usual.csv: has no column 'Story', the text key; its columns are id, text; an addition" in err
    assert sorted(path.name for path in corpora.iterdir()) == before


@pytest.mark.parametrize("words", [("i", "8", "9"), ("--index", "i", "8", "9"), ("i", "8", "--id", "9")])
def test_ids_to_delete_stand_alone_or_behind_their_option(run, corpora, words):
    (corpora / "some.csv").write_text("id,text\n7,Carla kept it.\n8,Dirk kept it.\n9,Else kept it.\n")
    assert run("index", "build", "some.csv", "--out", "i", "--postings", "packed")[0] == 0
    assert run("index", "delete", *words)[1].startswith("i: 1 passage, bm25")
    status, _, err = run("index", "delete", "i", "README.md")
    assert status == 2 and err.endswith("has no passage with the id 'README.md'; nothing was deleted\n")
    status, _, err = run("index", "delete", "i")
    assert status == 2 and "no id; expected `index delete INDEX ID`, or --ids FILE" in err
    assert run("index", "search", "i", " ") == (2, "", "unspiral: index search: the query is empty\n")


def test_the_help_says_how_such_an_index_is_made(run):
    for command in ("add", "delete"):
        said = " ".join(run("index", command, "--help")[1].split())
        assert "an index that was built with `--postings packed`" in said.replace("│ ", ""), said
