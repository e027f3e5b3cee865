"""Parts of the rollout tests: small tokenizers, and a scripted engine behind the engine protocol."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from services.contracts import Question, TrajectoryRequest
from services.rollout.engines.base import Generation


@dataclass(frozen=True)
class Hit:
    id: str
    contents: str
    score: float = 1.0


class ScriptedEngine:
    """Writes the given texts or id lists, one a call, and records the ids that it was given."""

    def __init__(self, tokenizer, script, *, eos_id=None, logprob=-0.5):
        self.tokenizer, self.script, self.eos_id, self.logprob = tokenizer, list(script), eos_id, logprob
        self.prompts, self.seeds, self.max_tokens = [], [], []

    async def generate(self, call):
        self.prompts.append(list(call.token_ids))
        self.seeds.append(call.seed)
        self.max_tokens.append(call.max_tokens)
        await asyncio.sleep(0)
        written = self.script.pop(0)
        ids = (
            list(written)
            if not isinstance(written, str)
            else self.tokenizer.encode(written, add_special_tokens=False)
        )
        ids = ids[: call.max_tokens]
        logprobs = [self.logprob(i) if callable(self.logprob) else self.logprob for i in range(len(ids))]
        text = self.tokenizer.decode(ids)
        finish = (
            "eos" if ids[-1] == self.eos_id else "stop" if any(s in text for s in call.stop) else "length"
        )
        return Generation(ids, logprobs, text, finish, 7)


class ScriptedWorker:
    """A WorkerHandle whose calls are answered by `does(method, *args)`."""

    def __init__(self, does):
        self.does, self.calls, self.killed = does, 0, False

    async def _answer(self, method, *args, timeout_seconds):
        self.calls += 1
        return await asyncio.wait_for(self.does(method, *args), timeout_seconds)

    async def info(self, *, timeout_seconds):
        return await self._answer("info", timeout_seconds=timeout_seconds)

    async def start(self, *, timeout_seconds):
        return await self._answer("start", timeout_seconds=timeout_seconds)

    async def rollout(self, request, *, timeout_seconds):
        return await self._answer("rollout", request, timeout_seconds=timeout_seconds)

    async def rollout_batch(self, requests, *, timeout_seconds):
        return await self._answer("rollout_batch", requests, timeout_seconds=timeout_seconds)

    async def update_weights(self, update, *, timeout_seconds):
        return await self._answer("update_weights", update, timeout_seconds=timeout_seconds)

    async def offer_weights(self, receiver, version, backend, *, timeout_seconds):
        return await self._answer(
            "offer_weights", receiver, version, backend, timeout_seconds=timeout_seconds
        )

    async def lend_weights(self, update, *, timeout_seconds):
        await self._answer("lend_weights", update, timeout_seconds=timeout_seconds)

    async def logprobs(self, token_ids, temperature, *, timeout_seconds):
        return await self._answer("logprobs", token_ids, temperature, timeout_seconds=timeout_seconds)

    async def engine_pids(self, *, timeout_seconds):
        return await self._answer("engine_pids", timeout_seconds=timeout_seconds)

    async def sleep(self, *, timeout_seconds):
        await self._answer("sleep", timeout_seconds=timeout_seconds)

    async def wake(self, *, timeout_seconds):
        await self._answer("wake", timeout_seconds=timeout_seconds)

    async def close(self, *, timeout_seconds):
        await self._answer("close", timeout_seconds=timeout_seconds)

    def stacks(self):
        return None

    def kill(self):
        self.killed = True


def byte_bpe(texts: list[str], merges: int = 120):
    """A byte-level BPE tokenizer trained on `texts`: most random id sequences are not what it would encode
    their text to."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257 + merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_bpe():
    """A byte-level BPE with the control tokens of a chat model: special ones, added ones that are not, a run
    of spaces, and a chat template."""
    from tokenizers import AddedToken

    tokenizer = byte_bpe(["Question: who is it? <search> <|im_end|> Doc 1(Title: x) "] * 3)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    plain = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[INST]", "    "]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    tokenizer.chat_template = CHAT
    return tokenizer


def words(names: int = 40, more: tuple[str, ...] = ()):
    """A word-level tokenizer with the tags, `n0 n1 ...` and `more`; one word, one token."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tags = [f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")]
    plain = [
        "<doc>",
        "what",
        "is",
        "the",
        "where",
        "?",
        "born",
        "river",
        "nothing",
        "invalid",
        "first",
        "then",
        "found",
    ]
    vocabulary = ["<pad>", "<bos>", "<eos>", "<unk>", *tags, *plain, *(f"n{i}" for i in range(names)), *more]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def request(
    uid="u0", text="what is n1 ?", seed=3, temperature=1.0, group="g0", prompt=None
) -> TrajectoryRequest:
    return TrajectoryRequest(
        uid, group, Question(f"q-{uid}", text, ("n1",), "lab", prompt), seed, temperature
    )


def not_a_template(tokenizer, settings):
    """What a wrong import path may lead to."""
    return object()
