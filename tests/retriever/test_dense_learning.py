"""The lists of an index are learnt by a graph where a graph finds them, and by all products otherwise."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

from benchmarks.made_vectors import Made
from retriever_service.dense.build import make_type
from retriever_service.dense.learning import learn

DIMENSION = 24


@pytest.fixture(scope="module")
def vectors():
    made = Made(DIMENSION)
    return np.concatenate([made.chunk(number) for number in range(2)])


@pytest.fixture
def learnt_with(monkeypatch):
    """Type of the index that compared vectors with lists, of each training."""
    seen = []
    train = faiss.IndexIVF.train

    def spy(made, vectors):
        lookup = made.clustering_index
        seen.append(None if lookup is None else type(faiss.downcast_index(lookup)))
        train(made, vectors)

    monkeypatch.setattr(faiss.IndexIVF, "train", spy)
    monkeypatch.setattr(faiss.IndexIVFScalarQuantizer, "train", spy)
    return seen


@pytest.mark.parametrize(
    ("kind", "lookup"), [("IVF_HNSW32,SQ8", faiss.IndexHNSWFlat), ("IVF,SQ8", type(None)), ("SQ8", None)]
)
def test_a_graph_over_the_lists_learns_them_by_a_graph(vectors, learnt_with, kind, lookup):
    made = make_type(DIMENSION, kind, len(vectors))
    learn(made, vectors)
    assert made.is_trained
    if lookup is None:  # no lists
        assert not learnt_with
        return
    assert learnt_with == [None if lookup is type(None) else lookup]
    assert made.clustering_index is None


def test_lists_learnt_by_a_graph_are_near_their_vectors_as_all_products_make_them(vectors):
    """By the mean product of a vector with the centre of its list."""

    lists = make_type(DIMENSION, "IVF,SQ8", len(vectors)).nlist

    def nearness(centres):
        products, _ = faiss.knn(vectors, centres, 1, faiss.METRIC_INNER_PRODUCT)
        return products.mean()

    def learnt(kind):
        made = make_type(DIMENSION, kind, len(vectors))
        learn(made, vectors)
        centres = faiss.downcast_index(made.quantizer)
        centres = centres.storage if isinstance(centres, faiss.IndexHNSW) else centres
        return nearness(centres.reconstruct_n(0, lists))

    by_all, by_graph, not_learnt = learnt("IVF,SQ8"), learnt("IVF_HNSW32,SQ8"), nearness(vectors[:lists])
    assert by_all - by_graph < 0.2 * (by_all - not_learnt)


def test_what_fails_while_it_learns_leaves_no_graph_behind():
    made = make_type(DIMENSION, "IVF_HNSW32,SQ8", 1_000_000)
    with pytest.raises(RuntimeError):
        learn(made, np.zeros((10, DIMENSION), np.float32))  # fewer vectors than lists
    assert made.clustering_index is None
