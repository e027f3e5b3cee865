"""transformers is imported without scikit-learn, and knows of it afterwards as before."""

from __future__ import annotations

import subprocess
import sys

import pytest
from end_to_end import ENVIRONMENT

ASK = """
import sys
{load}
from transformers.utils import is_sklearn_available
import importlib.util
print("sklearn" in sys.modules, is_sklearn_available() == (importlib.util.find_spec("sklearn") is not None))
"""
LOADS = {
    "tokenizer": "from services.rollout.worker.tokenizer import load_tokenizer\n"
    "from services.common.errors import UserError\n"
    "try: load_tokenizer('/nowhere')\nexcept UserError: pass",
    "learner": "import trainer.learner.rank\n"
    "from trainer.learner.model.attention import register\nregister()\n"
    "from transformers import AutoModelForCausalLM",
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.slow
def test_loading_leaves_scikit_learn_alone(load):
    said = subprocess.run(
        [sys.executable, "-c", ASK.format(load=load)], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert said.stdout.split() == ["False", "True"], said.stderr
    if load == LOADS["tokenizer"]:
        assert said.stderr == "", "DeepSpeed's word about GPUs comes before no answer"
