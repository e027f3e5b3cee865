"""Tokens that wait in vLLM's engine process: what is sent, when, and that none is lost."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from rollout_fakes import words

from services.rollout.engines.vllm_engine import IDS_ONLY

pytestmark = pytest.mark.vllm

STOPS = ("</search>", "</answer>")


def params(marks=IDS_ONLY, kind="FINAL_ONLY", **more):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        stop=list(STOPS),
        include_stop_str_in_output=True,
        logprobs=0,
        extra_args=marks,
        output_kind=RequestOutputKind[kind],
        **more,
    )


def output(name, *ids, end=None, logprobs=True, **more):
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    column = np.array(ids, np.int64)[:, None]
    numbers = LogprobsLists(column, -column.astype(np.float32), np.ones(len(ids), np.int64))
    return EngineCoreOutput(
        name, list(ids), new_logprobs=numbers if logprobs else None, finish_reason=end, **more
    )


def step(*outputs):
    from vllm.v1.engine import EngineCoreOutputs

    return {0: EngineCoreOutputs(outputs=list(outputs))}


@pytest.fixture
def holder(tmp_path):
    from services.rollout.engines.vllm_held_outputs import Holder

    words().save_pretrained(tmp_path)
    return Holder(str(tmp_path))


@pytest.fixture
def running():
    return {name: SimpleNamespace(sampling_params=params(), client_index=0) for name in ("a", "b")}


def sent(holder, outputs, running):
    holder.hold(outputs, running)
    return [o for client in outputs.values() for o in client.outputs]


def test_log_probs_are_those_of_the_sampled_tokens_beside_requests_that_ask_for_more(holder, running):
    """A step that scores a text by generation gives every row the columns of the likeliest tokens."""
    from vllm.v1.engine import FinishReason

    assert sent(holder, step(output("a", 20)), running) == []
    wider = output("a", 21)
    ids, logprobs, ranks, _ = wider.new_logprobs
    beside = np.full((1, 2), 9)
    columns = (np.hstack([kind, beside]) for kind in (ids, logprobs))
    wider.new_logprobs = type(wider.new_logprobs)(*columns, ranks)
    assert sent(holder, step(wider), running) == []
    (last,) = sent(holder, step(output("a", 22, end=FinishReason.LENGTH)), running)
    assert last.new_token_ids == [20, 21, 22]
    assert last.new_logprobs.logprobs.tolist() == [[-20.0], [-21.0], [-22.0]]
    assert last.new_logprobs.logprob_token_ids.tolist() == [[20], [21], [22]]


def test_all_tokens_of_an_action_come_at_its_end_in_order_with_their_log_probs(holder, running):
    from vllm.v1.engine import FinishReason
    from vllm.v1.metrics.stats import PrefillStats

    prompt = PrefillStats()
    assert sent(holder, step(output("a", 20, prefill_stats=prompt), output("b", 30)), running) == []
    assert sent(holder, step(output("a", 21), output("b", 31)), running) == []
    del running["a"]  # as vLLM does before it tells of the end
    (whole,) = sent(holder, step(output("a", 22, end=FinishReason.LENGTH), output("b", 32)), running)
    assert whole.new_token_ids == [20, 21, 22] and whole.finish_reason == FinishReason.LENGTH
    assert whole.prefill_stats is prompt
    assert whole.new_logprobs.logprob_token_ids[:, 0].tolist() == [20, 21, 22]
    assert whole.new_logprobs.logprobs[:, 0].tolist() == [-20, -21, -22]
    (other,) = sent(holder, step(output("b", 33, end=FinishReason.STOP)), running)
    assert other.new_token_ids == [30, 31, 32, 33]


def test_a_step_in_which_all_waits_sends_no_message_at_all(holder, running):
    outputs = step(output("a", 20))
    holder.hold(outputs, running)
    assert outputs == {}
    outputs = step(output("a", 21))
    outputs[0].finished_requests = {"z"}
    holder.hold(outputs, running)
    assert outputs[0].finished_requests == {"z"} and outputs[0].outputs == []


def test_a_token_that_may_end_a_tag_brings_what_was_held_before_it(holder, running):
    tokenizer = words()
    end = tokenizer.convert_tokens_to_ids("</search>")
    assert sent(holder, step(output("a", 20)), running) == []
    (part,) = sent(holder, step(output("a", end)), running)
    assert part.new_token_ids == [20, end] and part.finish_reason is None
    assert sent(holder, step(output("a", 21)), running) == [], "what was sent is not sent again"
    (rest,) = sent(holder, step(output("a", end)), running)
    assert rest.new_token_ids == [21, end] and len(rest.new_logprobs.logprobs) == 2


@pytest.mark.parametrize(
    "asked",
    [
        lambda: params(marks=None),
        lambda: params(marks={"unspiral_ids_only": True}),
        lambda: params(kind="CUMULATIVE"),
        lambda: params(prompt_logprobs=0),
        lambda: None,
    ],
    ids=["unmarked", "ids alone", "streamed", "scored", "pooled"],
)
def test_other_requests_are_told_of_each_token(holder, asked):
    running = {"a": SimpleNamespace(sampling_params=asked(), client_index=0)}
    for token in (20, 21):
        (one,) = sent(holder, step(output("a", token)), running)
        assert one.new_token_ids == [token]


def test_what_an_ended_request_left_is_forgotten(holder, running):
    sent(holder, step(output("a", 20), output("b", 30)), running)
    holder.drop(["a", "unknown"])
    assert {c: [o.request_id for o in out] for c, out in holder.flush().items()} == {0: ["b"]}
    assert holder.flush() == {}, "flushed once"
    (rest,) = sent(holder, step(output("b", 31, end="stop")), running)
    assert rest.new_token_ids == [31]


class Core:
    """vLLM's engine process, as far as `install` extends it."""

    def __init__(self, folder, running):
        import queue

        model = SimpleNamespace(tokenizer=str(folder), model="unused")
        self.vllm_config = SimpleNamespace(model_config=model)
        self.scheduler = SimpleNamespace(requests=running)
        self.output_queue = queue.Queue()
        self.version = "7"

    def _attach_weight_version(self, outputs):
        for one in outputs.values():
            one.weight_version = self.version

    def set_weight_version(self, version):
        self.version = version

    def get_weight_version(self):
        return self.version

    def abort_requests(self, names): ...

    def _send_finish_outputs_to_client(self, names, client, reason): ...


