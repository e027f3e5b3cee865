"""What existing clients post to Search-R1's server, and what they must get."""

from __future__ import annotations

import json
import threading
import time

import httpx
import orjson
import pytest
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from retriever_service.errors import IndexInvalid, RequestRefused
from retriever_service.http.forms.schemas import BatchSearchRequest, SearchRequest, parse_body
from retriever_service.http.launch import serve_in_thread
from retriever_service.http.server import create_app
from retriever_service.http.web import error_answer
from retriever_service.search.index import Index
from retriever_service.settings import ServerSettings
from services.common.errors import EnvironmentLacks
from tests.retriever.retriever_fixtures import CORPUS, http, server, small_index  # noqa: F401

PASSAGES = {row["id"]: row["contents"] for row in map(json.loads, CORPUS.read_text("utf-8").splitlines())}


def test_search_r1_client_gets_scored_documents_in_order_of_the_queries(http):
    answer = http.post(
        "/retrieve", json={"queries": ["river Foss bridge", "Mina Frost"], "topk": 3, "return_scores": True}
    )
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    first, second = answer.json()["result"]
    assert len(first) == 3 and second[0]["document"] == {"id": "d59", "contents": PASSAGES["d59"]}
    for hits in (first, second):
        scores = [hit["score"] for hit in hits]
        assert scores == sorted(scores, reverse=True) and all(isinstance(s, float) and s > 0 for s in scores)
        assert all(hit["document"]["contents"] == PASSAGES[hit["document"]["id"]] for hit in hits)


@pytest.mark.parametrize(
    "queries", [["Mina Frost"], ["Mina Frost", "Dove"], ["Mina Frost", "Dove", "Aldersea"]]
)
def test_without_scores_documents_are_not_wrapped_for_any_number_of_queries(http, queries):
    plain = http.post("/retrieve", json={"queries": queries, "topk": 2, "return_scores": False}).json()[
        "result"
    ]
    scored = http.post("/retrieve", json={"queries": queries, "topk": 2, "return_scores": True}).json()[
        "result"
    ]
    assert plain == [[hit["document"] for hit in hits] for hits in scored]
    assert http.post("/retrieve", json={"queries": queries, "topk": 2}).json()["result"] == plain


def test_empty_batch_of_a_turn_in_which_nobody_searched(http):
    answer = http.post("/retrieve", json={"queries": [], "topk": 3, "return_scores": True})
    assert (answer.status_code, answer.json()) == (200, {"result": []})


def test_skyrl_posts_one_string_and_gets_two_levels(http):
    answer = http.post("/retrieve", json={"query": "Mina Frost", "topk": 3, "return_scores": True}).json()
    assert answer["result"][0][0]["document"]["id"] == "d59" and len(answer["result"]) == 1


def test_verl_and_slime_post_one_element_lists(http):
    for body in (
        {"queries": ["Mina Frost"], "topk": 1, "return_scores": True},
        {"queries": ["Mina Frost"], "topk": 1, "return_scores": False},
    ):
        assert len(http.post("/retrieve", json=body).json()["result"][0]) == 1


@pytest.mark.parametrize("topk", [None, 0])
def test_topk_null_and_zero_are_the_servers_default(http, topk):
    assert len(http.post("/retrieve", json={"queries": ["river"], "topk": topk}).json()["result"][0]) == 3
    assert len(http.post("/retrieve", json={"queries": ["river"]}).json()["result"][0]) == 3


def test_fewer_hits_give_a_shorter_list_and_no_hit_an_empty_one(http):
    body = {"queries": ["Übersee", "", "  \n", "zzzz qqqq", "the of and", "naïve 東京"], "topk": 50}
    results = http.post("/retrieve", json=body).json()["result"]
    assert [len(r) for r in results] == [1, 0, 0, 0, 0, 1]


def test_more_than_the_corpus_holds_is_all_that_match(http):
    result = http.post(
        "/retrieve", json={"queries": ["town river weaver smith born was"], "topk": 1000}
    ).json()["result"][0]
    assert 100 < len(result) <= 186 and len({d["id"] for d in result}) == len(result)


