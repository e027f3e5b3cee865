"""Clients of other projects against the server, each written as its project's public client behaves."""

import json
import shutil

import httpx
import pytest
from pydantic import TypeAdapter

from retriever_service.errors import RequestRefused
from retriever_service.http.forms.schemas import RetrieveRequest, parse_body
from retriever_service.http.launch import serve_in_thread
from retriever_service.index_folder.description import verify
from retriever_service.indexing.build import build_index
from retriever_service.indexing.scan import Scanner
from retriever_service.search.index import Index
from retriever_service.settings import ServerSettings

PAGES = [
    {
        "id": "p0",
        "contents": '"Nineveh"\nNineveh was the capital of Assyria.',
        "url": "https://w.org/index.php?title=Nineveh",
        "wiki": 7,
    },
    {
        "id": "p1",
        "contents": '"Assur"\nAssur was a capital of Assyria too.',
        "url": "https://w.org/Assur",
        "links": ["p0"],
    },
    {"id": "p2", "contents": '"Assur"\nIts temple stood above the Tigris.', "url": "https://w.org/Assur"},
    {"id": "p3", "contents": '"Babylon"\nBabylon lay on the Euphrates.'},
]  # fmt: skip
QUESTION = "capital of Assyria"


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dialects")
    corpus = folder / "pages.jsonl"
    corpus.write_text("".join(json.dumps(page) + "\n" for page in PAGES), encoding="utf-8")
    build_index(corpus, folder / "index")
    return folder / "index"


@pytest.fixture(scope="module")
def url(index):
    with serve_in_thread(ServerSettings(index=str(index), port=0)) as running:
        yield running.url


def post(url, body):
    answer = httpx.post(url, json=body, trust_env=False, timeout=30)
    answer.raise_for_status()
    return answer.json()


def rllm(url, query, top_k=None):
    """rLLM's tool: asks /health, then one query with `top_k`, and shows the first 300 characters of what
    `results` holds."""
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    results = post(f"{url}/retrieve", {"query": query, "top_k": min(top_k or 10, 50)}).get("results", [])
    return [
        (
            r.get("document", {}).get("id"),
            r.get("document", {}).get("contents", "")[:300],
            r.get("score", 0.0),
        )
        for r in results
    ]


def zerosearch(url, query, topk=5):
    """ZeroSearch's client: a list of objects with `text`."""
    answer = post(f"{url}/retrieve", {"query": query, "top_k": topk})
    return "\n".join(f"Doc {i}: {doc['text']}" for i, doc in enumerate(answer, 1))


def asearcher(url, queries, topk):
    """ASearcher's local client: contents and url of each document, then pages by those urls."""
    answer = post(f"{url}/retrieve", {"queries": queries, "topk": topk, "return_scores": False})
    found = [([r["contents"] for r in one], [r["url"] for r in one]) for one in answer["result"]]
    pages = post(f"{url}/access", {"urls": found[0][1]})["result"]
    return found, [page["contents"] if page is not None else "" for page in pages]


def flashrag(url, query, top_n, return_score=False):
    """FlashRAG's serving, as ReSearch and its kin ask it: one query, or a list of them."""
    path = "search" if isinstance(query, str) else "batch_search"
    return post(f"{url}/{path}", {"query": query, "top_n": top_n, "return_score": return_score})


def test_rllm_reads_its_results(url):
    found = rllm(url, QUESTION, top_k=2)
    assert [one[0] for one in found] == ["p0", "p1"] and found[0][1] == PAGES[0]["contents"]
    assert found[0][2] > found[1][2] > 0
    assert rllm(url, "zzzz") == []
    batch = post(f"{url}/retrieve", {"queries": [QUESTION, "Tigris"], "top_k": 1})
    assert [one[0]["document"]["id"] for one in batch["result"]] == ["p0", "p2"] and batch["batch_size"] == 2


