"""A tiny BERT with random weights and a word vocabulary, as an encoder and as a cross-encoder: real loading
code, no download."""

from __future__ import annotations

import re

import pytest

from tests.retriever.retriever_fixtures import CORPUS


def _tokenizer(folder):
    from transformers import BertTokenizerFast

    words = sorted(set(re.findall(r"\w+", CORPUS.read_text("utf-8").lower())))
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *",.:'\"()", *words]) + "\n", "utf-8"
    )
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=64)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _config(vocabulary: int):
    from transformers import BertConfig

    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory) -> str:
    torch = pytest.importorskip("torch")
    from transformers import BertModel

    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(3)
    BertModel(_config(_tokenizer(folder))).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_reranker(tmp_path_factory) -> str:
    import torch
    from transformers import BertForSequenceClassification

    folder = tmp_path_factory.mktemp("reranker")
    torch.manual_seed(4)
    config = _config(_tokenizer(folder))
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(folder)
    return str(folder)
