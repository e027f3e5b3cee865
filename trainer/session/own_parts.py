"""The parts of a configuration that may be code of the user's own, loaded as a run loads them: no model, no
cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from retriever_service.search.users_index import load_search
from services.common.loading.user_code import is_import_path
from services.rollout.worker.templates import template_class
from services.rollout.worker.tools import load_tools
from trainer.algorithm_names import is_known_loss
from trainer.config.algorithm import load_users_loss
from trainer.config.schema import Config
from trainer.loop.records.users_metrics import StepMetrics, load_metrics
from trainer.rewards import Reward, make_reward, right_at


@dataclass(frozen=True)
class Part:
    """One part: its key, what the configuration says, and its loading, which raises UserError."""

    key: str
    value: str
    load: Callable[[], object]


def parts_of(config: Config) -> Iterator[Part]:
    """Reward, template, tools, metrics, loss and retrievers, as far as a configuration names them."""
    yield Part("reward.kind", config.reward.kind, lambda: _reward(config))
    template = config.rollout.template
    yield Part("rollout.template", template, lambda: template_class(template))
    for name, path in config.rollout.tools.items():
        yield Part(f"rollout.tools.{name}", path, partial(load_tools, {name: path}))
    for path in config.trainer.metrics:
        yield Part("trainer.metrics", path, partial(load_metrics, [path]))
    loss = config.algorithm.loss
    if not is_known_loss(loss):
        yield Part("algorithm.loss", loss, partial(load_users_loss, loss))
    held_out = config.evaluation.retriever
    indexes = {
        "retriever.index": config.retriever.index,
        "evaluation.retriever.index": held_out.index if held_out else None,
    }
    for key, index in indexes.items():
        if index and is_import_path(index):
            yield Part(key, index, partial(load_search, key, index))


@dataclass(frozen=True)
class OwnParts:
    """Those that the driver itself calls. Workers and learner load theirs in processes of their own."""

    reward: Reward
    metrics: Mapping[str, StepMetrics]
    """By their paths."""


def load_parts(config: Config) -> OwnParts:
    """Load all of them, each once. Raises UserError for the first that is not there or fails."""
    reward = _reward(config)
    for part in parts_of(config):
        if part.key not in ("reward.kind", "trainer.metrics"):
            part.load()
    return OwnParts(reward, load_metrics(config.trainer.metrics))


def _reward(config: Config) -> Reward:
    reward = make_reward(config.reward.kind)
    right_at(reward, config.reward.right_at)
    return reward
