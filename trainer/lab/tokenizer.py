"""The laboratory's tokenizer: one word, one token, saved as an ordinary Hugging Face tokenizer folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.lab.world import NAMES, QUESTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
TAGS = (
    "<think>",
    "</think>",
    "<search>",
    "</search>",
    "<information>",
    "</information>",
    "<answer>",
    "</answer>",
    "<doc>",
)
WORDS = (
    "first",
    "then",
    "found",
    "nothing",
    "invalid",
    "born",
    "guild",
    "craft",
    "river",
    "mayor",
    "colour",
    "hall",
)


def vocabulary() -> list[str]:
    """All tokens, in the order of their ids. The model has exactly these rows, so that sampler and learner
    have the same support."""
    asked = dict.fromkeys(w for wording in QUESTIONS.values() for w in wording.split() if w != "{}")
    return [*SPECIAL, *TAGS, *dict.fromkeys([*WORDS, *asked]), *NAMES]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words are split at white space and joined by single spaces; nothing is added when encoding. Unknown
    words become `<unk>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary())}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(
        prefix="##", cleanup=False
    )  # joins by spaces, also where tokens are decoded one by one
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
