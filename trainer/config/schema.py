"""The configuration of a run: typed sections, YAML in, one clear line out when something is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python
from ruamel.yaml import YAML

from services.common.errors import UserError
from services.common.http.addresses import is_http
from services.common.loading.user_code import with_colon
from services.common.names import accepted, near_name, nearest
from services.common.printing.kinds import shown
from services.common.redaction import address_without_secrets
from services.common.users_files import parse_yaml
from services.common.validation import fitting
from services.settings import (
    ControlSettings,
    ImportPath,
    MonitorSettings,
    ProbeSettings,
    RetrieverSettings,
    RolloutSettings,
    Settings,
    StoreSettings,
    TrackingSettings,
    WeightSyncSettings,
)
from trainer.config.algorithm import AlgorithmSettings
from trainer.config.aliases import keys_like, keys_with, meant_by
from trainer.config.data_settings import DataSettings
from trainer.config.expected import expected
from trainer.config.gpu_places import check_places, fill_in_workers
from trainer.config.held_out_scores import BestBy
from trainer.config.learner import LearnerSettings
from trainer.config.run_name import RunName
from trainer.config.yaml_file import Written, read_sections, refuse_missing_space
from trainer.rewards import ACCEPTED, is_kind


class RunSettings(Settings):
    """The folder of a run, `dir/name`."""

    name: RunName = "run"
    """Name of the run; letters, digits, dot, dash and underscore."""
    dir: str = "runs"
    """Folder of all runs."""


class ModelSettings(Settings):
    """The policy."""

    path: str
    """Folder in Hugging Face form (config.json, safetensors, tokenizer), a name on the hub (ORG/NAME), or one
    that `unspiral model list` knows."""


class EvalSettings(Settings):
    """Evaluation during a run and in `unspiral eval`."""

    limit: int | None = Field(None, ge=1)
    """Questions scored during a run; None is all. `unspiral eval` scores all, or as many as its --limit."""
    sampled: bool = False
    """Score at the sampling temperature also (greedy is always scored)."""
    retriever: RetrieverSettings | None = None
    """Another corpus to search in evaluation; None: the training retriever."""


class RewardSettings(Settings):
    """The reward of a trajectory."""

    kind: str = "em"
    """`em`, `f1`, `subem`, `format` (Search-R1 v0.3), `em_strict` (numbers and signs kept, Unicode folded),
    `em_search_r1` (Search-R1's own score), or an import path `package.module:function`. docs/algorithms.md,
    "Scoring", compares them."""
    right_at: float | None = None
    """The least reward of a right answer, before any penalty for length. None: the best value of the reward,
    which is 1 for those that come with Unspiral; a function of your own that gives another says so by an
    attribute `right_at`."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Longest time of one call of the reward function. Past it the run ends with an error that names function
    and trajectory."""
    concurrency: int = Field(1, ge=1, le=1024)
    """Calls of the reward function at a time, each in a thread of its own. 1: one after the other, once the
    batch is sampled. More are for a function that waits for a service (docs/extend.md): it is called for each
    trajectory as soon as that is sampled."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if not is_kind(kind):
            raise ValueError(ACCEPTED)
        return kind


class TrainerSettings(Settings):
    """The loop."""

    steps: int = Field(100, ge=0)
    """Training steps, each one batch of prompts."""
    max_minutes: float | None = Field(None, gt=0)
    """End after the step in which so many minutes have passed (paused ones too), as if it were the last."""
    eval_every: int = Field(0, ge=0)
    """Evaluate every n-th step (0: only before and after)."""
    metrics: list[ImportPath] = Field(default_factory=list)
    """Import paths `package.module:function` of metrics of your own (docs/extend.md): each is called once per
    step with its trajectories and rewards, and returns numbers by name."""
    eval_at_ends: bool = True
    """Evaluate before the first and after the last step."""
    checkpoint_every: int = Field(10, ge=0)
    """Save every n-th step and at the end; 0: only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    keep_best: bool = False
    """Keep the checkpoint of the best held-out score too, as `checkpoints/best`; `--checkpoint best` finds
    it. Needs eval_every and data.eval."""
    best_by: BestBy = "em"
    """Greedy held-out score by which checkpoints are compared, for keep_best and patience: `right` is the
    share that the reward calls right, `em_macro` the mean over data sources, `em/SOURCE` one source's."""
    patience: int = Field(0, ge=0)
    """End the run (status 0) after so many evaluations without a better score; 0: never. Needs eval_every."""
    max_restores: int = Field(3, ge=0)
    """Times that a lost learner is started again from the last checkpoint; then the run ends (status 1)."""
    stop_grace_seconds: float = Field(60.0, ge=0)
    """Seconds that the step in hand has to end after a signal; then it is cut short (docs/reliability.md)."""
    stall_timeout_seconds: float = Field(5400.0, gt=0)
    """Longest time without progress (a trajectory finished, a call of the learner or the reward returned,
    another stage or step). Past it the run prints what each part waits for and ends with exit status 1.
    Longer than learner.step_timeout_seconds, rollout.trajectory_timeout_seconds and
    reward.timeout_seconds, which name the one that is late."""


class Config(Settings):
    """A whole run."""

    run: RunSettings = RunSettings()
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything random."""
    model: ModelSettings
    data: DataSettings
    retriever: RetrieverSettings
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    learner: LearnerSettings = LearnerSettings()
    weight_sync: WeightSyncSettings = WeightSyncSettings()
    store: StoreSettings = StoreSettings()
    tracking: TrackingSettings = TrackingSettings()
    control: ControlSettings = Field(default_factory=dict, validate_default=True)
    probe: ProbeSettings = ProbeSettings()
    monitor: MonitorSettings = MonitorSettings()
    trainer: TrainerSettings = TrainerSettings()
    evaluation: EvalSettings = EvalSettings()

    @model_validator(mode="after")
    def _fits(self) -> Config:
        self._check_that_llds_acts()
        self._check_probes()
        self._fill_in()
        self._check_lengths()
        if self.rollout.dtype == "float64" and self.rollout.engine != "transformers":
            raise ValueError(
                f"rollout.dtype=float64 needs rollout.engine=transformers; {self.rollout.engine} accepts "
                "float32, bfloat16 and auto"
            )
        if self.rollout.head_dtype != "model" and self.rollout.engine != "vllm":
            raise ValueError(
                f"rollout.head_dtype={self.rollout.head_dtype} needs rollout.engine=vllm; the engine "
                f"{self.rollout.engine} computes logits in the type of its weights"
            )
        check_places(self.rollout, ranks=self.learner.ranks, backend=self.weight_sync.backend)
        self._check_batch()
        self._check_best()
        if not (self.retriever.url or self.retriever.index or self.retriever.corpus):
            raise ValueError("retriever needs one of url, index, corpus")
        return self

    def _check_that_llds_acts(self) -> None:
        """At the first optimiser step of a batch the weights are those that LLDS compares with."""
        if self.learner.optimiser_steps_per_batch > 1:
            return
        if self.algorithm.batch_kl.weight > 0:
            raise ValueError(
                "algorithm.batch_kl.weight > 0 can never act with one optimiser step per batch: the weights "
                "are still those of the batch's start. Set learner.minibatches_per_batch or learner.epochs "
                "above 1"
            )
        llds = self.algorithm.llds
        if llds.form == "nll":  # it needs no drop to act
            return
        if llds.lambda_ > 0 and llds.anchor == "batch_start":
            raise ValueError(
                "algorithm.llds.lambda > 0 can never act with one optimiser step per batch: the weights are "
                "still those that LLDS compares with. Set learner.minibatches_per_batch or learner.epochs "
                "above 1, algorithm.llds.anchor=snapshot, or algorithm.llds.lambda=0"
            )
        if llds.lambda_ > 0 and llds.snapshot_every == 1:
            raise ValueError(
                "algorithm.llds.snapshot_every=1 with one optimiser step per batch compares the weights with "
                "themselves: LLDS can never act. Set algorithm.llds.snapshot_every above 1"
            )
        compares_with_itself = llds.anchor == "batch_start" or llds.snapshot_every == 1
        if self.monitor.action == "raise_lambda" and compares_with_itself:
            raise ValueError(
                "monitor.action=raise_lambda can never act with one optimiser step per batch: the weights "
                "are "
                "still those that LLDS compares with. Set learner.minibatches_per_batch or learner.epochs "
                "above 1, or algorithm.llds.anchor=snapshot with snapshot_every above 1"
            )

    def _check_probes(self) -> None:
        served_elsewhere = is_http(self.store.url or "")
        if served_elsewhere and self.probe.lag_steps >= self.store.token_steps:
            raise ValueError(
                f"probe.lag_steps={self.probe.lag_steps} must be below "
                f"store.token_steps={self.store.token_steps}, the steps that the running service at "
                "store.url "
                "keeps (its --token-steps; raise both), or the lag probe never finds its step"
            )

    @property
    def _most_tokens(self) -> int:
        """Most tokens that a model may write in one trajectory."""
        return self.rollout.max_response_tokens * (self.rollout.max_turns + 1)

    def _fill_in(self) -> None:
        """Defaults that depend on other sections. They are not counted among the keys that the user has
        set."""
        fill_in_workers(self.rollout)
        if self.algorithm.loss == "dr_grpo" and self.algorithm.dr_grpo_tokens is None:
            self.algorithm.__dict__["dr_grpo_tokens"] = self._most_tokens
        if self.rollout.max_staleness and "dynamic_sampling" not in self.algorithm.model_fields_set:
            self.algorithm.__dict__["dynamic_sampling"] = 0
        # Stale trajectories come from older weights than the learner's, which the weights correct for.
        if self.rollout.max_staleness and "mode" not in self.algorithm.importance.model_fields_set:
            self.algorithm.importance.mode = "token"

    def _check_lengths(self) -> None:
        if self.algorithm.overlong.tokens > self._most_tokens:
            raise ValueError(
                f"algorithm.overlong.tokens={self.algorithm.overlong.tokens} is wider than the "
                f"{self._most_tokens} model tokens of a trajectory "
                "(rollout.max_response_tokens x (rollout.max_turns + 1))"
            )

    def _check_batch(self) -> None:
        trajectories = self.rollout.prompts_per_step * self.rollout.group_size
        if self.learner.minibatches_per_batch > trajectories:
            raise ValueError(
                f"learner.minibatches_per_batch={self.learner.minibatches_per_batch} is more than the "
                f"{trajectories} trajectories of a batch (rollout.prompts_per_step x rollout.group_size)"
            )
        if self.rollout.group_size == 1 and self.algorithm.advantage != "grpo":
            raise ValueError(
                f"algorithm.advantage={self.algorithm.advantage} with rollout.group_size=1 can never learn: "
                "a trajectory alone has advantage 0. Set rollout.group_size to 2 or more"
            )
        if self.rollout.max_staleness and self.algorithm.dynamic_sampling:
            raise ValueError(
                "algorithm.dynamic_sampling needs rollout.max_staleness=0: replaced groups would take the "
                "prompts of later batches"
            )

    def _check_best(self) -> None:
        wanted = [f"trainer.{key}" for key in ("keep_best", "patience") if getattr(self.trainer, key)]
        if wanted and not (self.trainer.eval_every and self.data.eval):
            raise ValueError(
                f"{' and '.join(wanted)} {'need' if len(wanted) > 1 else 'needs'} held-out scores during the "
                "run: set trainer.eval_every above 0 and data.eval"
            )

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read YAML, apply `a.b=c` overrides (values are YAML), validate. Raises UserError."""
    overrides = [*overrides]
    raw = read_sections(Path(path))
    override(raw, overrides)
    return parse_config(raw, Written(Path(path), overrides))


def override(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    """Put `a.b=c` overrides (values are YAML) into a nested mapping. Raises UserError."""
    for item in overrides:
        key, sep, value = item.partition("=")
        if not sep or not key:
            raise UserError(f"override {item!r}: expected key=value, such as learner.lr=1e-5")
        node, *parts = [raw, *key.split(".")]
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"override {item!r}: {part} is a value, not a section")
        try:
            node[parts[-1]] = parse_yaml(value) if value else None
        except ValueError as e:
            raise UserError(f"override {item!r}: value is not YAML") from e


def parse_config(raw: dict[str, Any], written: Written | None = None) -> Config:
    """Validate a nested mapping. written: where its keys stand. Raises UserError with a line for each
    mistake."""
    refuse_missing_space(raw, written)
    with fitting(lambda error: UserError(_in_lines(error, written))):
        return Config.model_validate(raw)


def without_secrets(value: Any) -> Any:
    """A nested value of the configuration, with user and password of its addresses masked: it may be shown to
    others."""
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items()}
    return address_without_secrets(value) if isinstance(value, str) else value


