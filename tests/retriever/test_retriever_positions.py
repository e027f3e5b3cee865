"""INDEX, CORPUS and QUERY stand alone or behind their options, in every command of an index."""

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
