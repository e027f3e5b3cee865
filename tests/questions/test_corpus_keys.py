"""Corpora with columns of names of their own: named by --text-key, --title-key and --id-key."""

import json

import pytest
from command_line import run  # noqa: F401

from retriever_service.index_folder.corpus import read_corpus
from retriever_service.index_folder.keys import CorpusKeys
from retriever_service.indexing.build import build_index
from services.common.errors import UserError
from trainer.config.schema import parse_config
from trainer.session.preflight.retrievers import check_retrievers

KEYS = ("--text-key", "Description", "--title-key", "Name", "--id-key", "Object No")
CLOCKS = CorpusKeys("Description", "Name", "Object No")


@pytest.fixture
def clocks(tmp_path):
    file = tmp_path / "clocks.csv"
    file.write_text(
        "Object No,Name,Description,text\nC-1,Mantel clock,It strikes the hours,x\nC-2,,A water clock,y\n"
    )
    return file


def test_the_named_columns_are_the_passage_and_the_others_stay(clocks):
    rows = [(p.id, p.contents, p.fields) for p in read_corpus(clocks, keys=CLOCKS)]
    assert rows == [
        (
            "C-1",
            '"Mantel clock"\nIt strikes the hours',
            {"title": "Mantel clock", "text": "It strikes the hours"},
        ),
        ("C-2", "A water clock", {"title": "", "text": "A water clock"}),
    ]
    unnamed = [p.id for p in read_corpus(clocks, keys=CorpusKeys(text="Description"))]
    assert unnamed == ["0", "1"]


def test_a_key_in_a_column_and_a_text_with_its_title_in_it(tmp_path):
    file = tmp_path / "c.jsonl"
    row = {"uuid": 7, "meta": {"body": "water"}, "contents": "x"}
    file.write_text(json.dumps(row) + "\n" + json.dumps({"uuid": 8, "meta": {}}) + "\n")
    passages = read_corpus(file, keys=CorpusKeys("meta.body", None, "uuid"))
    assert [(p.id, p.contents) for p in [next(passages)]] == [("7", "water")]
    with pytest.raises(UserError, match=r"c.jsonl, line 2: `meta.body` is empty; 1 of its 2 rows"):
        next(passages)
    file.write_text('{"id": "1", "title": "T", "contents": "\\"T\\"\\nwater"}\n')
    same = [
        p.contents for keys in (CorpusKeys(), CorpusKeys("contents")) for p in read_corpus(file, keys=keys)
    ]
    assert same == ['"T"\nwater', '"T"\nwater']


def test_the_commands_take_them(run, clocks, tmp_path):
    status, out, _ = run("data", "validate", str(clocks), *KEYS)
    assert status == 0 and f"{clocks}: a corpus of 2 passages" in out and "numbered" not in out
    index = tmp_path / "index"
    build = ("index", "build", "--corpus", str(clocks), "--out", str(index))
    assert run(*build, *KEYS)[0] == 0
    assert json.loads((index / "meta.json").read_text())["settings"]["columns"] == CLOCKS.given
    status, out, _ = run("index", "search", "--index", str(index), "mantel")
    assert status == 0 and "Mantel clock" in out and "strikes" in out
    status, _, err = run(*build, "--text-key", "Name")
    assert status != 0 and "holds an index of other settings" in err


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            CorpusKeys(title="Nmae"),
            "has no column 'Nmae', the title key; its columns are Object No, Name, Desc",
        ),
        (CorpusKeys("meta.text"), "has no column 'meta.text', the text key; its columns are Object No, Name"),
    ],
)
def test_a_column_that_is_not_there_is_told_with_those_that_are(clocks, keys, says):
    with pytest.raises(UserError, match=r"clocks\.csv: ") as refused:
        next(read_corpus(clocks, skip_bad=True, keys=keys))
    assert says in str(refused.value)


@pytest.fixture
def unknown(tmp_path):
    file = tmp_path / "unknown.csv"
    file.write_text("Object No,Name,Description\nC-1,Mantel clock,It strikes\n")
    return file


def test_columns_of_unknown_names_are_told_with_the_names_that_are_read_and_the_options(
    run, unknown, tmp_path
):
    status, _, err = run("index", "build", "--corpus", str(unknown), "--out", str(tmp_path / "i"))
    assert status == 2 and err.rstrip().endswith(
        'no "contents" (a string); its columns are Object No, Name, Description; a text may be called '
        "contents, content, text, passage, passage_text, body, document; columns of other names are given by "
        "--text-key, --title-key and --id-key (of a run: retriever.text_key, .title_key and .id_key)"
    )
    status, _, err = run("data", "validate", str(unknown))
    assert (
        status == 2 and "if it is a corpus, name its columns by --text-key, --title-key and --id-key" in err
    )
    status, _, err = run("data", "validate", str(unknown), "--text-key", "Name", "--question-key", "Name")
    assert status == 2 and "--text-key and --title-key are of a corpus; --question-key" in err


def test_where_all_lines_are_left_out_the_first_says_why(unknown, tmp_path):
    with pytest.raises(UserError, match=r"holds no passage; 1 line is left out, the first: .*unknown.csv"):
        build_index(unknown, tmp_path / "i", skip_bad=True)


def test_a_run_learns_it_before_ray_starts(unknown):
    base = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": "t"}}
    for key, config in (
        ("retriever", {"retriever": {"corpus": str(unknown)}}),
        (
            "evaluation.retriever",
            {"retriever": {"url": "http://x"}, "evaluation": {"retriever": {"corpus": str(unknown)}}},
        ),
    ):
        with pytest.raises(UserError, match=rf"^{key}.corpus: .*retriever.text_key"):
            check_retrievers(parse_config(base | config))
    named = {"corpus": str(unknown), "text_key": "Description", "title_key": "Name", "id_key": "Object No"}
    check_retrievers(parse_config(base | {"retriever": named}))


def test_a_very_long_passage_is_told_of(run, tmp_path):
    file = tmp_path / "c.jsonl"
    rows = [{"id": "a", "contents": "w " * 1000}, {"id": "b", "contents": "w " * 3000}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, _ = run("data", "validate", str(file))
    assert status == 0 and f"{file}, line 2: the passage 'b' has 3,000 words" in out
    assert "1 passage has more than 1000 words" in out and "rollout.max_obs_tokens" in out
