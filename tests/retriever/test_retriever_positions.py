"""INDEX, CORPUS and QUERY stand alone or behind their options, in every command of an index."""

import json

import pytest
from command_line import fresh_folder, run  # noqa: F401

from retriever_service.index_folder.description import read_info


@pytest.fixture
def corpora(tmp_path):
    for name, rows in (("a", (0, 1)), ("b", (2,)), ("c", (3,)), ("d", (4,))):
        lines = [
            f'{{"id": "{n}", "contents": "\\"Town {n}\\"\\nThe town {n} lies on a hill."}}\n' for n in rows
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))


def test_a_corpus_is_indexed_by_position_and_by_option(run, corpora):
    for n, given in enumerate((["a.jsonl"], ["--corpus", "a.jsonl"], ["--corpus_path", "a.jsonl"])):
        status, _, err = run("index", "build", *given, "--out", f"i{n}")
        assert status == 0, err
    assert len({read_info(f"i{n}").corpus_sha256 for n in range(3)}) == 1


def test_a_corpus_is_added_to_an_index_in_every_order(run, corpora):
    assert run("index", "build", "a.jsonl", "-o", "i", "--postings", "packed")[0] == 0
    ways = (["i", "b.jsonl"], ["--index", "i", "c.jsonl"], ["--corpus", "d.jsonl", "i"])
    for count, way in enumerate(ways, 3):
        status, out, err = run("index", "add", *way)
        assert (status, out.split(",")[0]) == (0, f"i: {count} passages"), err


def test_an_index_is_searched_in_every_order(run, corpora):
    assert run("index", "build", "a.jsonl", "-o", "i")[0] == 0
    ways = (
        ["i", "town 1"],
        ["--index", "i", "town 1"],
        ["town 1", "--index", "i"],
        ["--index_path", "i", "town 1"],
    )
    found = [run("index", "search", *way, "--topk", "1") for way in ways]
    assert found[0][0] == 0 and "Town 1" in found[0][1] and found == [found[0]] * 4


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("index", "build", "-o", "i"), "index build: CORPUS missing; expected `index build CORPUS`"),
        (
            ("index", "build", "a", "--corpus", "b", "-o", "i"),
            "index build: two of CORPUS given, a and b; expected `index build CORPUS`",
        ),
        (("index", "add"), "index add: INDEX and CORPUS missing; expected `index add INDEX CORPUS`"),
        (("index", "add", "i"), "index add: CORPUS missing; expected `index add INDEX CORPUS`"),
        (
            ("index", "add", "i", "c", "--index", "j"),
            "index add: two of INDEX given, c and j; expected `index",
        ),
        (("index", "search", "who?"), "index search: QUERY missing; expected `index search INDEX QUERY`"),
        (
            ("index", "search", "--index", "i"),
            "index search: QUERY missing; expected `index search INDEX QUERY`",
        ),
        (
            ("index", "search", "j", "who?", "--index", "i"),
            "index search: two of INDEX given, who? and i; expected `index search INDEX QUERY`",
        ),
    ],
)
def test_what_is_missing_or_too_much_is_said(run, argv, says):
    status, _, err = run(*argv)
    assert status == 2 and err.startswith(f"unspiral: {says}") and err.count("\n") == 1, err


def test_an_addition_tells_of_its_own_lines_alone(run, corpora, tmp_path):
    """What the build and earlier additions left out was told then."""
    for name in "abc":
        with open(tmp_path / f"{name}.jsonl", "a") as file:
            file.write("nonsense\n" * (ord(name) - ord("a") + 1))
    status, _, err = run("index", "build", "a.jsonl", "-o", "i", "--postings", "packed", "--skip-bad")
    assert status == 0 and err.startswith("1 line was left out")
    status, _, err = run("index", "add", "i", "b.jsonl", "--skip-bad")
    assert status == 0 and err.startswith("2 lines were left out") and "a.jsonl" not in err
    status, _, err = run("index", "add", "i", "c.jsonl", "--skip-bad")
    assert status == 0 and err.startswith("3 lines were left out") and "b.jsonl" not in err
    status, _, err = run("index", "add", "i", "d.jsonl", "--skip-bad")
    assert (status, err) == (0, "")
    for change in (["delete", "i", "--id", "0"], ["merge", "i"]):
        assert run("index", *change)[::2] == (0, "")
    assert read_info("i").skipped == 6


def test_the_description_of_an_index_is_read_by_people_and_whole_as_json(run, corpora, tmp_path):
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("nonsense\n")
    build = ("index", "build", "a.jsonl", "-o", "i", "--postings", "packed", "--skip-bad", "--no-stem")
    assert run(*build)[0] == 0 and run("index", "add", "i", "b.jsonl")[0] == 0
    assert run("index", "delete", "i", "--id", "0")[0] == 0
    status, out, err = run("index", "info", "i")
    whole = json.loads(run("index", "info", "i", "--json")[1])
    first, *lines = out.splitlines()
    assert (status, err) == (0, "") and first.startswith("i: 2 passages, bm25, ")
    found = dict(line.split(":", 1) for line in lines if not line.startswith(" "))
    assert [*found] == ["corpus", "settings", "additions", "deletions", "left out", "files"]
    assert found["corpus"].endswith(f", sha256 {whole['corpus_sha256'][:12]}")
    assert found["settings"].strip() == (
        "language english, stem no, stop_words yes, k1 0.9, b 0.4, postings packed"
    )
    assert found["deletions"].strip() == "1 passage, which `unspiral index merge` takes out"
    assert found["left out"].strip() == "1 line of the corpus, the first:"
    assert found["files"].strip() == f"{len(whole['files'])}, all whole"
    assert not any(entry["sha256"] in out for entry in whole["files"].values())
    assert run("index", "merge", "i")[0] == 0
    assert "additions" not in run("index", "info", "i")[1]
