"""vLLM's front end for our requests: it stops where vLLM's own would, and keeps the same numbers."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollout_fakes import words
from rollout_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from services.common.errors import UserError
from services.rollout.engines import vllm_engine
from services.rollout.engines.base import GenerateCall
from services.rollout.engines.vllm_scoring import scoring_requests
from services.settings import RolloutSettings
from trainer.config.schema import parse_config

pytestmark = pytest.mark.vllm

STOPS = ("</search>", "</answer>")


def bytes_tokenizer(vocabulary=320):
    """A byte-level BPE whose tags are several tokens each."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(["<search> who is this </search>. <answer> naïve x>y </answer>!"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def pieces_tokenizer():
    """Pieces with a mark for spaces and bytes as a last resort, as SentencePiece's."""
    vocabulary = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)}
    for piece in ("▁", "▁who", "search", "</", "answer", ">", "</search>", "x>", "▁<", "/", "<"):
        vocabulary[piece] = len(vocabulary)
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


def request(stops=STOPS, mark=True, **more):
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    params = SamplingParams(
        stop=list(stops),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=0,
        flat_logprobs=True,
        extra_args={"unspiral_ids_only": True} if mark else None,
        **more,
    )
    return EngineCoreRequest("r", [1, 2], None, params, None, 0.0, None, None, None, external_req_id="r")


def fed(detokenizer, ids):
    """Tokens until a stop string, the string, and the text at the end."""
    for n, token in enumerate(ids, 1):
        if stop := detokenizer.update([token], False):
            return n, stop, detokenizer.get_next_output_text(True, False)
    return len(ids), None, detokenizer.get_next_output_text(True, False)


@pytest.mark.parametrize("make", [bytes_tokenizer, pieces_tokenizer, words])
def test_a_request_stops_at_the_token_at_which_vllm_stops(make):
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    from services.rollout.engines.vllm_front_end import TagWatcher

    tokenizer, chance = make(), random.Random(0)
    # Bytes that are no UTF-8 are read otherwise one by one than as a whole, which is how the loop reads.
    ids = sorted(i for token, i in tokenizer.get_vocab().items() if not token.startswith("<0x"))
    enders = [i for i in ids if ">" in tokenizer.decode([i])]
    tags = [tokenizer.encode(stop, add_special_tokens=False) for stop in STOPS]
    stopped = 0
    for _ in range(150):
        row = []
        while len(row) < 40:
            row += chance.choice(
                [[chance.choice(ids)], [chance.choice(enders)], chance.choice(tags)[: chance.randint(1, 9)]]
            )
        theirs = fed(IncrementalDetokenizer.from_new_request(tokenizer, request()), row)
        ours = fed(TagWatcher(tokenizer, STOPS), row)
        assert ours[:2] == theirs[:2], [tokenizer.decode([i]) for i in row]
        stopped += ours[1] is not None
        # vLLM's text of single tokens keeps a space that begins it, and loses broken bytes.
        if ours[1] is not None and make is not pieces_tokenizer:
            assert ours[2].lstrip() == theirs[2].lstrip()
    assert stopped > 20, "rows without a tag test nothing"


def test_tokens_after_a_stop_string_are_left_out_also_where_several_come_at_once():
    from services.rollout.engines.vllm_front_end import TagWatcher

    tokenizer = bytes_tokenizer()
    tag = tokenizer.encode("who</answer>")
    watcher = TagWatcher(tokenizer, STOPS)
    assert watcher.update([*tag, *tokenizer.encode(" is this")], False) == "</answer>"
    assert watcher.output_token_ids == tag
    assert watcher.get_next_output_text(True, False) == "who</answer>"


def test_only_marked_requests_whose_tags_ids_can_tell_are_watched():
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from services.rollout.engines import vllm_front_end as front

    tokenizer = bytes_tokenizer()

    def kinds(asked):
        return tuple(
            type(place.from_new_request(tokenizer=tokenizer, request=asked))
            for place in (front._Detokenizers, front._Logprobs)
        )

    own = (FastIncrementalDetokenizer, LogprobsProcessor)
    assert kinds(request()) == (front.TagWatcher, front.SampledOnly)
    assert kinds(request(mark=False)) == own
    for stop in ("done\n", "終", "end "):  # a tokenizer spells these last characters in its own way
        assert kinds(request(stops=(*STOPS, stop))) == own


