"""transformers without bars."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from services.common.loading.no_bars import without_bars


@pytest.fixture(autouse=True)
def _with_bars():
    before = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    yield
    if not before:
        logging.disable_progress_bar()


def test_a_model_is_written_and_read_without_a_line(tmp_path, capsys):
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    model.save_pretrained(tmp_path / "with")
    assert "Writing model shards" in capsys.readouterr().err, "transformers has no bar any more"
    with without_bars():
        model.save_pretrained(tmp_path / "without")
        LlamaForCausalLM.from_pretrained(tmp_path / "without")
    assert capsys.readouterr().err == ""
    assert logging.is_progress_bar_enabled(), "those of downloads are gone"


def test_bars_that_are_off_stay_off():
    logging.disable_progress_bar()
    with without_bars():
        pass
    assert not logging.is_progress_bar_enabled()