SHOWN = {name: value for name, value in PAGES[0].items() if name != "wiki"}  # without return_fields


@pytest.mark.parametrize("limit", ["topk", "top_n"])
def test_a_limit_by_the_servers_own_names_is_answered_in_the_plain_form(url, limit):
    plain = {"result": [[SHOWN]]}
    assert post(f"{url}/retrieve", {"queries": [QUESTION], limit: 1}) == plain
    assert post(f"{url}/retrieve", {"query": QUESTION, limit: "1"}) == plain


def test_top_k_selects_rllms_form(url):
    body = {"queries": [QUESTION], "top_k": "1"}
    answer = post(f"{url}/retrieve", body)
    assert set(answer) == {"method", "batch_size", "result"}
    assert answer["result"][0][0]["document"] == SHOWN and answer["result"][0][0]["score"] > 0
    assert post(f"{url}/retrieve", body | {"return_scores": False})["result"] == [[SHOWN]]
    one = post(f"{url}/retrieve", {"query": QUESTION, "top_k": 1, "return_scores": False})
    assert set(one) == {"query", "method", "results", "num_results", "result"}
    assert one["result"] == [[SHOWN]] and one["results"][0]["document"] == SHOWN
    assert one["results"][0]["score"] == answer["result"][0][0]["score"]


def test_zerosearch_reads_its_texts_on_its_port_or_where_it_is_told(index):
    with serve_in_thread(ServerSettings(index=str(index), port=0, dialect="zerosearch")) as running:
        assert zerosearch(running.url, QUESTION, 1) == f"Doc 1: {PAGES[0]['contents']}"
        assert zerosearch(running.url, "zzzz") == ""
        plain = post(
            f"{running.url}/retrieve", {"queries": [QUESTION], "topk": 1}
        )  # another client of the same server
        assert plain["result"][0][0]["id"] == "p0"
    from retriever_service.http.forms.dialects import ZEROSEARCH_PORT, Dialects
    from retriever_service.http.service import Service

    settings = ServerSettings(index=str(index), port=ZEROSEARCH_PORT)
    assert Dialects(Service(settings, lambda: Index(index)))._zerosearch


def test_asearcher_reads_urls_and_opens_pages(url):
    found, pages = asearcher(url, [QUESTION], 2)
    assert found == [([PAGES[0]["contents"], PAGES[1]["contents"]], [PAGES[0]["url"], PAGES[1]["url"]])]
    assert pages == [PAGES[0]["contents"], f"{PAGES[1]['contents']}\n{PAGES[2]['contents']}"]
    asked = ["https://w.org/index.php/Nineveh", "https://w.org/Assur/", "p3", "https://w.org/none"]
    rows = post(f"{url}/access", {"urls": asked})["result"]
    assert [row and row["id"] for row in rows] == ["p0", "p1", "p3", None]
    assert rows[0] == PAGES[0] and rows[1]["links"] == ["p0"]


def test_flashrag_reads_its_lists_with_scores_and_without(url):
    one = flashrag(url, QUESTION, 2)
    assert [d["id"] for d in one] == ["p0", "p1"] and one[0]["contents"] == PAGES[0]["contents"]
    documents, scores = flashrag(url, QUESTION, 2, return_score=True)
    assert documents == one and len(scores) == 2 and scores[0] > scores[1]
    many = flashrag(url, [QUESTION, "Tigris", ""], 5)
    assert [[d["id"] for d in docs] for docs in many] == [["p0", "p1"], ["p2"], []]
    lists, scores = flashrag(url, [QUESTION, "Tigris"], 1, return_score=True)
    assert [[d["id"] for d in docs] for docs in lists] == [["p0"], ["p2"]] and [len(s) for s in scores] == [
        1,
        1,
    ]
    assert (
        len(post(f"{url}/search", {"query": "the Assyria Tigris Euphrates capital"})) == 4
    )  # ten unless told
    assert flashrag(url, [], 5) == []


