"""The policy's tokenizer, as it was saved.

`AutoTokenizer` gives every model of type qwen2 (and some others) the tokenizer class of that type, whatever
the folder says: a word-level tokenizer saved beside a Qwen2 model comes back as a byte-level one, and most of
its words are gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.loading.quick_transformers import skip_scikit_learn

_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Saved classes that mean: what tokenizer.json says, and nothing else."""


def load_tokenizer(model_path: str | Path) -> Any:
    """The tokenizer of a model folder. Raises UserError."""
    from transformers import PreTrainedTokenizerFast

    folder = Path(model_path)
    saved = folder / "tokenizer_config.json"
    skip_scikit_learn()
    from transformers import AutoTokenizer

    try:
        settings = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else {}
        # Not by AutoTokenizer, which would choose the class by the model's type.
        if settings.get("tokenizer_class") in _GENERIC and (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(model_path)
    except Exception as e:  # damaged files end in any of them, and the Rust part knows this one alone
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise UserError(
            f"model.path {model_path}: no tokenizer could be loaded (expected tokenizer.json): {reason}"
        ) from None


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """Text of ids, with special tokens, and spaces as they are. transformers looks at every id before the
    tokenizer does, which takes longer than the text itself: a tokenizer that leaves decoding to its Rust
    backend is asked there."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
    )
    if plain:
        backend = tokenizer.backend_tokenizer

        def decode(ids: list[int]) -> str:
            text: str = backend.decode(ids, skip_special_tokens=False)
            return text
    else:

        def decode(ids: list[int]) -> str:
            text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            return text

    return decode
