"""Text to vectors, through sentence-transformers. Needs the extra `dense`; nothing else in the package loads torch.

A family says how a model wants its text and how its token vectors become one: Search-R1's servers and the published indexes depend
on it. Vectors are L2-normalised, so that inner products are cosines.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

import numpy as np

from .errors import BadSetting, EnvironmentLacks

BGE_QUERY = "Represent this sentence for searching relevant passages: "
FAMILIES: dict[str, tuple[str, str, str | None]] = {
    "e5": ("query: ", "passage: ", "mean"),
    "bge": (BGE_QUERY, "", "cls"),
    "contriever": ("", "", "mean"),
    "auto": ("", "", None),
}
"""Prefix of queries, prefix of passages, pooling (None: what the model's own folder says)."""
MAX_TOKENS = 256


@dataclass(frozen=True)
class EncoderSettings:
    """Kept in the index, so that queries are encoded as the passages were."""

    model: str
    """Folder or hub name of the model."""
    family: str = "auto"
    """e5, bge, contriever, or auto (no prefixes, the model's own pooling)."""
    max_tokens: int = MAX_TOKENS

    def as_dict(self) -> dict:
        return asdict(self)


def family_of(name: str | None, model: str) -> str:
    """The family for upstream's `--retriever_name`, or, where that is not given, guessed from the model's name."""
    for text in (name, model.rstrip("/").rpartition("/")[2]):
        for family in ("e5", "bge", "contriever"):
            if text and family in text.lower():
                return family
    if name and name != "auto":
        raise BadSetting(f"retriever_name {name!r}: accepted for a dense index are {', '.join(FAMILIES)}")
    return "auto"


class Encoder:
    """One model. For one thread at a time. Runs on the GPU where torch sees one, in half precision there."""

    def __init__(self, settings: EncoderSettings, *, batch_size: int = 64) -> None:
        try:
            import torch
            from sentence_transformers import SentenceTransformer
            from sentence_transformers.base.modules import Transformer
            from sentence_transformers.sentence_transformer.modules import Pooling
        except ImportError as error:
            raise EnvironmentLacks(f"dense search needs the package {error.name}: pip install 'unspiral[dense]'") from None
        if settings.family not in FAMILIES:
            raise BadSetting(f"encoder family {settings.family!r}: accepted are {', '.join(FAMILIES)}")
        self.settings, self._batch_size = settings, batch_size
        self._query_prefix, self._passage_prefix, pooling = FAMILIES[settings.family]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            if pooling is None:
                self._model = SentenceTransformer(settings.model, device=device)
            else:
                transformer = Transformer(settings.model)
                modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling)]
                self._model = SentenceTransformer(modules=modules, device=device)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise EnvironmentLacks(f"encoder {settings.model}: can't be loaded ({reason})") from None
        self._model.eval()
        self.fingerprint = _fingerprint(self._model)
        if device == "cuda":
            self._model.half()
        self._model.max_seq_length = min(settings.max_tokens, self._model.max_seq_length or settings.max_tokens)
        self.dimension = int(self._model.get_embedding_dimension())

    def queries(self, texts: list[str]) -> np.ndarray:
        """Unit vectors of queries, float32 [n, dimension]."""
        return self._encode([self._query_prefix + t for t in texts])

    def passages(self, texts: list[str]) -> np.ndarray:
        """Unit vectors of passages, float32 [n, dimension]."""
        return self._encode([self._passage_prefix + t for t in texts])

    def _encode(self, texts: list[str]) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        vectors = self._model.encode(
            texts, batch_size=self._batch_size, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )
        return np.ascontiguousarray(vectors, np.float32)


def _fingerprint(model) -> str:
    """A digest of all weights, the same wherever the model lies."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()[:32]
