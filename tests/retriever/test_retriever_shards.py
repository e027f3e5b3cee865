"""An index in shards: the answers of one index, and what a shard that fails makes of them."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from retriever_service.errors import IndexInvalid, RequestRefused, RetrieverUnavailable
from retriever_service.http.launch import serve_in_thread
from retriever_service.http.server import create_app
from retriever_service.index_folder.description import read_info
from retriever_service.indexing.build import build_index
from retriever_service.indexing.changes import add_to_index, delete_from_index
from retriever_service.search.index import Index
from retriever_service.settings import ServerSettings
from retriever_service.shards import index as sharded
from retriever_service.shards.asking import parse
from services.common.errors import EnvironmentLacks, UserError
from tests.retriever.retriever_fixtures import CORPUS, small_index  # noqa: F401
from tests.retriever.retriever_loads import Served, load_on, wait_for
from tests.retriever.retriever_models import tiny_encoder  # noqa: F401

LINES = CORPUS.read_text("utf-8").splitlines(keepends=True)
ROWS = [json.loads(line) for line in LINES]
QUERIES = [
    *(" ".join(row["contents"].split()[2:9]) for row in ROWS[::4]),
    "Which river flows past Morwen?",
    "the weaver born in Aldersea weaver",
    "largest house of Fennick houses houses",
    "Übersee café Århus",
    "town",
    "nothingofthekind",
    "the of and",
    " ",
]
PARTS = ((0, 60), (60, 61), (61, 186))


def built(folder: Path, name: str, lines: list[str], **options) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    build_index(folder / f"{name}.jsonl", folder / name, **({"postings": "packed"} | options))
    return folder / name


@pytest.fixture(scope="module")
def indexes(tmp_path_factory) -> Path:
    """`whole`, and its passages in three parts."""
    folder = tmp_path_factory.mktemp("shards")
    built(folder, "whole", LINES)
    for number, (begin, end) in enumerate(PARTS):
        built(folder, f"part{number}", LINES[begin:end])
    return folder


def served(index: Path | str, **options):
    return serve_in_thread(ServerSettings(index=str(index), port=0, **options))


def opened(*urls: str, seconds: float = 60.0, **options) -> sharded.ShardedIndex:
    return sharded.ShardedIndex("shards+" + ",".join(urls), timeout_seconds=seconds, **options)


def answers(index: Path, topk: int) -> list:
    one = Index(index)
    found = one.search(QUERIES, topk)
    one.close()
    return found


@pytest.mark.parametrize("topk", [1, 3, 200])
def test_shards_answer_as_one_index_to_the_last_bit(indexes, topk):
    with served(indexes / "part0") as a, served(indexes / "part1") as b, served(indexes / "part2") as c:
        shards = opened(a.url, b.url, c.url)
        assert shards.info.passages == len(LINES)
        assert shards.search(QUERIES, topk) == answers(indexes / "whole", topk)
        assert [shards.search([query], topk)[0] for query in QUERIES[-12:]] == answers(
            indexes / "whole", topk
        )[-12:]
        shards.close()


def test_additions_and_deletions_of_a_shard_count_for_all_of_them(tmp_path):
    gone = ROWS[3]["id"]
    first = built(tmp_path, "first", LINES[:40])
    (tmp_path / "more.jsonl").write_text("".join(LINES[40:90]), "utf-8")
    add_to_index(first, tmp_path / "more.jsonl")
    delete_from_index(first, [gone])
    whole = built(
        tmp_path, "whole", [line for line, row in zip(LINES, ROWS, strict=True) if row["id"] != gone]
    )
    with served(first) as a, served(built(tmp_path, "second", LINES[90:])) as b:
        shards = opened(a.url, b.url)
        assert shards.search(QUERIES, 20) == answers(whole, 20)
        shards.close()


def test_a_front_serves_them_over_http_with_its_own_limits_and_token(indexes, monkeypatch):
    with served(indexes / "part0", token="s3cret") as a, served(indexes / "part2", token="s3cret") as b:
        index = f"shards+{a.url},{b.url}"
        with served(index, shard_token="s3cret", max_topk=5, shard_seconds=60) as front:
            body = {"queries": ["Mina Frost", "town"], "topk": 9, "return_scores": True}
            answer = httpx.post(f"{front.url}/retrieve", json=body, trust_env=False, timeout=60)
            assert answer.status_code == 200 and "partial" not in answer.json()
            assert answer.headers["x-unspiral-changed"] == "topk: lowered from 9 to 5"
            assert len(answer.json()["result"][1]) == 5
            ready = httpx.get(f"{front.url}/readyz", trust_env=False).json()
            assert (ready["backend"], ready["passages"]) == ("bm25", 185)
            assert ready["settings"] == read_info(indexes / "part0").settings
        monkeypatch.setattr(sharded, "START_SECONDS", 0.0)
        with pytest.raises(EnvironmentLacks, match=rf"shard ({a.url}|{b.url}): 401 .*\(waited"):
            opened(a.url, b.url)


def test_dense_shards_are_merged_by_score(tmp_path, tiny_encoder):
    options = {"backend": "dense", "postings": "auto", "model": str(tiny_encoder)}
    whole = built(tmp_path, "whole", LINES, **options)
    parts = [
        built(tmp_path, f"part{begin}", LINES[begin:end], **options) for begin, end in ((0, 70), (70, 186))
    ]
    with served(parts[0]) as a, served(parts[1]) as b:
        shards = opened(a.url, b.url)
        for ours, theirs in zip(shards.search(QUERIES, 5), answers(whole, 5), strict=True):
            assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-5)
            near = {raw for raw, score in theirs if score > theirs[-1][1] + 1e-4}
            assert near <= {raw for raw, _ in ours}
        shards.close()


def test_shards_that_do_not_go_together_are_refused_by_name(tmp_path, indexes, small_index):
    with served(indexes / "part0") as a, served(built(tmp_path, "other", LINES[60:], k1=1.5)) as b:
        with pytest.raises(IndexInvalid, match=rf"shard {b.url}: its index has k1 1.5, that of {a.url} 0.9"):
            opened(a.url, b.url)
        with (
            served(indexes / "part0") as again,
            pytest.raises(
                IndexInvalid, match=rf"shard {again.url}: holds the same index as {a.url}.*given as URL\|URL"
            ),
        ):
            opened(a.url, again.url)
        with served(small_index) as plain:
            with pytest.raises(
                IndexInvalid, match=rf"shard {plain.url}: .*build its index with --postings packed"
            ):
                opened(a.url, plain.url)
            alone = opened(plain.url)  # one shard needs to agree with none
            assert alone.search(QUERIES, 3) == answers(small_index, 3)
            alone.close()


def test_shards_of_rows_without_ids_are_refused_since_each_counts_from_0(tmp_path):
    rows = [json.dumps({"contents": row["contents"]}) + "\n" for row in ROWS]
    numbered = [json.dumps({"id": str(i)} | json.loads(row)) + "\n" for i, row in enumerate(rows)]
    first = built(tmp_path, "first", rows[:70])
    delete_from_index(first, ["69"])
    with served(first) as a, served(built(tmp_path, "second", rows[70:], postings="packed")) as b:
        with pytest.raises(
            IndexInvalid,
            match=rf"shard {b.url}: its passages have ids 0 to 115, those of {a.url} 0 to 69: "
            "different passages share an id. Rows without ids are numbered from 0 .*`unspiral data passages`",
        ):
            opened(a.url, b.url)
        with (
            served(built(tmp_path, "given", numbered[:46])) as given,
            pytest.raises(
                IndexInvalid, match="where rows have ids, give them others, different in each shard"
            ),
        ):
            opened(a.url, given.url)
        with served(built(tmp_path, "later", numbered[70:])) as c:
            opened(a.url, c.url).close()
    with (
        served(built(tmp_path, "even", numbered[::2])) as a,
        served(built(tmp_path, "odd", numbered[1::2])) as b,
    ):
        opened(a.url, b.url).close()  # dealt out in turns: no id twice


def test_documents_of_two_shards_with_one_id_are_told_apart(tmp_path):
    """Ids that are no numbers are only met in answers."""

    def shard(name: str, *texts: str) -> Path:
        rows = [{"id": f"page_{i}", "contents": text} for i, text in enumerate(texts)]
        return built(tmp_path, name, [json.dumps(row) + "\n" for row in rows])

    weavers = "weavers weavers of the town"
    with (
        served(shard("first", "millers", weavers)) as a,
        served(shard("second", "millers", "a town of weavers and more")) as b,
        served(f"shards+{a.url},{b.url}", shard_seconds=60) as front,
    ):
        body = {"queries": ["weavers", "millers", "weavers and more"], "topk": 5}
        answer = httpx.post(f"{front.url}/retrieve", json=body, trust_env=False, timeout=60).json()["result"]
    assert [(d["id"], d["contents"]) for d in answer[0]] == [
        ("page_1", weavers),
        ("page_1#2", "a town of weavers and more"),
    ]
    assert [d["id"] for d in answer[1]] == ["page_0", "page_0"]  # one passage, which both have
    assert [d["id"] for d in answer[2]] == ["page_1#2", "page_1"]  # by shard, whichever is better


def test_a_shard_takes_no_more_than_its_limits_and_says_so_through_the_front(indexes):
    with served(indexes / "part0", max_topk=5) as a, served(indexes / "part1") as b:
        shards = opened(a.url, b.url)
        with pytest.raises(RequestRefused, match=rf"^shard {a.url}: 422 topk: 6 is asked for, 1 to 5 are"):
            shards.search(["town"], 6)
        shards.close()
        version = httpx.get(f"{a.url}/shard", trust_env=False).json()["version"]
        whole = {"passages": 0, "tokens": 0, "frequencies": {}}
        for body, status in (
            ({"version": "other", "queries": ["a"], "topk": 1}, 409),
            ({"version": version, "queries": ["a"], "topk": 0}, 422),
            ({"version": version, "queries": ["a"], "topk": 1, "whole": whole}, 422),
            ({"version": version, "queries": []}, 422),
        ):
            assert httpx.post(f"{a.url}/shard/search", json=body, trust_env=False).status_code == status


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("ftp://a", "'ftp://a'"),
        ("http://a,,http://b", "''"),
        ("http://a|http://a", "http://a: given twice"),
        ("http://a,http://b:70000", "--shards 'http://b:70000': port 70000; .*PORT from 1 to 65535"),
    ],
)
def test_addresses_that_are_none_are_one_line(given, wrong):
    with pytest.raises(UserError, match=wrong):
        parse(given)


class _Front(BaseHTTPRequestHandler):
    """A shard that knows what its index is and then does not answer, or not wholly."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = httpx.get(f"{self.server.behind}/shard", trust_env=False).content
        self._send(body, len(body))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.set()
        if self.server.slow:
            self.server.released.wait(60)
            return
        self._send(b'{"frequencies":[', 1000)  # and the process is gone
        self.connection.shutdown(2)

    def _send(self, body: bytes, length: int) -> None:
        self.send_response(200)
        self.send_header("content-length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture(params=[False, True], ids=["dies in a request", "is slow"])
def sick(request, indexes):
    """A shard that fails every search, over the third part."""
    with served(indexes / "part2") as behind:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Front)
        server.behind = behind.url
        server.slow = request.param
        server.asked = threading.Event()
        server.released = threading.Event()
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()
        server.server_close()


