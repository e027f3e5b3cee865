"""A cross-encoder that reads query and passage together: slow and good, so it orders only the best passages
of a search."""

from __future__ import annotations

from collections.abc import Sequence

from retriever_service.dense.model_files import loading, read_as_text
from retriever_service.ranking import Order, Passages
from services.common.errors import UserError
from services.common.loading.extras import needed_for

MAX_TOKENS = 512


class CrossEncoderReranker:
    """A sentence-transformers cross-encoder. For one thread at a time. Runs on the GPU where torch sees
    one."""

    def __init__(self, model: str, *, batch_size: int = 32) -> None:
        with needed_for("reranking", "dense"):
            from sentence_transformers import CrossEncoder
        with loading("reranker", model):
            self._model = CrossEncoder(model)
        read_as_text(self._model)
        if self._model.num_labels != 1:
            raise UserError(
                f"reranker {model}: gives {self._model.num_labels} numbers for a passage, expected a model "
                "with one"
            )
        self._model.max_seq_length = min(MAX_TOKENS, self._model.max_seq_length or MAX_TOKENS)
        self._batch_size = batch_size

    def order(self, items: Sequence[Passages], topk: int) -> list[Order]:
        """For each (query, passages): (position, score) of the best `topk` passages, best first; equal scores
        keep their order."""
        pairs = [(query, passage_text(contents)) for query, passages in items for contents in passages]
        scores = (
            self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False).tolist()
            if pairs
            else []
        )
        orders: list[Order] = []
        at = 0
        for _, passages in items:
            own = scores[at : at + len(passages)]
            at += len(passages)
            orders.append(sorted(enumerate(own), key=lambda item: -item[1])[:topk])
        return orders


def passage_text(contents: str) -> str:
    """A passage as Search-R1's reranker shows it to the model."""
    title, _, text = contents.partition("\n")
    return f"(Title: {title}) {text}"