def test_log_probs_are_those_of_the_sampled_tokens_to_the_bit():
    from vllm.v1.outputs import LogprobsLists

    from services.rollout.engines import vllm_front_end as front

    kept = front._Logprobs.from_new_request(None, request())
    own = front._Logprobs.from_new_request(None, request(mark=False))
    rng = np.random.default_rng(0)
    sent = []
    for count in (1, 1, 3, 1):
        ids = rng.integers(0, 99, (count, 1))
        values = rng.normal(size=(count, 1)).astype(np.float32)
        output = SimpleNamespace(
            new_token_ids=ids[:, 0].tolist(),
            new_logprobs=LogprobsLists(ids, values, np.ones(count, np.int64)),
            new_prompt_logprobs_tensors=None,
            prompt_token_id_logprobs=None,
        )
        kept.update_from_output(output)
        own.update_from_output(output)
        sent += ids[:, 0].tolist()
    assert list(kept.logprobs) == [p[i].logprob for p, i in zip(own.logprobs, sent, strict=True)]
    assert len(kept.logprobs) == 6
    by_rank = LogprobsLists(np.array([[4, 9]]), np.array([[-0.1, -2.5]], np.float32), np.ones(1, np.int64))
    kept.update_from_output(SimpleNamespace(new_token_ids=[9], new_logprobs=by_rank))
    assert kept.logprobs[-1] == -2.5


def test_no_request_has_its_parameters_copied_deeply():
    call = GenerateCall("r", [1, 2], max_tokens=4, temperature=1.0, stop=STOPS, seed=None)
    scored = [params for _, params in scoring_requests([1, 2, 3], 0.5)]
    for params in (vllm_engine._sampling(call), *scored):
        assert params.clone().stop is params.stop


def test_a_vllm_with_another_output_processor_fails_loudly(monkeypatch):
    from services.rollout.engines import vllm_front_end as front

    monkeypatch.delattr(front.output_processor, "LogprobsProcessor")
    with pytest.raises(RuntimeError, match="LogprobsProcessor is not in this version of vLLM"):
        front.install()


async def test_logits_in_float32_are_nearer_to_the_learners(tmp_path, monkeypatch, without_llvmlite):
    """A bfloat16 policy in real vLLM with either head, and by transformers with float32 logits."""
    for name, value in vllm_engine.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    model = tiny_model(tmp_path, tied=True, scale=2.0).bfloat16()
    with torch.no_grad():  # layers that add nothing: what differs is the head alone
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(tmp_path)
    rows = [[1, *range(5, 60)], [1, *range(60, 20, -1)] * 2]
    expected = []
    for row in rows:
        with torch.no_grad():
            hidden = model.model(torch.tensor([row])).last_hidden_state[0, :-1].float()
            logits = hidden @ model.lm_head.weight.float().T
        expected += logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
    gaps = {}
    for head in ("model", "float32"):
        settings = RolloutSettings(
            max_model_tokens=256, kv_cache_gib=0.1, dtype="bfloat16", head_dtype=head, deterministic=True
        )
        engine = await vllm_engine.LockstepVllmEngine.start(str(tmp_path), settings, 0)
        try:
            scored = [p for row in await engine.logprobs(rows, 1.0) for p in row[1:]]
        finally:
            await engine.close()
        gaps[head] = float(np.mean(np.abs(np.array(scored) - expected)))
    assert gaps["float32"] < 1e-4 < 1e-3 < gaps["model"], gaps


def test_only_vllm_takes_a_type_for_its_logits():
    with pytest.raises(UserError, match=r"head_dtype=float32 needs rollout\.engine=vllm"):
        parse_config(
            {
                "model": {"path": "m"},
                "data": {"train": "t"},
                "retriever": {"url": "http://127.0.0.1:1"},
                "rollout": {"engine": "transformers", "head_dtype": "float32"},
            }
        )


def test_the_benchmark_of_the_front_end_finds_ours_cheaper(tmp_path):
    from benchmarks.rollout import front_end
    from services.rollout.engines import vllm_front_end as front

    front.install()
    tokenizer = bytes_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    costs = {
        way: [front_end.seconds_per_token(tokenizer, str(tmp_path), 16, 20, way, seed) for seed in range(3)]
        for way in front_end.WAYS
    }
    engine, other = ({way: min(pair[i] for pair in pairs) for way, pairs in costs.items()} for i in (0, 1))
    assert 0 < other["held"] < other["ids"] < other["vLLM's own"]
    assert 0 < engine["held"] < engine["ids"]