def test_a_shard_that_fails_is_named_and_no_part_of_an_answer_comes(indexes, sick):
    url = f"http://127.0.0.1:{sick.server_port}"
    reason = (
        r"no whole answer within [\d.]+ s" if sick.slow else "peer closed|Server disconnected|incomplete|Read"
    )
    with served(indexes / "part0") as a:
        shards = opened(a.url, url, seconds=60.0)
        shards._timeout = 2.0 if sick.slow else 60.0
        with pytest.raises(RetrieverUnavailable, match=rf"^shard {url}: .*({reason})"):
            shards.search(["town"], 3)
        assert sick.asked.is_set()
        shards.close()
        with served(f"shards+{a.url},{url}", shard_seconds=5.0) as front:
            body = {"queries": ["town"]}
            answer = httpx.post(f"{front.url}/retrieve", json=body, trust_env=False, timeout=60)
            assert answer.status_code == 503 and f"shard {url}: " in answer.json()["detail"]
            assert answer.headers["retry-after"] == "1"


def test_partial_answers_are_those_of_the_rest_and_are_marked(indexes, sick):
    url = f"http://127.0.0.1:{sick.server_port}"
    with (
        served(indexes / "part0") as a,
        served(f"shards+{a.url},{url}", shard_seconds=5.0, partial_answers=True) as front,
    ):
        for asked in range(2):  # no partial answer is kept for later
            body = {"queries": ["Mina Frost", "town"], "return_scores": True}
            answer = httpx.post(f"{front.url}/retrieve", json=body, trust_env=False, timeout=60)
            assert answer.status_code == 200 and answer.json()["partial"] is True
            assert f"shard {url}: " in answer.headers["x-unspiral-partial"]
            one = Index(indexes / "part0")
            for ours, theirs in zip(answer.json()["result"], one.search(body["queries"], 3), strict=True):
                assert [(h["document"], h["score"]) for h in ours] == [(json.loads(d), s) for d, s in theirs]
            one.close()
            page = httpx.get(f"{front.url}/metrics", trust_env=False).text
            assert f"retriever_partial_results_total {2.0 * (asked + 1)}" in page


