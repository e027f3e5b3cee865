"""A search agent in the shape of a real model, without its weights: its rollouts with searches cost what a
trained model's cost.

    python -m benchmarks.gpu_searcher --size 0.5b --corpus corpus.jsonl --out DIR

All layers are random and computed whole; the first dimensions of the residual stream, which they leave alone,
tell the class of the last token, and the output layer turns the class into the next token's probabilities. So
the model thinks, searches with words of the corpus, reads, and answers, each for a random number of tokens.
It knows nothing: rewards are 0. The tokenizer is a byte-level BPE trained on the corpus, with the tags as
tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import SHAPES, qwen2_config, random_model

TAGS = [f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")]
LOUD = 3000.0
"""Of a class in the residual stream: what the layers add beside it hardly changes the last norm."""
OTHER, THOUGHT, SEARCH, QUERY, ANSWER, WORD = range(6)
"""Classes of the last token: any other (a prompt's or a document's), a thought's, the opening tag of a
search, a query's, the opening tag of an answer, an answer's."""
NEVER = -30.0


def chain(thought: float, query: float, answer: float, searches: float) -> dict[int, dict[Any, float]]:
    """Probabilities of the next token by class. Means: tokens of a thought, query and answer, and searches of
    a trajectory. Keys are tags, or classes, whose tokens are equally likely."""
    again = searches / (1 + searches)
    return {
        OTHER: {THOUGHT: 1.0},
        THOUGHT: {
            THOUGHT: 1 - 1 / thought,
            "<search>": again / thought,
            "<answer>": (1 - again) / thought,
        },
        SEARCH: {QUERY: 1.0},
        QUERY: {QUERY: 1 - 1 / query, "</search>": 1 / query},
        ANSWER: {WORD: 1.0},
        WORD: {WORD: 1 - 1 / answer, "</answer>": 1 / answer},
    }


def train_tokenizer(corpus: Path, folder: Path, *, words: int = 32_000, passages: int = 20_000) -> Any:
    """A byte-level BPE of the corpus's first passages, saved in the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    with corpus.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["contents"] for line, _ in zip(lines, range(passages), strict=False)]
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def words_of(tokenizer: Any) -> list[int]:
    """Ids of whole words: a space and letters."""
    found = (i for word, i in tokenizer.get_vocab().items() if word[0] == "Ġ" and word[1:].isalpha())
    return sorted(found)


def make_searcher(
    size: str,
    corpus: Path,
    folder: Path,
    *,
    thought: float = 60.0,
    query: float = 6.0,
    answer: float = 3.0,
    searches: float = 1.2,
    queries: Sequence[str] = (),
) -> Path:
    """Write the model in bfloat16. On average a trajectory searches so often, where `max_turns` allows it.

    With `queries` each search is for one of these texts, all equally likely, and `query` counts for nothing:
    the vocabulary has a token for each, so the model writes it in one.
    """
    import torch
    from tokenizers import AddedToken

    folder.mkdir(parents=True, exist_ok=True)
    small = size == "tiny"
    tokenizer = train_tokenizer(corpus, folder, **({"words": 3000, "passages": 500} if small else {}))
    all_words = words_of(tokenizer)
    if queries:
        # Two spaces, so that the question in a prompt is none of these tokens.
        names = [f"  {text}" for text in queries]
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
        tokenizer.save_pretrained(folder)
        query = 1.0
    config = qwen2_config(
        size,
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **({"vocab_size": len(tokenizer)} if queries else {}),
    )
    assert len(tokenizer) <= config.vocab_size, (len(tokenizer), config.vocab_size)
    model = random_model(config)
    # Every third word each, so that the last token tells what is being written.
    sets = {kind: all_words[i::3] for i, kind in enumerate((THOUGHT, QUERY, WORD))}
    tag = tokenizer.convert_tokens_to_ids
    if queries:
        sets[QUERY] = tag(names)
    table = torch.full((config.vocab_size, 6), NEVER)
    for kind, following in chain(thought, query, answer, searches).items():
        for what, p in following.items():
            if not p:
                continue
            ids = [tag(what)] if isinstance(what, str) else sets[what]
            table[ids, kind] = math.log(p / len(ids))
    kinds = torch.full((config.vocab_size,), OTHER)
    for kind, ids in sets.items():
        kinds[ids] = kind
    kinds[tag("<search>")] = SEARCH
    kinds[tag("<answer>")] = ANSWER
    with torch.no_grad():
        one_hot = torch.nn.functional.one_hot(kinds, 6)
        model.model.embed_tokens.weight[:, :6] = (LOUD * one_hot).to(model.model.embed_tokens.weight)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :6] = (table / config.hidden_size**0.5).to(model.lm_head.weight)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:6] = 0
            layer.mlp.down_proj.weight[:6] = 0
    model.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--corpus", type=Path, required=True, help="lines with `contents`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--thought", type=float, default=60.0, help="mean tokens of a thought")
    parser.add_argument("--searches", type=float, default=1.2, help="mean searches of a trajectory")
    args = parser.parse_args()
    print(make_searcher(args.size, args.corpus, args.out, thought=args.thought, searches=args.searches))


if __name__ == "__main__":
    main()
