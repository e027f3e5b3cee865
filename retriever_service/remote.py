"""Searching a Qdrant collection instead of an index on this machine, for those who outgrow it.

Why Qdrant: vectors and passages in one engine, one binary without a JVM, filters, replicas and shards, and a Python client whose
local mode runs the same calls in a test. Addresses: `qdrant+http://HOST:6333/COLLECTION`, `qdrant+https://...`, and for the local
mode `qdrant+file:///FOLDER/COLLECTION`. Points have the row as id and `{"id", "contents"}` as payload; `push` writes them so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from .dense import FOLDER, INDEX_FILE, open_faiss
from .documents import OFFSETS_FILE, TEXT_FILE, Documents, encode_document
from .encoder import Encoder, EncoderSettings, family_of
from .errors import BadSetting, EnvironmentLacks, RetrieverUnavailable
from .index import FORMAT, IndexInfo, verify
from .ranking import Reranker

PREFIX = "qdrant+"
API_KEY_VARIABLE = "QDRANT_API_KEY"
_PUSH_POINTS = 256


def connect(address: str, timeout_seconds: int = 30):
    """(client, collection) of an address. The API key, if any, comes from the environment."""
    try:
        from qdrant_client import QdrantClient
    except ImportError:
        raise EnvironmentLacks("a qdrant address needs the package qdrant-client: pip install 'unspiral[qdrant]'") from None
    parts = urlsplit(address.removeprefix(PREFIX))
    folder, _, collection = parts.path.rstrip("/").rpartition("/")
    if parts.scheme not in ("http", "https", "file") or not collection:
        raise BadSetting(f"index {address!r}: expected qdrant+http://HOST:PORT/COLLECTION or qdrant+file:///FOLDER/COLLECTION")
    if parts.scheme == "file":
        return QdrantClient(path=folder), collection
    url = f"{parts.scheme}://{parts.netloc}"
    return QdrantClient(
        url=url, api_key=os.environ.get(API_KEY_VARIABLE), timeout=timeout_seconds, check_compatibility=False
    ), collection


class QdrantIndex:
    """As `Index`, over a collection. An engine that does not answer raises RetrieverUnavailable (a 503), never an empty result."""

    quick = False

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
            raise BadSetting(
                f"index {address}: a collection needs --retriever_model, the encoder that its vectors were made with"
            )
        self._address, self.reranker, self._depth = address, reranker, rerank_depth
        self._client, self._collection = connect(address)
        self._encoder = Encoder(EncoderSettings(model, family_of(name, model)), dtype=dtype)
        count, dimension = self._call(self._describe)
        if dimension != self._encoder.dimension:
            raise BadSetting(
                f"index {address}: vectors of {dimension} numbers, those of {model} have {self._encoder.dimension}"
            )
        self.info = IndexInfo(
            FORMAT, "qdrant", address, "", 0, count, 0, [], {"encoder": self._encoder.settings.as_dict()}, {}, 0
        )

    def search(self, queries: list[str], topk: int) -> list[list[tuple[bytes, float]]]:
        """(document as JSON bytes, score) of the best passages of each query, best first. A blank query finds nothing."""
        from qdrant_client import models

        queries = list(queries)
        depth = max(topk, self._depth) if self.reranker else topk
        asked = [i for i, query in enumerate(queries) if query and not query.isspace()]
        requests = [
            models.QueryRequest(query=vector.tolist(), limit=depth, with_payload=True)
            for vector in self._encoder.queries([queries[i] for i in asked])
        ]
        answers = self._call(lambda: self._client.query_batch_points(self._collection, requests)) if asked else []
        hits: list[list[tuple[bytes, float]]] = [[] for _ in queries]
        for i, answer in zip(asked, answers, strict=True):
            payloads = [(point.payload, point.score) for point in answer.points]
            if self.reranker:
                (order,) = self.reranker.order([(queries[i], [p["contents"] for p, _ in payloads])], topk)
                payloads = [(payloads[at][0], score) for at, score in order]
            hits[i] = [(encode_document(str(p["id"]), p["contents"]), float(score)) for p, score in payloads]
        return hits

    def normalise(self, query: str) -> str:
        """Queries of the same form get the same answer."""
        return " ".join(query.split())

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _describe(self) -> tuple[int, int]:
        if not self._client.collection_exists(self._collection):
            raise BadSetting(f"index {self._address}: no such collection; `unspiral index push` makes one from a dense index")
        vectors = self._client.get_collection(self._collection).config.params.vectors
        return self._client.count(self._collection).count, vectors.size

    def _call(self, function: Callable):
        from qdrant_client.http.exceptions import ApiException

        try:
            return function()
        except (ApiException, OSError) as error:
            raise RetrieverUnavailable(f"qdrant at {self._address}: {str(error).strip().splitlines()[0]}") from None


def push(folder: str | Path, address: str, progress: Callable[[int, int], None] | None = None) -> int:
    """Copy a dense index folder (of a type that keeps its vectors: Flat, SQ, HNSW) into a collection. Returns the number of points.

    May be run again after a break: points that are there are written over with the same content.
    """
    from qdrant_client import models

    folder = Path(folder)
    info = verify(folder)
    if info.backend == "bm25":
        raise BadSetting(f"index {folder}: is bm25; only vectors can be pushed")
    client, collection = connect(address)
    vectors, documents = open_faiss(folder / FOLDER / INDEX_FILE), Documents(folder / TEXT_FILE, folder / OFFSETS_FILE)
    if not client.collection_exists(collection):
        client.create_collection(collection, models.VectorParams(size=vectors.d, distance=models.Distance.COSINE, on_disk=True))
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
    client.close()
    return info.passages
