"""Text to vectors, through sentence-transformers. Needs the extra `dense`; nothing else in the package loads
torch.

A family says how a model wants its text and how its token vectors become one: Search-R1's servers and the
published indexes depend on it. Vectors are L2-normalised, so that inner products are cosines.
"""

from __future__ import annotations

import copy
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from retriever_service.dense.model_files import loading, read_as_text
from services.common.errors import UserError
from services.common.loading.extras import needed_for
from services.common.names import accepted

BGE_QUERY = "Represent this sentence for searching relevant passages: "
FAMILIES: dict[str, tuple[str, str, str | None]] = {
    "e5": ("query: ", "passage: ", "mean"),
    "bge": (BGE_QUERY, "", "cls"),
    "contriever": ("", "", "mean"),
    "auto": ("", "", None),
}
"""Prefix of queries, prefix of passages, pooling (None: what the model's own folder says)."""
MAX_TOKENS = 256
CPU_BATCH = 16
GPU_BATCH = 256
"""Texts of about the same length that go through the model together. In larger ones padding costs a CPU more
than the batch saves."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EncoderSettings:
    """Kept in the index, so that queries are encoded as the passages were."""

    model: str
    """Folder or hub name of the model."""
    family: str = "auto"
    """e5, bge, contriever, or auto (no prefixes, the model's own pooling)."""
    max_tokens: int = MAX_TOKENS

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_SAVED_AS = re.compile(r"(checkpoint|step|epoch|final|best|last|latest|model|encoder)([-_.]?\d+)?")
"""Last parts of a path that say which state of a model it is, not which model."""


def family_of(name: str | None, model: str) -> str:
    """The family for upstream's `--retriever_name`, or, where that is not given, guessed from the model's
    name."""
    known = ("e5", "bge", "contriever")
    if name:
        if found := next((family for family in known if family in name.lower()), None):
            return found
        if name == "auto":
            return "auto"
        raise UserError(f"retriever_name {name!r}, for a dense index: {accepted(name, FAMILIES)}")
    words = re.split(r"[-_.]+", model_name(model).lower())
    # These have instructions of their own, and e5-mistral takes the last token's vector.
    if "mistral" in words or {"e5", "instruct"} <= set(words):
        return "auto"
    return next((family for family in known if family in words), "auto")


def model_name(model: str) -> str:
    """The model's own name in a hub id, a folder (`NAME`, `NAME/checkpoint-500`), or Hugging Face's cache
    (`models--ORG--NAME/snapshots/HASH`)."""
    parts = [part for part in model.split("/") if part]
    if len(parts) > 2 and parts[-2] == "snapshots":
        parts = parts[:-2]
    while len(parts) > 1 and _SAVED_AS.fullmatch(parts[-1].lower()):
        parts.pop()
    return parts[-1].rpartition("--")[2] if parts else ""


class Encoder:
    """One model. For one thread at a time. Runs on the GPU where torch sees one, or on `device`.

    `dtype` is one of DTYPES. `auto` is float16 on a GPU and float32 on a CPU; bfloat16 is two to three times
    as fast on a CPU that has instructions for it, and moves scores in the third digit.
    """

    def __init__(self, settings: EncoderSettings, *, dtype: str = "auto", device: str | None = None) -> None:
        with needed_for("dense search", "dense"):
            import torch
            from sentence_transformers import SentenceTransformer
            from sentence_transformers.base.modules import Transformer
            from sentence_transformers.sentence_transformer.modules import Pooling
        if settings.family not in FAMILIES:
            raise UserError(f"encoder family {settings.family!r}: {accepted(settings.family, FAMILIES)}")
        if dtype not in DTYPES:
            raise UserError(f"encoder dtype {dtype!r}: {accepted(dtype, DTYPES)}")
        self.settings = settings
        self._query_prefix, self._passage_prefix, pooling = FAMILIES[settings.family]
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        with loading("encoder", settings.model):
            if pooling is None:
                self._model = SentenceTransformer(settings.model, device=device)
            else:
                transformer = Transformer(settings.model)
                modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling)]
                self._model = SentenceTransformer(modules=modules, device=device)
        self._model.eval()
        read_as_text(self._model)
        self.fingerprint = _fingerprint(self._model)
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "float16"
        self._model.to(getattr(torch, dtype))
        self.dtype = dtype
        self._model.max_seq_length = min(
            settings.max_tokens, self._model.max_seq_length or settings.max_tokens
        )
        self.tokens = 0
        """Tokens that were encoded so far, without padding."""
        self._counts: list[Any] = []
        _count_into(self._counts, self._model)
        self._workers = _Workers(self._model, torch.get_num_threads()) if device == "cpu" else None
        self.dimension = int(self._model.get_embedding_dimension())

    def queries(self, texts: list[str]) -> np.ndarray:
        """Unit vectors of queries, float32 [n, dimension]."""
        size = min(CPU_BATCH, -(-len(texts) // self._workers.cores)) if self._workers is not None else 1
        return self._encode([self._query_prefix + t for t in texts], size)

    def passages(self, texts: list[str]) -> np.ndarray:
        """Unit vectors of passages, float32 [n, dimension]: the same bits for any number of threads."""
        return self._encode([self._passage_prefix + t for t in texts], CPU_BATCH)

    def _encode(self, texts: list[str], size: int) -> np.ndarray:
        """`size`: texts that a thread takes together on a CPU."""
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        if self._workers is not None and (len(texts) > 1 or size > 1):
            vectors = self._workers.encode(texts, size).float()
        else:
            vectors = _encoded(self._model, texts, GPU_BATCH).float()
        self.tokens += sum(int(count) for count in self._counts)
        self._counts.clear()
        return np.ascontiguousarray(
            (vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)).cpu().numpy()
        )


def _encoded(model: Any, texts: list[str], batch: int) -> Any:
    """Vectors [n, dimension] of the model's own type."""
    return model.encode(texts, batch_size=batch, convert_to_tensor=True, show_progress_bar=False)


def _count_into(counts: list[Any], model: Any) -> None:
    """Have a model, and each copy of it, add the number of tokens of each batch to a list."""

    def count(module: Any, inputs: tuple[Any, ...]) -> None:
        features = inputs[0]
        mask = features.get("attention_mask")
        counts.append(features["input_ids"].numel() if mask is None else mask.sum())

    model[0].register_forward_pre_hook(count)


class _Workers:
    """Encodes batches side by side on a CPU, one per core. That is faster than all cores on one batch after
    the other, and much faster beside other work: threads that share a batch wait for one another about a
    hundred times per batch, each time for the one that has no core."""

    def __init__(self, model: Any, cores: int) -> None:
        import torch

        self.cores = cores
        self._pool = ThreadPoolExecutor(cores, "encoder", initializer=torch.set_num_threads, initargs=(1,))
        # A tokenizer serves one thread at a time, so each has a copy of the model, whose weights are the same
        # tensors.
        weights = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._idle = [copy.deepcopy(model, dict(weights)) for _ in range(cores)]

    def encode(self, texts: list[str], size: int) -> Any:
        """As `_encoded`. Texts of about the same length go together, `size` at a time, the longest first."""
        import torch

        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        done = torch.cat(list(self._pool.map(self._encode, ([texts[i] for i in part] for part in parts))))
        return done[torch.tensor(order).argsort()]

    def _encode(self, texts: list[str]) -> Any:
        model = self._idle.pop()  # as many copies as threads
        try:
            return _encoded(model, texts, len(texts))
        finally:
            self._idle.append(model)


def _fingerprint(model) -> str:
    """A digest of all weights, the same wherever the model lies."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()[:32]