@pytest.fixture
def core(tmp_path, running, monkeypatch):
    import vllm.v1.engine.core as vllm_core

    from services.rollout.engines import vllm_held_outputs

    kind = type("Core", (Core,), {})
    monkeypatch.setattr(vllm_core, "EngineCoreProc", kind)
    words().save_pretrained(tmp_path)
    vllm_held_outputs.install()
    vllm_held_outputs.install()  # again changes nothing
    return kind(tmp_path, running)


def test_tokens_held_when_the_weights_change_go_out_under_the_version_that_wrote_them(core, running):
    outputs = step(output("a", 20), output("b", 30))
    core._attach_weight_version(outputs)
    assert outputs == {}
    core.set_weight_version("8")
    client, early = core.output_queue.get_nowait()
    assert (client, early.weight_version) == (0, "7")
    assert [o.new_token_ids for o in early.outputs] == [[20], [30]]
    assert core.version == "8" and core.output_queue.empty()
    later = step(output("a", 21, end="length"))
    core._attach_weight_version(later)
    assert later[0].weight_version == "8" and later[0].outputs[0].new_token_ids == [21]


@pytest.mark.parametrize("how", ["abort", "finish"])
def test_an_ended_requests_tokens_are_not_kept(core, how):
    core._attach_weight_version(step(output("a", 20), output("b", 30)))
    if how == "abort":
        core.abort_requests(["a"])
    else:
        core._send_finish_outputs_to_client(["a"], 0, "abort")
    core.set_weight_version("8")
    _, early = core.output_queue.get_nowait()
    assert [o.request_id for o in early.outputs] == ["b"]


def test_a_vllm_with_another_engine_process_fails_loudly(monkeypatch):
    import vllm.v1.engine.core as vllm_core

    from services.rollout.engines import vllm_held_outputs

    monkeypatch.setattr(vllm_core, "EngineCoreProc", type("Other", (), {}))
    with pytest.raises(RuntimeError, match=r"EngineCoreProc\._attach_weight_version is not in this version"):
        vllm_held_outputs.install()
