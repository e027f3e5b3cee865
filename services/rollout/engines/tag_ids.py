"""What a token's id alone tells of the tags that end an action. Without vLLM: the engine's process looks here
before it imports that."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

MARK = "unspiral_ids_only"
"""Key in a request's `extra_args`."""


def is_watched(params: Any) -> bool:
    """True for a request that is marked and whose stop strings can be told by token ids."""
    stops = params.stop or []
    marked = bool(params.extra_args and params.extra_args.get(MARK))
    return marked and params.include_stop_str_in_output and all("!" <= s[-1] <= "~" for s in stops)


@lru_cache(maxsize=8)
def enders(tokenizer: Any, stops: tuple[str, ...]) -> frozenset[int]:
    """Ids of tokens whose text may hold the last character of a stop string. Tokenizers spell printable ASCII
    as it is."""
    last = {stop[-1] for stop in stops}
    return frozenset(i for token, i in tokenizer.get_vocab().items() if not last.isdisjoint(token))