@pytest.mark.parametrize(
    ("body", "status", "field", "limit"),
    [
        ({"queries": ["a"], "topk": -1}, 422, "topk", 0),
        ({"queries": ["a"], "topk": "three"}, 422, "topk", "an integer"),
        ({"queries": ["a"], "topk": "-3"}, 422, "topk", "an integer"),
        ({"queries": ["a"], "topk": [3]}, 422, "topk", "an integer"),
        ({"queries": ["a"], "topk": True}, 422, "topk", "an integer"),
        ({"queries": ["a"], "topk": 1.5}, 422, "topk", "an integer"),
        ({"queries": ["a"] * 100_000}, 422, "queries", 16384),
        ({"queries": ["a"], "topk": 3, "top_k": 4}, 422, "topk", "topk, top_k or top_n"),
        ({"queries": ["a"], "k": 3}, 422, "k", "topk, top_k or top_n"),
        ({"queries": ["a"], "limit": 3}, 422, "limit", "topk, top_k or top_n"),
        ({"query": "a", "num_results": 3}, 422, "num_results", "topk, top_k or top_n"),
        ({"query": "a", "n": 3}, 422, "n", "topk, top_k or top_n"),
        ({"queries": "a"}, 422, "queries", "a list"),
        ({"queries": ["a", 7]}, 422, "queries[1]", "a string"),
        ({"query": ["a"]}, 422, "query", "a string"),
        ({"queries": ["a"], "query": "a"}, 422, "queries", "one of queries and query"),
        ({"topk": 3}, 422, "queries", "one of queries and query"),
        ({"queries": ["a"], "return_scores": "maybe"}, 422, "return_scores", "true or false"),
        ({"queries": ["a"], "return_scores": 2}, 422, "return_scores", "true or false"),
        ([], 422, "body", "an object"),
        ("a", 422, "body", "an object"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_input_is_json_that_names_field_and_limit(http, body, status, field, limit):
    answer = http.post("/retrieve", json=body)
    error = answer.json()
    assert (answer.status_code, error["field"]) == (status, field) and field.split("[")[0] in error["detail"]
    assert limit is None or error["limit"] == limit


@pytest.mark.parametrize(
    ("more", "expected", "changed"),
    [
        ({"topk": "2"}, 2, None),
        ({"topk": 2.0}, 2, None),
        ({"topk": 2000}, 186, "topk: lowered from 2000 to 1000"),
        ({"topk": 10**30}, 186, "topk: lowered to 1000"),
        ({"topk": 2, "return_scores": "true"}, 2, None),
        ({"topk": 2, "return_scores": "False"}, 2, None),
        ({"topk": 2, "queries": ["river\0Foss", "a"]}, 2, "queries[0]: control characters replaced"),
        ({"topk": 2, "queries": ["river\x1b[0m", "a"]}, 2, "queries[0]: control characters replaced"),
        ({"topk": 2, "queries": ["river " * 1400, "a"]}, 2, "queries[0]: cut from 8400 to 8192 characters"),
        (
            {"topk": 2, "queries": ["river"] + ["\0"] * 7},
            2,
            "...; queries[5]: control characters replaced; 2 more",
        ),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_search_r1s_server_takes_is_taken_and_what_was_changed_is_in_a_header(
    http, more, expected, changed
):
    answer = http.post("/retrieve", json={"queries": ["river", "a"]} | more)
    assert answer.status_code == 200
    first, *_ = answer.json()["result"]
    assert len(first) <= expected and len(first) > expected * 0.1
    assert ("document" in first[0]) == (more.get("return_scores") == "true")
    header = answer.headers.get("x-unspiral-changed")
    if changed and changed.startswith("..."):
        assert header.endswith(changed[3:]) and header.startswith("queries[1]: ")
    else:
        assert header == changed


def test_one_query_that_is_cut_or_cleaned_fails_no_other_of_its_batch(http):
    queries = ["Mina Frost", "\0", "x" * 9000, "river Foss bridge"]
    got = http.post("/retrieve", json={"queries": queries, "topk": 3}).json()["result"]
    alone = [http.post("/retrieve", json={"query": q, "topk": 3}).json()["result"][0] for q in queries]
    assert got == alone and got[0] and got[3] and got[1] == []


@pytest.mark.parametrize(
    "raw", [b"", b"{", b'{"queries": ["\\ud800"]}', b'{"queries": ["\xff"]}', b"\0", b'{"queries": [' * 500]
)
def test_a_body_that_is_no_json_is_a_400_in_json(http, raw):
    answer = http.post("/retrieve", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422) and answer.json()["field"]


def test_wrong_content_type_method_and_path_are_json_errors(http):
    form = http.post("/retrieve", data={"queries": "a"})
    assert form.status_code == 415 and form.json()["limit"] == "application/json"
    none = {"field": None, "limit": None}
    assert (http.get("/retrieve").status_code, http.get("/retrieve").json()) == (
        405,
        {"detail": "GET /retrieve: Method Not Allowed; /docs lists the routes", **none},
    )
    assert (http.post("/nowhere").status_code, http.post("/nowhere").json()) == (
        404,
        {"detail": "POST /nowhere: Not Found; /docs lists the routes", **none},
    )


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ('Application/JSON; Charset="UTF-8"', 200),
        ("application/vnd.api+json", 200),
        ("application/json; charset=utf-16", 415),
        ("application/json;charset=latin-1", 415),
        ("text/plain", 415),
    ],
)
def test_a_body_is_json_in_utf_8_unless_it_is_declared_as_something_else(http, content_type, status):
    headers = {} if content_type is None else {"content-type": content_type}
    answer = http.post("/retrieve", content=b'{"queries": []}', headers=headers)
    assert answer.status_code == status
    if status == 415:
        error = answer.json()
        assert error["field"] == "content-type" and content_type.rpartition("=")[2] in error["detail"]
        assert error["limit"] == ("utf-8" if "charset" in content_type else "application/json")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (rb'{"query": "\ud800"}', "query"),
        (rb'{"queries": ["a", "b \uDC00 c"]}', "queries[1]"),
        (
            rb'{"documents": [[{"contents": "a"}, {"document": {"contents": "\udfff"}}]]}',
            "documents[0][1].document.contents",
        ),
        (rb'"\ud800"', "body"),
        (rb'{"\ud800": "\ud800"}', "body"),
    ],
)
def test_a_lone_surrogate_is_named_with_its_field(http, body, field):
    answer = http.post("/retrieve", content=body)
    assert (answer.status_code, answer.json()["field"], answer.json()["limit"]) == (
        400,
        field,
        "no lone surrogates",
    )
    assert answer.json()["detail"].startswith(f"{field}: holds a lone surrogate")


def test_a_pair_of_surrogates_is_text(http):
    assert http.post("/retrieve", content=rb'{"query": "\ud83d\ude00"}').status_code == 200


def test_every_error_has_detail_field_and_limit(small_index):
    gate, opened = threading.Event(), threading.Event()

    class Troubled(Index):
        quick = False

        def search(self, queries, topk):
            if "stuck" in queries:
                gate.wait(60)
            if "poison" in queries:
                raise RuntimeError("poison")
            return super().search(queries, topk)

    def late():
        opened.wait(60)
        return Troubled(small_index)

    settings = ServerSettings(index=str(small_index), port=0, max_body_bytes=1024, token="s3cret")
    app = create_app(settings, late)

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("broken")

    @app.get("/typed")
    async def typed(count: int) -> None:
        pass

    with TestClient(app, raise_server_exceptions=False, headers={"authorization": "Bearer s3cret"}) as client:
        answers = [client.get("/readyz"), client.post("/retrieve", json={"query": "a"})]
        opened.set()
        while client.get("/readyz").status_code != 200:
            time.sleep(0.01)
        answers += [
            client.post("/retrieve", content=b"{"),
            client.post("/retrieve", json={}, headers={"authorization": "none"}),
            client.get("/nowhere"),
            client.post("/rerank", json={"queries": [], "documents": []}),
            client.get("/retrieve"),
            client.post("/retrieve", content=b" " * 2000),
            client.post("/retrieve", data={"a": "b"}),
            client.post("/retrieve", json={"query": 3}),
            client.get("/typed?count=x"),
            client.post("/retrieve", json={"query": "poison"}),
            client.get("/broken"),
            client.post("/retrieve", json={"query": "stuck"}, headers={"x-timeout-seconds": "0.1"}),
        ]
        gate.set()
    assert [a.status_code for a in answers] == [
        503,
        503,
        400,
        401,
        404,
        404,
        405,
        413,
        415,
        422,
        422,
        500,
        500,
        504,
    ]
    for answer in answers:
        assert answer.headers["content-type"] == "application/json"
        assert list(answer.json()) == ["detail", "field", "limit"] and answer.json()["detail"]


def test_a_body_beyond_the_limit_is_a_413_that_says_the_limit(small_index):
    with serve_in_thread(ServerSettings(index=str(small_index), port=0, max_body_bytes=2048)) as small:
        declared = httpx.post(f"{small.url}/retrieve", json={"queries": ["a" * 4096]}, trust_env=False)
        chunked = httpx.post(
            f"{small.url}/retrieve",
            content=iter([b'{"queries": ["'] + [b"a" * 512] * 16),
            headers={"content-type": "application/json"},
            trust_env=False,
        )
        for answer in (declared, chunked):
            assert answer.status_code == 413 and answer.json()["limit"] == 2048


def test_health_readiness_metrics_and_documentation(http):
    http.post("/retrieve", json={"queries": ["river", "zzzz"]})
    assert http.get("/healthz").json() == {"status": "ok"}
    ready = http.get("/readyz").json()
    assert (ready["status"], ready["backend"], ready["passages"]) == ("ready", "bm25", 186)
    page = http.get("/metrics").text
    for name in (
        "retriever_requests_total",
        "retriever_request_seconds_bucket",
        "retriever_batch_queries_bucket",
        "retriever_empty_results_total",
    ):
        assert name in page
    assert "/retrieve" in http.get("/openapi.json").json()["paths"] and http.get("/docs").status_code == 200


def test_the_token_is_asked_for_only_if_configured_and_never_for_health(small_index):
    with serve_in_thread(ServerSettings(index=str(small_index), port=0, token="s3cret")) as guarded:
        with httpx.Client(base_url=guarded.url, trust_env=False) as client:
            assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
            assert (
                client.post("/retrieve", json={"queries": []}).status_code
                == client.get("/metrics").status_code
                == 401
            )
            assert (
                client.post(
                    "/retrieve", json={"queries": []}, headers={"authorization": "Bearer wrong"}
                ).json()["field"]
                == "authorization"
            )
            assert (
                client.post(
                    "/retrieve", json={"queries": []}, headers={"authorization": "Bearer s3cret"}
                ).status_code
                == 200
            )


@pytest.mark.parametrize("error", [IndexInvalid, EnvironmentLacks, OSError])
def test_an_error_about_the_server_itself_is_logged_and_not_told_to_a_client(caplog, error):
    status, body, headers = error_answer(error("/srv/secret: what is wrong here"))
    assert status == 500 and headers == []
    assert orjson.loads(body)["detail"] == f"internal error: {error.__name__}"
    [record] = caplog.records
    assert isinstance(record.exc_info[1], error)


@pytest.mark.parametrize("request_of", [SearchRequest, BatchSearchRequest])
def test_the_first_wrong_field_of_flashrags_request_is_named(request_of):
    with pytest.raises(RequestRefused, match=r"^query: ") as error:
        parse_body(TypeAdapter(request_of), b'{"query": 3, "return_score": "x", "return_scores": "x"}')
    assert error.value.field == "query"
