"""Random models in the shapes of Qwen2.5, for measurements that need no real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES = {  # hidden, feed-forward, layers, heads, key-value heads, vocabulary, tied
    "tiny": (256, 1024, 4, 4, 2, 4096, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}


def qwen2_config(size: str, **options: Any):
    """The configuration of a size; options win."""
    from transformers import Qwen2Config

    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "tie_word_embeddings",
    )
    return Qwen2Config(**(dict(zip(names, SHAPES[size], strict=True)) | options))


def random_model(config: Any) -> Any:
    """Weights in bfloat16 from seed 0, made on the GPU where there is one."""
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def make_model(size: str, folder: Path, *, eager: bool) -> Path:
    """Random weights in bf16, and a small tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    options = {"initializer_range": 0.05, "rope_theta": 1e6, "bos_token_id": 1, "eos_token_id": 2}
    config = qwen2_config(size, max_position_embeddings=4096, **options)
    model = random_model(config)
    path = folder / size
    model.save_pretrained(path)
    count = sum(p.numel() for p in model.parameters())
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    tags = [f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")]
    words = {
        w: i
        for i, w in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *tags, *(f"n{i}" for i in range(100))])
    }
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **tokens).save_pretrained(path)
    if eager:
        (path / "eager").touch()
    print(f"{size}: {count / 1e9:.2f} B parameters, {2 * count / 1e9:.2f} GB, in {path}", flush=True)
    return path