def dump_config(config: Config, *, secrets: bool = True) -> str:
    """The resolved configuration as YAML; without `secrets`, passwords in addresses are masked."""
    yaml = YAML(typ="safe", pure=True)
    out = StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # a flag, declared as None
    raw = config.model_dump(mode="json", by_alias=True)
    yaml.dump(raw if secrets else without_secrets(raw), out)
    return out.getvalue()


UNION_TAGS = {
    "[key]",
    "constrained-int",
    "constrained-float",
    "float",
    "int",
    "literal['all']",
    "literal['auto']",
}
"""Parts that pydantic adds to a location, for the member of a union that was tried, and for a key itself."""


MISTAKES = 10
"""Lines that are told at most."""


def _in_lines(error: ValidationError, written: Written | None) -> str:
    """A line for each key that is wrong, and one for those that are missing. Of a key that may be of several
    types the first mistake counts."""
    lines: dict[str, str] = {}
    missing = []
    for one in error.errors():
        place = tuple(p for p in one["loc"] if p not in UNION_TAGS)
        key = ".".join(map(str, place))
        if one["type"] == "missing":
            missing.append(key)
        elif key not in lines:
            line = _one_line(one, key)
            lines[key] = (written.before(place, "" if key else line) if written else "") + line
    told = [*lines.values()]
    if missing:
        file = written.before(()) if written else ""
        told.append(f"{file}{', '.join(missing)}: required, and not given")
    more = [f"... and {len(told) - MISTAKES} more"] if len(told) > MISTAKES else []
    return "\n".join([*told[:MISTAKES], *more])


