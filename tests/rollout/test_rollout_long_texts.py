"""Passages as long as books: no more of them is encoded than an observation shows, and the worker's loop goes
on meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
from rollout_fakes import Hit, byte_bpe, request, words
from test_rollout_worker import Engine, Receiver

from services.rollout.worker import worker as module
from services.rollout.worker.templates import make_template
from services.rollout.worker.templates.base import CHARS_PER_TOKEN, SPARE_CHARS
from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings

LAB = words()


def prose(words: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(
        "".join(draw.choices("abcdefghij \u00e9\u4e16", k=draw.randint(1, 12))) for _ in range(words)
    )


class Counting:
    """A template's `encode` that notes how many characters it was given."""

    def __init__(self, template):
        self.encode, self.characters = template.encode, 0
        template.encode = self

    def __call__(self, *pieces):
        self.characters += sum(map(len, pieces))
        return self.encode(*pieces)


@pytest.mark.parametrize("budget", [40, 500])
@pytest.mark.parametrize("length", [30, 4_000, 150_000])
def test_long_passages_give_the_ids_that_the_whole_text_begins_with(budget, length):
    template = make_template("search_r1", byte_bpe([prose(300, 9)]), RolloutSettings(max_obs_tokens=budget))
    hits = [Hit("a", f'"Title"\n{prose(length // 7, 1)}'), Hit("b", f'"Other"\n{prose(length // 7, 2)}')]
    whole, documents = (
        template.encode(f"{template.head}{template.documents(hits)}{template.tail}"),
        template.encode(template.documents(hits)),
    )
    head, tail = template.encode(template.head), template.encode(template.tail)
    counting = Counting(template)
    observation = template.observation_ids(hits, budget)
    if len(whole) <= budget:
        assert observation.token_ids == whole
    else:
        kept = observation.token_ids[len(head) : -len(tail)]
        assert observation.token_ids == [*head, *kept, *tail] and kept == documents[: len(kept)]
        assert (
            budget - 4 <= len(observation.token_ids) <= budget
        )  # a cut inside a character takes up to three
    assert counting.characters <= 2 * (CHARS_PER_TOKEN * (budget + 1) + SPARE_CHARS)


@pytest.mark.parametrize(
    "text", ["x" * 150_000, " " * 150_000, "\u4e16" * 150_000, "\U0001f600" * 50_000, "<unk> " * 30_000]
)
def test_texts_of_a_few_or_of_many_characters_a_token_fit_the_budget_too(text):
    for tokenizer in (byte_bpe(["xx  " * 50]), LAB):
        template = make_template("search_r1", tokenizer, RolloutSettings())
        assert len(template.observation_ids([Hit("a", text)], 500).token_ids) <= 500


async def test_observations_are_made_beside_the_loop_one_at_a_time(monkeypatch, tmp_path):
    """Twelve searches that return together; a user's template that takes long over each."""
    active, most, ping, longest = 0, 0, 0, 0.0

    class Engine2(Engine):
        async def generate(self, call):
            if call.request_id.endswith(".0"):
                self.script.insert(0, "<search> n3 </search>")
                return await Engine.__mro__[1].generate(self, call)
            return await super().generate(call)

    def slow(hits, budget):
        nonlocal active, most
        assert threading.current_thread() is not threading.main_thread()
        active += 1
        most = max(most, active)
        seen, until = ping, time.monotonic() + 60
        while ping < seen + 2:  # the loop comes round meanwhile
            assert time.monotonic() < until, "the loop stands still"
            time.sleep(0.001)
        active -= 1
        return original(hits, budget)

    async def start_engine(settings, model_path, seed):
        return Engine2()

    monkeypatch.setattr(module, "start_engine", start_engine)
    monkeypatch.setattr(module, "make_receiver", lambda sync, model_path: Receiver(tmp_path))
    monkeypatch.setattr(module, "load_tokenizer", lambda path: words())
    settings = RolloutSettings(template="lab", max_obs_tokens=32, max_model_tokens=128)
    worker = RolloutWorker(
        "w", settings, model_path="m", retriever_url="http://127.0.0.1:9", retriever_timeout_seconds=1
    )
    await worker.start()
    original, worker._reader.observation_ids = worker._reader.observation_ids, slow

    def _search(url):
        async def search(query):
            return [Hit("a", "n3 " * 50_000)]

        return search

    worker._search = _search
    running = asyncio.gather(*(worker.rollout(request(f"u{i}")) for i in range(12)))
    while not running.done():
        began = time.monotonic()
        await asyncio.sleep(0.002)
        assert worker.info().state == "ready"
        ping, longest = ping + 1, max(longest, time.monotonic() - began)
    done = await running
    assert [t.searches for t in done] == [1] * 12 and most == 1
    assert all(len(t.segments[1].token_ids) == 32 for t in done)
    assert ping > 20, f"the loop came round {ping} times in 0.6 s, at most {longest:.2f} s late"
    await worker.close()
