"""transformers, without the seconds that it spends on scikit-learn.

`transformers.generation` imports `sklearn.metrics` wherever scikit-learn is installed, for one curve of
assisted generation, which nothing here uses. With SciPy and pandas behind it that is half of the time that
`from transformers import AutoTokenizer` takes, in every process of a run.
"""

from __future__ import annotations


def skip_scikit_learn() -> None:
    """Call before the first import of a class of transformers. Does nothing afterwards."""
    import transformers.utils as utils

    available = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        import transformers.generation.candidate_generator  # noqa: F401
    finally:
        utils.is_sklearn_available = available