def _one_line(first: ErrorDetails, key: str) -> str:
    if first["type"] == "extra_forbidden":
        section = key.rpartition(".")[0]
        name = str(first["loc"][-1])
        known, keys = _keys_at(first["loc"][:-1]), [*paths_of(Config)]
        near = nearest(name, known)
        found = keys_with(name, keys) or [*meant_by(key, first["input"])]
        found = found or ([f"{section}.{near}".lstrip(".")] if near else keys_like(key, keys))
        hint = f"did you mean {' or '.join(found)}?" if found else accepted(name, known)
        return f"{key}: unknown key; {hint}"
    if first["type"] == "model_type":
        form = f"{{{_keys_at(first['loc'])[0]}: ...}}"
        return f"{key}: expected a section, such as {form} (got {shown(first['input'])})"
    message = expected(first)
    given = "" if isinstance(first["input"], dict | BaseModel) else f" (got {shown(first['input'])})"
    if first["type"] == "literal_error":
        known = re.findall(r"'(.+?)'", first["ctx"]["expected"])
        given += near_name(str(first["input"]), known)
    if "an import path" in message and "did you mean" not in given:
        given += with_colon(str(first["input"]))
    return f"{key}: {message}{given}" if key else message


def _keys_at(loc: tuple[Any, ...]) -> list[str]:
    model: Any = Config
    for part in loc:
        field = next((f for n, f in model.model_fields.items() if (f.alias or n) == part or n == part), None)
        if field is None:
            return []
        model = section_of(field.annotation)
        if model is None:
            return []
    return [f.alias or n for n, f in model.model_fields.items()]


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The settings class of a key that holds more keys; None for a key that holds a value."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def paths_of(model: type[BaseModel]) -> Iterator[str]:
    """All keys, dotted."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        section = section_of(field.annotation)
        yield key
        yield from (f"{key}.{path}" for path in (paths_of(section) if section else ()))


def leaf_keys(model: type[BaseModel] = Config) -> list[str]:
    """All keys that hold a value, dotted: `learner.lora.alpha`, but not `learner.lora`."""
    paths = list(paths_of(model))
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]


def default_of(key: str) -> Any:
    """The default of a dotted key in its section, or of a section, as JSON has it; None where it has none."""
    *sections, name = key.split(".")
    model: type[BaseModel] = Config
    for section in sections:
        field = _field(model, section)
        held = section_of(field.annotation)
        if held is None:
            return None
        model = held
    field = _field(model, name)
    return None if field.is_required() else to_jsonable_python(field.get_default(call_default_factory=True))


def _field(model: type[BaseModel], key: str) -> FieldInfo:
    return next(field for name, field in model.model_fields.items() if key in (name, field.alias))
