"""transformers without its progress bars: they stand between our own lines, and fill a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_bars() -> Iterator[None]:
    """Inside, transformers loads and writes models without a bar. Bars of downloads come back on leaving."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


@contextmanager
def gguf_told(tell: Callable[[int, int], None]) -> Iterator[None]:
    """Inside, transformers converts a GGUF file without its own bar, which no setting of it turns off. tell:
    called with the tensors that are done, and with all of them."""
    import transformers.modeling_gguf_pytorch_utils as gguf

    bar = getattr(gguf, "tqdm", None)
    if bar is None:
        yield
        return

    def told(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors, 1):
            yield tensor
            tell(done, len(tensors))

    gguf.tqdm = told
    try:
        yield
    finally:
        gguf.tqdm = bar