def test_without_any_shard_there_is_no_answer_at_all(indexes):
    with served(indexes / "part0") as a:
        shards = opened(a.url, partial=True)
    with pytest.raises(RetrieverUnavailable, match=f"^shard {a.url}: "):
        shards.search(["town"], 3)
    shards.close()


def test_another_version_of_a_shard_is_searched_by_new_statistics_and_never_mixed(tmp_path, indexes):
    """The shard opens another index between the count of terms and the search."""
    place = tmp_path / "place"
    place.symlink_to(indexes / "part1")
    with served(indexes / "part0") as a, served(place, reload_seconds=0.05) as b:
        shards = opened(a.url, b.url)
        before = shards.normalise("town")
        assert len(shards.search(["town"], 200)[0]) < 60
        version = httpx.get(f"{b.url}/shard", trust_env=False).json()["version"]
        (tmp_path / "next").symlink_to(indexes / "part2")
        (tmp_path / "next").replace(place)
        until = time.monotonic() + 60
        while httpx.get(f"{b.url}/shard", trust_env=False).json()["version"] == version:
            assert time.monotonic() < until
            time.sleep(0.02)
        whole = built(tmp_path, "whole", LINES[:60] + LINES[61:])
        assert shards.search(QUERIES, 20) == answers(whole, 20)
        assert shards.normalise("town") != before and shards.info.passages == 185
        other = built(tmp_path, "stemless", LINES[61:], stem=False)
        (tmp_path / "next").symlink_to(other)
        (tmp_path / "next").replace(place)
        until = time.monotonic() + 60
        with pytest.raises(
            RetrieverUnavailable, match=rf"^shard {b.url}: its index has analyzer .*stem.: False"
        ):
            while time.monotonic() < until:
                shards.search(["town"], 3)
        shards.close()


