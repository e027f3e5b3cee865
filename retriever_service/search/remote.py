"""Searching a Qdrant collection instead of an index on this machine, for those who outgrow it.

Why Qdrant: vectors and passages in one engine, one binary without a JVM, filters, replicas and shards, and a
Python client whose local mode runs the same calls in a test. Addresses: `qdrant+http://HOST:6333/COLLECTION`,
`qdrant+https://...`, and for the local mode `qdrant+file:///FOLDER/COLLECTION`. Points have the row as id and
`{"id", "contents"}` as payload; `push` writes them so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from retriever_service.dense.encoder import Encoder, EncoderSettings, family_of
from retriever_service.dense.search import FOLDER, INDEX_FILE, open_faiss
from retriever_service.errors import RetrieverUnavailable
from retriever_service.index_folder.description import IndexInfo, verify
from retriever_service.index_folder.documents import OFFSETS_FILE, TEXT_FILE, Documents, encode_document
from retriever_service.index_folder.rows import Rows
from retriever_service.ranking import Reranker
from retriever_service.search.search_index import Hits
from services.common.answers import clean_text
from services.common.errors import EnvironmentLacks, UserError
from services.common.loading.extras import needed_for

PREFIX = "qdrant+"
API_KEY_VARIABLE = "QDRANT_API_KEY"
_PUSH_POINTS = 256


def connect(address: str, timeout_seconds: int = 30):
    """(client, collection) of an address. The API key, if any, comes from the environment."""
    with needed_for(address, "qdrant"):
        from qdrant_client import QdrantClient
    parts = urlsplit(address.removeprefix(PREFIX))
    folder, _, collection = parts.path.rstrip("/").rpartition("/")
    if parts.scheme not in ("http", "https", "file") or not collection:
        raise UserError(
            f"index {address!r}: expected qdrant+http://HOST:PORT/COLLECTION or "
            "qdrant+file:///FOLDER/COLLECTION"
        )
    if parts.scheme == "file":
        try:
            return QdrantClient(path=folder), collection
        except (RuntimeError, OSError) as error:  # another process has it open
            raise EnvironmentLacks(f"index {address}: {_first_line(error)}") from None
    url = f"{parts.scheme}://{parts.netloc}"
    return QdrantClient(
        url=url, api_key=os.environ.get(API_KEY_VARIABLE), timeout=timeout_seconds, check_compatibility=False
    ), collection


class QdrantIndex:
    """A collection (the protocol SearchIndex). An engine that does not answer raises RetrieverUnavailable (a
    503), never an empty result."""

    quick = False
    rows: Rows | None = None

    def __init__(
        self,
        address: str,
        *,
        name: str | None,
        model: str | None,
        dtype: str = "auto",
        reranker: Reranker | None = None,
        rerank_depth: int = 20,
    ) -> None:
        if not model:
            raise UserError(
                f"index {address}: a collection needs --retriever_model, the encoder that its vectors were "
                "made with"
            )
        self._address = address
        self.reranker = reranker
        self._depth = rerank_depth
        self._client, self._collection = connect(address)
        self._encoder = Encoder(EncoderSettings(model, family_of(name, model)), dtype=dtype)
        count = self._call(
            lambda: _count(self._client, self._collection, address, self._encoder.dimension, model)
        )
        self.info = IndexInfo(
            backend="qdrant",
            corpus=address,
            passages=count,
            settings={"encoder": self._encoder.settings.as_dict()},
        )

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """As SearchIndex."""
        from qdrant_client import models

        depth = max(topk, self._depth) if self.reranker else topk
        asked = [i for i, query in enumerate(queries) if query and not query.isspace()]
        requests = [
            models.QueryRequest(query=vector.tolist(), limit=depth, with_payload=True)
            for vector in self._encoder.queries([queries[i] for i in asked])
        ]
        answers = (
            self._call(lambda: self._client.query_batch_points(self._collection, requests)) if asked else []
        )
        hits: list[Hits] = [[] for _ in queries]
        if len(answers) != len(asked):
            raise RetrieverUnavailable(
                f"qdrant at {self._address}: {len(answers)} answers for {len(asked)} queries"
            )
        for i, answer in zip(asked, answers, strict=True):
            found = self._with_text(answer.points)
            if self.reranker:
                (order,) = self.reranker.order([(queries[i], [contents for _, contents, *_ in found])], topk)
                found = [(*found[at][:3], float(score)) for at, score in order]
            hits[i] = [(encode_document(id, contents, url), score) for id, contents, url, score in found]
        return hits

    def _with_text(self, points: list) -> list[tuple[str, str, str | None, float]]:
        """(id, contents, url, score) of the points that have text: others write into the same collections. A
        point without an id of ours is known by its own. Raises RetrieverUnavailable where none of them has
        text."""
        found = []
        for point in points:
            payload = point.payload or {}
            contents = payload.get("contents")
            if isinstance(contents, str):
                id = payload.get("id", point.id)
                found.append(
                    (clean_text(str(id)), clean_text(contents), payload.get("url"), float(point.score))
                )
        if points and not found:
            raise RetrieverUnavailable(
                f"qdrant at {self._address}: point {points[0].id} has no text under `contents`, as "
                "`unspiral index push` writes it"
            )
        return found

    def normalise(self, query: str) -> str:
        """The query itself: some tokenizers see every space."""
        return query

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _call(self, function: Callable):
        return _calling(self._address, function)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _calling(address: str, function: Callable):
    from qdrant_client.http.exceptions import ApiException

    try:
        return function()
    except (ApiException, OSError) as error:
        raise RetrieverUnavailable(f"qdrant at {address}: {_first_line(error)}") from None


def _count(client, collection: str, address: str, dimension: int, whose: str) -> int:
    """Points of a collection. Raises UserError where it can't hold the vectors of `whose`, or orders them by
    distance."""
    from qdrant_client import models

    if not client.collection_exists(collection):
        raise UserError(
            f"index {address}: no such collection; `unspiral index push` makes one from a dense index"
        )
    vectors = client.get_collection(collection).config.params.vectors
    if not isinstance(vectors, models.VectorParams):
        raise UserError(
            f"index {address}: its vectors have names; expected one vector per point, as `unspiral index "
            "push` writes it"
        )
    if vectors.size != dimension:
        raise UserError(
            f"index {address}: vectors of {vectors.size} numbers, those of {whose} have {dimension}"
        )
    if vectors.distance not in (models.Distance.COSINE, models.Distance.DOT):
        raise UserError(
            f"index {address}: ordered by {vectors.distance.value} distance; expected Cosine or Dot"
        )
    return client.count(collection).count


def push(folder: str | Path, address: str, progress: Callable[[int, int], None] | None = None) -> int:
    """Copy a dense index folder (of a type that keeps its vectors: Flat, SQ, HNSW) into a collection. Returns
    the number of points.

    May be run again after a break: points that are there are written over with the same content. Raises
    UserError for a collection that can't hold it, RetrieverUnavailable where the engine does not answer.
    """
    from qdrant_client import models

    folder = Path(folder)
    info = verify(folder)
    if info.backend == "bm25":
        raise UserError(f"index {folder}: is bm25; only vectors can be pushed")
    vectors = open_faiss(folder / FOLDER / INDEX_FILE)
    documents = Documents(folder / TEXT_FILE, folder / OFFSETS_FILE)
    client, collection = connect(address)

    def write() -> None:
        if not client.collection_exists(collection):
            client.create_collection(
                collection, models.VectorParams(size=vectors.d, distance=models.Distance.COSINE, on_disk=True)
            )
        there = _count(client, collection, address, vectors.d, str(folder))
        if there > info.passages:
            raise UserError(
                f"index {address}: holds {there:,} points, more than the {info.passages:,} passages of "
                f"{folder}, so others would stay among them; give another collection"
            )
        for begin in range(0, info.passages, _PUSH_POINTS):
            rows = range(begin, min(begin + _PUSH_POINTS, info.passages))
            batch = models.Batch(
                ids=list(rows),
                vectors=vectors.reconstruct_n(begin, len(rows)).tolist(),
                payloads=[orjson.loads(documents.raw(row)) for row in rows],
            )
            client.upsert(collection, batch, wait=True)
            if progress:
                progress(rows[-1] + 1, info.passages)

    try:
        _calling(address, write)
    finally:
        client.close()
    return info.passages