def test_the_whole_row_is_returned_on_request(url):
    asked = {"query": QUESTION, "topk": 1}
    (plain,) = post(f"{url}/retrieve", asked)["result"][0]
    assert plain == {name: PAGES[0][name] for name in ("id", "contents", "url")}
    (whole,) = post(f"{url}/retrieve", asked | {"return_fields": "all"})["result"][0]
    assert whole == PAGES[0]
    (some,) = post(f"{url}/retrieve", asked | {"return_fields": ["wiki"], "return_scores": True})["result"][0]
    assert some["document"] == {name: PAGES[0][name] for name in ("id", "contents", "wiki")}


def test_pages_of_many_passages_are_bounded_by_their_number_and_the_deadline(index):
    with serve_in_thread(ServerSettings(index=str(index), port=0, max_passages=5)) as running:
        urls = ["https://w.org/Assur", "p3", "https://w.org/Assur"]
        assert len(post(f"{running.url}/access", {"urls": urls})["result"]) == 3
        answer = httpx.post(f"{running.url}/access", json={"urls": [*urls, "p0"]}, trust_env=False)
        assert (answer.status_code, answer.json()["field"], answer.json()["limit"]) == (422, "urls", 5)
        hurried = {"X-Timeout-Seconds": "1e-9"}
        answer = httpx.post(f"{running.url}/access", json={"urls": urls}, headers=hurried, trust_env=False)
        assert answer.status_code == 504


def test_half_a_million_names_of_fields_hold_up_nobody(url):
    fields = [f"field {i}" for i in range(500_000)]
    body = {"queries": [QUESTION] * 500, "topk": 3, "return_fields": [*fields, "wiki"]}
    answer = httpx.post(f"{url}/retrieve", json=body, trust_env=False, timeout=30)  # in a list they took 45 s
    assert answer.status_code == 422 and len(answer.content) < 1000


def test_a_misspelt_field_of_a_request_is_named_with_what_is_accepted(url):
    """What other clients send beside (a model, a user, an id of the query) is ignored, as Search-R1 does."""
    asked = {"queries": [QUESTION], "topk": 1, "return_scores": True}
    for slip, meant in (
        ("return_feilds", "return_fields"), ("returnFields", "return_fields"),
        ("return_score", "return_scores"), ("topK", "topk"), ("TopK", "topk"), ("TOP_K", "top_k"),
        ("top-k", "top_k"), ("quries", "queries"), ("Query", "query"),
    ):  # fmt: skip
        answer = httpx.post(f"{url}/retrieve", json=asked | {slip: None}, trust_env=False)
        assert answer.status_code == 422 and answer.json()["field"] == slip
        assert answer.json()["detail"].startswith(
            f"{slip}: unknown field; did you mean {meant}? Accepted are topk, "
        )
    others = dict.fromkeys(
        ("model", "user", "query_id", "data_source", "top_p", "return_source", "timeout", "rerank"), "x"
    )
    assert post(f"{url}/retrieve", asked | others) == post(f"{url}/retrieve", asked)


def test_a_name_in_return_fields_that_no_passage_has_is_refused_by_name(url, monkeypatch):
    asked = {"query": QUESTION, "topk": 1, "return_fields": ["wiki", "titel"]}
    answer = httpx.post(f"{url}/retrieve", json=asked, trust_env=False)
    assert answer.status_code == 422 and answer.json()["field"] == "return_fields"
    assert "no passage has the field 'titel'; its fields are id, contents, url, " in answer.json()["detail"]