@pytest.mark.slow
def test_a_replica_that_is_killed_or_exchanged_costs_no_request(tmp_path, indexes):
    """kill -9 of one replica under load, and its return; then the other one stops and comes back."""
    queries = [query for query in QUERIES if not query.isspace()]
    with ExitStack() as running:
        one, two = (running.enter_context(Served(indexes / "part2")) for _ in range(2))
        shards = f"{one.ready().url}|{two.ready().url}"
        front = running.enter_context(Served("--shards", shards, "--cache-size", 0)).ready()
        with load_on(front.url, queries) as load:
            load.reaches(40)
            one.end(signal.SIGKILL)
            load.reaches(40)
            running.enter_context(Served(indexes / "part2", port=one.port)).ready()
            load.reaches(40)
            two.end(signal.SIGTERM)
            load.reaches(40)
        assert load.failures == []


def test_a_shard_whose_index_still_loads_says_so_and_when_to_ask_again():
    app = create_app(ServerSettings(index="unread", port=0))  # nothing opens it without a lifespan
    answer = TestClient(app, base_url="http://127.0.0.1:8000").get("/shard")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json() == {"detail": "the index is still loading", "field": None, "limit": None}


@pytest.mark.parametrize("partial", [False, True], ids=["whole answers", "partial answers"])
def test_a_request_that_the_shards_refuse_is_refused_and_the_next_one_is_answered_by_all(indexes, partial):
    """A mistake of a client says nothing about a shard."""
    with (
        served(indexes / "part0", max_topk=5) as a,
        served(indexes / "part2", max_topk=5) as b,
        served(f"shards+{a.url},{b.url}", shard_seconds=60.0, partial_answers=partial) as front,
        httpx.Client(base_url=front.url, trust_env=False, timeout=60) as http,
    ):
        for _ in range(2):
            answer = http.post("/retrieve", json={"queries": ["town"], "topk": 6})
            assert answer.status_code == 422 and "retry-after" not in answer.headers
            assert answer.json()["detail"].startswith(f"shard {a.url}: 422 topk: 6 is asked for, 1 to 5 are")
            answer = http.post("/retrieve", json={"queries": ["town"], "topk": 5})
            assert answer.status_code == 200 and "x-unspiral-partial" not in answer.headers


def test_a_shard_that_opens_another_index_changes_the_number_of_passages_that_is_shown(
    tmp_path, indexes, monkeypatch
):
    monkeypatch.setattr(sharded, "LOOK_SECONDS", 0.05)
    place = tmp_path / "place"
    place.symlink_to(indexes / "part1")

    def shown() -> str:
        page = httpx.get(f"{front.url}/metrics", trust_env=False, timeout=60).text
        return next(line for line in page.splitlines() if line.startswith("retriever_passages "))

    with (
        served(indexes / "part0") as a,
        served(place, reload_seconds=0.05) as b,
        served(f"shards+{a.url},{b.url}") as front,
    ):
        assert shown() == "retriever_passages 61.0"
        (tmp_path / "next").symlink_to(indexes / "part2")
        (tmp_path / "next").replace(place)
        wait_for(lambda: shown() == "retriever_passages 185.0", "new number of passages")
