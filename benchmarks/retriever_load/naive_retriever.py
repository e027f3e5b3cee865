"""What most search agents are trained with, for comparison: a server that searches for one request at a time.

    python -m benchmarks.retriever_load.naive_retriever INDEX PORT DTYPE

BM25 by `bm25s.retrieve` as the library comes, or a
sentence encoder and FAISS; FastAPI's worker threads take the requests and a lock lets one search at a time
(without it, FAISS and the stemmer may crash).
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings
from retriever_service.http.forms.schemas import RetrieveRequest
from retriever_service.index_folder.description import read_info
from retriever_service.index_folder.documents import OFFSETS_FILE, TEXT_FILE, Documents


def searcher(folder: Path, encoder_dtype: str):
    """A function from query and topk to (row, score)."""
    info = read_info(folder)
    if info.backend == "bm25":
        import bm25s

        index, analyzer = (
            bm25s.BM25.load(folder / "bm25", mmap=True),
            Analyzer(AnalyzerSettings(**info.settings["analyzer"])),
        )

        def search(query: str, topk: int) -> list[tuple[int, float]]:
            tokens = [t for t in analyzer.terms(query) if t in index.vocab_dict]
            rows, scores = index.retrieve([tokens], k=topk, show_progress=False)
            return list(zip(rows[0].tolist(), scores[0].tolist(), strict=True))

        return search
    from retriever_service.dense.search import open_dense

    ranker = open_dense(folder, info.settings, info.passages, dtype=encoder_dtype)
    return lambda query, topk: ranker.rank([query], topk)[0]


def make_app(folder: Path, encoder_dtype: str) -> FastAPI:
    app, search, lock = FastAPI(), searcher(folder, encoder_dtype), threading.Lock()
    documents = Documents(folder / TEXT_FILE, folder / OFFSETS_FILE)

    @app.get("/readyz")
    def readyz() -> dict:
        return {}

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> dict:
        result = []
        for query in request.queries or []:
            with lock:
                found = search(query, request.topk or 3)
            rows = [(documents.get(row), score) for row, score in found]
            result.append([{"document": {"id": i, "contents": c}, "score": score} for (i, c), score in rows])
        return {"result": result}

    return app


if __name__ == "__main__":
    # A connection may be idle for as long as the other clients' first answers take: 256 of them, one at a
    # time.
    uvicorn.run(
        make_app(Path(sys.argv[1]), sys.argv[3]),
        port=int(sys.argv[2]),
        log_level="warning",
        timeout_keep_alive=600,
    )
