"""Vectors that are made, with the structure that embeddings of passages have.

    python -m benchmarks.made_vectors OUT.index VECTORS DIMENSION [--seed N]

All have a common direction (embeddings crowd into a cone), topics of very different sizes, articles within
topics, and a spectrum that falls off, so that neighbours differ in a few directions. They are the vectors of
no text: recall on them says how an index copes with such a structure, not how a model finds passages. A
question is a passage's vector, turned. Chunks of 10,000 have a seed each, so fewer vectors are the beginning
of more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from retriever_service.dense.build import flat_header

CHUNK = 10_000
TOPICS = 500
ARTICLE_PASSAGES = 7
CONE = 1.0
TOPIC = 0.8
ARTICLE = 0.7
OWN = 0.6
QUESTION = 0.35
"""Lengths of the parts: what all share, topic, article, a passage's own; and what turns a question away."""


class Made:
    """The parts that all chunks share."""

    def __init__(self, dimension: int, seed: int = 0) -> None:
        self.dimension = dimension
        self._seed = seed
        draw = np.random.default_rng([seed, 0])
        self._scale = (np.arange(dimension) + 8.0) ** -0.5
        self._scale /= np.linalg.norm(self._scale)
        self._cone = self._directions(draw, 1)[0]
        self._topics = self._directions(draw, TOPICS)
        share = (np.arange(TOPICS) + 5.0) ** -1.0
        self._share = share / share.sum()

    def _directions(self, draw: np.random.Generator, count: int) -> np.ndarray:
        return draw.standard_normal((count, self.dimension)) * self._scale

    def chunk(self, number: int) -> np.ndarray:
        """Unit vectors, float32 [CHUNK, dimension]."""
        draw = np.random.default_rng([self._seed, 1, number])
        articles = -(-CHUNK // ARTICLE_PASSAGES)
        topic = draw.choice(TOPICS, articles, p=self._share)
        base = CONE * self._cone + TOPIC * self._topics[topic] + ARTICLE * self._directions(draw, articles)
        own = np.repeat(base, ARTICLE_PASSAGES, 0)[:CHUNK] + OWN * self._directions(draw, CHUNK)
        return _unit(own)

    def questions(self, vectors: np.ndarray, seed: int = 1) -> np.ndarray:
        """A question to each of these vectors."""
        draw = np.random.default_rng([self._seed, 2, seed])
        return _unit(vectors + QUESTION * self._directions(draw, len(vectors)))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def blocks(made: Made, count: int) -> Iterator[np.ndarray]:
    """The first `count` vectors."""
    for number in range(-(-count // CHUNK)):
        yield made.chunk(number)[: count - number * CHUNK]


def write_flat(made: Made, count: int, out: Path) -> None:
    """Write them as the flat FAISS file that published indexes are."""
    with out.open("wb") as file:
        file.write(flat_header(made.dimension, count))
        for block in blocks(made, count):
            file.write(block.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("vectors", type=int)
    parser.add_argument("dimension", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_flat(Made(args.dimension, args.seed), args.vectors, args.out)


if __name__ == "__main__":
    main()
