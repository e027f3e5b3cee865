"""How an index learns its lists and codes from a sample of vectors."""

from __future__ import annotations

import numpy as np

from retriever_service.dense.search import import_faiss

LINKS = 32
"""Of a vector, in the graph over the lists while these are learnt."""


def learn(made, vectors: np.ndarray) -> None:
    """Train an empty index on vectors, float32 [number, dimension].

    k-means compares every vector with every list, ten times, and the number of lists grows with the root of
    that of the vectors. An index that finds its lists by a graph (`IVF_HNSW32,SQ8`) is for many lists: it
    learns them by such a graph too, made anew in each round.
    """
    if not finds_lists_by_a_graph(made):
        made.train(vectors)
        return
    faiss = import_faiss()
    lookup = faiss.IndexHNSWFlat(made.d, LINKS, faiss.METRIC_INNER_PRODUCT)
    made.clustering_index = lookup  # FAISS does not own it
    try:
        made.train(vectors)
    finally:
        made.clustering_index = None


def finds_lists_by_a_graph(made) -> bool:
    faiss = import_faiss()
    return isinstance(made, faiss.IndexIVF) and isinstance(
        faiss.downcast_index(made.quantizer), faiss.IndexHNSW
    )
