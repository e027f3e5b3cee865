"""The conversion of a GGUF file says how far it is in lines where nobody watches, and draws no bar."""

import io

import pytest

from services.common.loading.no_bars import gguf_told
from services.common.printing.console import Console
from services.common.progress import progress_on
from trainer.data.models import _by_share

transformers = pytest.importorskip("transformers")


def test_tensors_are_told_and_the_bar_comes_back():
    import transformers.modeling_gguf_pytorch_utils as gguf

    bar, told = gguf.tqdm, []
    with gguf_told(lambda done, of: told.append((done, of))):
        assert list(gguf.tqdm(["a", "b", "c"], desc="Converting")) == ["a", "b", "c"]
    assert told == [(1, 3), (2, 3), (3, 3)] and gguf.tqdm is bar
    with pytest.raises(ValueError, match="broken"), gguf_told(lambda done, of: None):
        raise ValueError("broken")
    assert gguf.tqdm is bar


def test_a_pipe_gets_plain_lines(capfd):
    import transformers.modeling_gguf_pytorch_utils as gguf

    pipe = Console(file=io.StringIO())
    with progress_on(pipe, log_seconds=0.0) as tell, gguf_told(_by_share(tell)):
        list(gguf.tqdm(range(4), desc="Converting and de-quantizing GGUF tensors..."))
    assert pipe.file.getvalue().splitlines() == [
        "convert: 25%, 1 of 4 tensors",
        "convert: 50%, 2 of 4 tensors",
        "convert: 75%, 3 of 4 tensors",
        "convert: 100%, 4 of 4 tensors",
    ]
    assert capfd.readouterr() == ("", "")


def test_transformers_reads_the_file_by_the_name_that_is_replaced():
    """Another version may read it otherwise: then its own bar would be back in every log."""
    import inspect

    import transformers.modeling_gguf_pytorch_utils as gguf

    assert " in tqdm(" in inspect.getsource(gguf.load_gguf_checkpoint)