def test_a_name_that_only_a_sample_lacks_is_noted_and_not_refused(index, monkeypatch):
    monkeypatch.setattr("retriever_service.index_folder.rows._SAMPLED_ROWS", 2)
    with serve_in_thread(ServerSettings(index=str(index), port=0)) as running:
        asked = {"query": QUESTION, "topk": 1, "return_fields": ["wiki", "rarely"]}
        answer = httpx.post(f"{running.url}/retrieve", json=asked, trust_env=False)
        assert answer.status_code == 200
        said = "return_fields: rarely is in no passage of this answer"
        assert answer.headers["x-unspiral-changed"] == said
        slip = asked | {"return_fields": ["wikki"]}
        answer = httpx.post(f"{running.url}/retrieve", json=slip, trust_env=False)
        assert answer.status_code == 422 and answer.json()["detail"].endswith("; did you mean wiki?")


@pytest.mark.parametrize("path", ["retrieve", "search"])
def test_a_limit_by_another_name_is_refused_by_name_and_never_overlooked(url, path):
    for name in ("k", "limit", "n", "num_results", "max_results", "size"):
        answer = httpx.post(f"{url}/{path}", json={"query": "a", name: 5}, trust_env=False)
        assert answer.status_code == 422 and answer.json()["field"] == name
        assert answer.json()["limit"] == "topk, top_k or top_n"
    assert httpx.post(f"{url}/{path}", json={"query": "a", "model": "x"}, trust_env=False).status_code == 200


def test_an_index_that_was_built_without_whole_rows_opens_and_says_what_it_lacks(index, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(index, old)
    meta = json.loads((old / "meta.json").read_text())
    for name in ("fields.blocks", "fields.places", "lookup.keys", "lookup.rows"):
        (old / name).unlink()
        del meta["files"][name]
    (old / "meta.json").write_text(json.dumps(meta))
    verify(old)
    with serve_in_thread(ServerSettings(index=str(old), port=0)) as running:
        assert rllm(running.url, QUESTION, 1)[0][0] == "p0"
        for path, body, field in (
            ("access", {"urls": ["p0"]}, "urls"),
            ("retrieve", {"query": QUESTION, "return_fields": "all"}, "return_fields"),
        ):
            answer = httpx.post(f"{running.url}/{path}", json=body, trust_env=False)
            assert answer.status_code == 422 and answer.json()["field"] == field
            assert "the index holds no whole rows" in answer.json()["detail"]


def test_rows_of_a_build_that_was_broken_off_are_those_of_a_whole_one(tmp_path, monkeypatch):
    corpus = tmp_path / "c.jsonl"
    rows = [
        {"id": str(i), "contents": f"word{i}", "url": f"u{i}", "n": i}
        if i % 3
        else {"id": str(i), "contents": "w"}
        for i in range(400)
    ]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_index(corpus, tmp_path / "whole")
    write, chunks = Scanner._write, []

    def breaks(self, chunk):
        chunks.append(len(chunk))
        if len(chunks) == 3:
            raise KeyboardInterrupt
        write(self, chunk)

    monkeypatch.setattr("retriever_service.indexing.sinks.PostingsSink.chunk_passages", 150)
    monkeypatch.setattr(Scanner, "_write", breaks)
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, tmp_path / "i")
    build_index(corpus, tmp_path / "i")
    opened, whole = Index(tmp_path / "i"), Index(tmp_path / "whole")
    for row in (0, 1, 149, 150, 299, 300, 399):
        assert opened.rows.row(row) == whole.rows.row(row) == rows[row]
    assert opened.rows.find("u7") == [7] and opened.rows.find("7") == [7] and opened.rows.find("u3") == []


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        (True, "return_fields", "return_fields: Input should be 'all' or a valid array"),
        ("al", "return_fields", "return_fields: Input should be 'all' or a valid array"),
        (["wiki", 3], "return_fields[1]", "return_fields[1]: Input should be a valid string"),
    ],
)
def test_a_field_of_two_forms_is_refused_by_its_own_name(fields, field, says):
    body = json.dumps({"query": "who?", "return_fields": fields}).encode()
    with pytest.raises(RequestRefused) as refused:
        parse_body(TypeAdapter(RetrieveRequest), body)
    assert (refused.value.status, refused.value.field, str(refused.value)) == (422, field, says)
