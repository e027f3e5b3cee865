"""transformers, without the seconds that it spends on scikit-learn, and DeepSpeed's word about GPUs.

`transformers.generation` imports `sklearn.metrics` wherever scikit-learn is installed, for one curve of
assisted generation, which nothing here uses. With SciPy and pandas behind it that is half of the time that
`from transformers import AutoTokenizer` takes, in every process of a run.

It imports DeepSpeed too, where that is installed, which warns on every machine without a GPU: a line before
the answer of a command that only counts tokens. `unspiral doctor` says what the machine has.
"""

from __future__ import annotations

import logging

WARNED = "Setting accelerator to CPU"


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(WARNED)


def skip_scikit_learn() -> None:
    """Call before the first import of a class of transformers. Does nothing afterwards."""
    import transformers.utils as utils

    logging.getLogger("DeepSpeed").addFilter(_is_news)
    available = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        import transformers.generation.candidate_generator  # noqa: F401
    finally:
        utils.is_sklearn_available = available
