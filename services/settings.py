"""Typed settings of the services. The trainer's configuration is composed of these (`trainer.config.schema`).

Every section refuses keys that it does not know. Field docstrings are the descriptions in `unspiral config
schema`.
"""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from services.common.loading.user_code import is_import_path

CPU_CACHE_GIB = 1.0
"""Key-value cache of an engine on CPU, where `kv_cache_gib` is not given."""
MOST_WORKERS_PER_GPU = 32
"""Ray counts shares of a GPU in ten-thousandths: with more workers they would no longer be told apart."""
TAKEN_TAGS = ("think", "search", "information", "answer")
"""Tags that are no tool's."""


def _tool_name(name: str) -> str:
    if re.fullmatch(r"[a-z][a-z0-9_-]*", name) and name not in TAKEN_TAGS:
        return name
    accepted = f"small letters, digits, _ and -, except for {', '.join(TAKEN_TAGS)}"
    raise ValueError(f"not the name of a tool; accepted are {accepted}")


def _import_path(path: str) -> str:
    if is_import_path(path):
        return path
    raise ValueError("expected an import path package.module:function")


ToolName = Annotated[str, AfterValidator(_tool_name)]
ImportPath = Annotated[str, AfterValidator(_import_path)]
"""Of the user's own code; each one of a list is refused by itself, so that all mistakes are told."""


class Settings(BaseModel):
    """A section of the configuration: unknown keys refused, values checked again on assignment."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_assignment=True,
        populate_by_name=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, raw: Any) -> Any:
        """`seed: yes` is a mistake, which would otherwise be read as 1."""
        fields = {name: field for key, field in cls.model_fields.items() for name in (key, field.alias)}
        for key, value in raw.items() if isinstance(raw, dict) else ():
            field = fields.get(key)
            if (
                isinstance(value, bool)
                and field
                and bool not in (field.annotation, *get_args(field.annotation))
            ):
                kind = "a text" if str in (field.annotation, *get_args(field.annotation)) else "a value"
                meaning = (field.description or "").partition(". ")[0].rstrip(".")
                means = f": {' '.join(meaning.split())}" if meaning else ""
                raise ValueError(f"{key}={str(value).lower()}: expected {kind}, not true or false{means}")
        return raw


class RetrieverSettings(Settings):
    """The retriever. Give one of `url` (a running service), `index` (a folder of `unspiral index build`) and
    `corpus`."""

    url: str | None = None
    """Address of a running retriever, e.g. http://127.0.0.1:8000."""
    index: str | None = None
    """Folder of a built index, or a function of your own, `package.module:name` (docs/extend.md); the driver
    starts the service on it."""
    corpus: str | None = None
    """Corpus file or folder, of any layout in docs/data.md, or a data set on the hub (hf:ORG/NAME/FILE); the
    driver indexes it (BM25), then starts the service."""
    skip_bad: bool = False
    """Leave out malformed lines of `corpus`, and lines with the id of an earlier one, and count them. By
    default the first one is an error."""
    null_is_empty: bool = False
    """Take cells of `corpus` such as NULL, nan, None, N/A or - for empty: such a text makes its line
    malformed, and such a title or id is none."""
    text_key: str | None = None
    """Column of `corpus` that holds the text, if it has a name of its own; `meta.text` is a key in a
    column."""
    title_key: str | None = None
    """Column of `corpus` with the title, which is put before the text."""
    id_key: str | None = None
    """Column of `corpus` with the ids."""
    concurrency: int = Field(1, ge=1, le=1024)
    """Most calls at a time of a function that `index` names. With 1 all are made one after another, in one
    thread."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Longest wait for one search in seconds, retries included. After it the trajectory fails and is run
    again."""
    start_timeout_seconds: float = Field(60.0, gt=0)
    """Longest wait in seconds for the service to be ready at the start of a run. Of one that the run starts
    itself, time in which it works counts by the processor time that it uses, so that a busy machine may take
    longer, ten times at most."""

    @model_validator(mode="after")
    def _one_source(self) -> RetrieverSettings:
        given = [k for k in ("url", "index", "corpus") if getattr(self, k)]
        if len(given) > 1:
            others = " ".join(f"retriever.{k}=null" for k in given if k != given[0])
            raise ValueError(
                f"give one of url, index, corpus; got {' and '.join(given)}. For {given[0]} alone set the "
                f"others to null, as in {others}"
            )
        return self


class RolloutSettings(Settings):
    """Sampling of trajectories."""

    workers: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    """Number of rollout workers. "all" follows the cluster: one worker per unit of its `rollout` resource, or
    per GPU that the learner leaves; `workers_per_gpu` times as many where that is above 1."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """Inference engine. `transformers` is a small, slow twin for machines without vLLM."""
    prompts_per_step: int = Field(16, ge=1)
    """Prompts (groups) per training step."""
    group_size: int = Field(5, ge=1)
    """Trajectories sampled per prompt."""
    template: str = "search_r1"
    """`search_r1`, `hermes` and `llama3` (the model family's own tool calls, by its chat template), `lab`, or
    an import path `package.module:Name` of a class with the protocol of
    services.rollout.worker.templates."""
    thoughts: Literal["family", "keep"] = "family"
    """Thoughts of earlier turns, with the templates `hermes` and `llama3`. `family`: as the model's chat
    template has them; a model whose template drops them can be evaluated and asked so, and training refuses
    it, since a trajectory must be one sequence of tokens. `keep`: they stay."""
    tools: dict[ToolName, ImportPath] = Field(default_factory=dict)
    """Tools beside the search: tag -> import path `package.module:name` of a function or a class
    (docs/extend.md). The policy calls one by `<TAG>content</TAG>`, and gets what it returns as an
    observation."""
    tool_timeout_seconds: float = Field(60.0, gt=0)
    """Longest wait for one call of a tool. After it the trajectory fails and is run again."""
    reading: Literal["innermost", "search_r1"] = "innermost"
    """How tags in the model's text are read. `innermost`: from the last opening tag to the first closing one,
    and tags in a think block do nothing. `search_r1`: as Search-R1's released code, from the first opening
    tag, think blocks or not; for checkpoints that were trained with it."""
    bos: Literal["tokenizer", "none"] = "tokenizer"
    """What begins the prompt of a model without a chat template: what its tokenizer puts before a text, or
    nothing, as Search-R1 does."""
    deterministic: bool = False
    """Make runs with the same seed equal on CPU: a turn barrier, a fixed worker per trajectory, one thread,
    seeds from uids. Slower than the default."""
    max_turns: int = Field(4, ge=0)
    """Generations per trajectory that may search. One more follows, in which a search is not carried out."""
    max_response_tokens: int = Field(500, ge=1)
    """Maximum number of tokens that the model may write per turn."""
    max_obs_tokens: int = Field(500, ge=16)
    """Maximum number of tokens per observation, tags included. Documents beyond it are cut."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Maximum length of a question's prompt in tokens. A longer one is refused when the data is loaded."""
    max_model_tokens: int = Field(4096, ge=16)
    """Maximum length of a sequence in tokens: prompt, responses and observations together."""
    topk: int = Field(3, ge=1)
    """Documents requested from the retriever per search."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. The learner divides its logits by the same value."""
    top_p: Literal[1, 1.0] = 1.0  # type: ignore[valid-type]  # pydantic takes floats, PEP 586 not
    """Only 1: nucleus sampling gives sampler and learner different supports."""
    top_k: Literal[0, -1] = 0
    """Only off (0 or -1), for the same reason."""
    max_staleness: int = Field(0, ge=0)
    """Policy versions by which a trajectory may lag behind the learner. 0 samples and trains in turns."""
    trajectory_timeout_seconds: float = Field(600.0, gt=0)
    """Deadline of one trajectory in seconds. Past it the trajectory is cancelled, and run again on another
    worker."""
    start_timeout_seconds: float = Field(300.0, gt=0)
    """Longest wait in seconds for a worker's engine to start."""
    dtype: Literal["float32", "bfloat16", "float64", "auto"] = "auto"
    """Data type of the engine's weights. `auto` is float32 on CPU and bfloat16 on GPU. `float64` needs engine
    transformers: vLLM computes in float32, bfloat16 or float16."""
    head_dtype: Literal["model", "float32"] = "model"
    """Data type in which vLLM computes logits. `float32` brings a bfloat16 sampler closer to the learner,
    whose logits are float32; the output layer takes longer."""
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    """Fraction of a GPU's memory that vLLM may take (GPU only). The workers of one GPU divide it equally."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Size of a worker's key-value cache in GiB. Without it the cache has 1 GiB on CPU, and on GPU the rest
    of what `gpu_memory_utilization` allows, which vLLM measures. Give it, and a low `gpu_memory_utilization`,
    where other processes take and free memory of the same GPU: vLLM refuses to start when memory becomes free
    while it measures."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs per worker, over which its model is split."""
    workers_per_gpu: int = Field(1, ge=1, le=MOST_WORKERS_PER_GPU)
    """Workers on one GPU, each with an engine in a process of its own and its own copy of the weights (GPU
    only). For models so small that one engine leaves the GPU idle. Their engines start one after the other,
    and weights reach them through host memory. `workers` is their number on all GPUs together; not given, it
    is that of one GPU."""
    compile: Literal["full", "graphs", "off"] = "full"
    """Preparation of vLLM before it serves (GPU only). `full` compiles the model and captures CUDA graphs;
    `graphs` captures those of decoding steps alone, and starts sooner (steps in which a prompt begins run
    eagerly); `off` runs all eagerly."""
    share_gpus: bool = False
    """Let workers and learner use the same GPUs in turns: engines sleep while the learner computes. For
    machines with one GPU; a run with a GPU for each is faster. `learner.offload_optimizer` frees memory."""


class WeightSyncSettings(Settings):
    """Transport of weights from the learner to the rollout workers."""

    backend: Literal["auto", "nccl", "gloo", "shared_memory"] = "auto"
    """`nccl`: broadcast between GPUs. `gloo`: the same over TCP, on CPUs. `shared_memory`: through Ray's
    object store. `auto`: nccl where the learner and every worker have GPUs of their own;
    otherwise shared_memory."""
    timeout_seconds: float = Field(300.0, gt=0)
    """Longest wait in seconds for one attempt at a sync. A worker that does not answer by then is
    replaced."""
    bucket_mib: int = Field(256, ge=1)
    """Size in MiB of the buckets in which weights are sent. A larger tensor is a bucket of its own."""


class StoreSettings(Settings):
    """The likelihood store."""

    url: str | None = None
    """`sqlite:PATH`, `redis://HOST:PORT/DB`, or the http address of a running likelihood service. None:
    `likelihood.db` in the run's folder."""
    token_steps: int = Field(8, ge=1)
    """Number of latest steps whose token arrays are kept for the probes."""
    trajectory_groups: Annotated[int, Field(ge=0)] | Literal["all"] = 4
    """Number of groups per step whose trajectories are kept token by token, for the page of the step: those
    that weigh most in an alarm and mixed ones first. "all" keeps every group, 0 none."""
    trajectory_steps: int = Field(1000, ge=1)
    """Number of latest steps of which such trajectories are kept, beside the first one and those at which an
    alarm was raised."""
    probe_trajectories: int = Field(4, ge=0)
    """Number of trajectories of the fixed probe that are kept token by token at each step that probes, for
    the page of a prompt through time. None are kept where `store.trajectory_groups` is 0."""

    @field_validator("url")
    @classmethod
    def _known(cls, url: str | None) -> str | None:
        if url == "" or (
            url
            and "://" in url
            and not url.startswith(("http://", "https://", "redis://", "rediss://", "unix://"))
        ):
            raise ValueError(
                "expected sqlite:PATH, redis://HOST:PORT/DB, or the http address of a likelihood service"
            )
        return url


class TrackingSettings(Settings):
    """Other trackers to which every step is mirrored. One that fails, or is not installed, is told in one
    line and never stops the run."""

    wandb: str | None = None
    """Weights & Biases project. Its own settings, such as WANDB_API_KEY and WANDB_MODE, come from the
    environment."""
    tensorboard: bool | str | None = None
    """Folder of TensorBoard event files; true is `tensorboard` in the run's folder."""
    mlflow: str | None = None
    """MLflow experiment. The server comes from MLFLOW_TRACKING_URI."""


class ControlSettings(Settings):
    """The control plane that a run serves: status, scale, drain, pause."""

    enabled: bool = True
    """Serve the control plane."""
    host: str = Field(default_factory=lambda: os.environ.get("UNSPIRAL_CONTROL_HOST") or "127.0.0.1")
    """Address to bind (default: UNSPIRAL_CONTROL_HOST, or 127.0.0.1); beyond this machine
    UNSPIRAL_API_TOKEN must be set."""
    port: int = Field(
        default_factory=lambda: os.environ.get("UNSPIRAL_CONTROL_PORT") or 8200,
        ge=0,
        le=65535,
        validate_default=True,
    )
    """Port (default: UNSPIRAL_CONTROL_PORT, or 8200); 0, or one that is taken, gives any free one. The
    address is in the run's `control.json`."""


class ProbeSettings(Settings):
    """Probes: trajectories of the past, scored again under the current weights."""

    lag_steps: int = Field(5, ge=1)
    """Age in steps of the right trajectories that the lag probe scores."""
    lag_size: int = Field(64, ge=1)
    """Maximum number of trajectories per lag probe."""
    fixed_size: int = Field(64, ge=0)
    """Number of right trajectories from the start of the run that the fixed probe scores; 0 turns it off."""
    displacement_size: int = Field(256, ge=0)
    """Trajectories of the batch that are scored again after the update, for the displacement, in whole
    groups; 0 means all."""
    every: int = Field(1, ge=1)
    """Probe once per so many steps; 1 probes after every step."""


class MonitorRules(Settings):
    """Thresholds of the phase monitor (docs/monitor.md). Nats are per token; windows and patiences are
    counted in steps that have the metric."""

    lag_nats: float = Field(-0.08, lt=0)
    """Alarm when the mean of `probe/lag` is below this."""
    lag_sigmas: float = Field(3.0, ge=0)
    """Where the probe is noisier than usual (few trajectories), the mean must also lie so many of its
    standard errors below 0."""
    plunge_nats: float = Field(-0.32, lt=0)
    """Alarm too when two values of `probe/lag` in a row are below this: no window needs to fill."""
    lag_clear_nats: float = Field(-0.03, le=0, validate_default=True)
    """The alarm ends when the mean is above this again."""
    lag_window: int = Field(5, ge=1)
    """Values of `probe/lag` (and of `probe/fixed`, `entropy`, `leak/logp_entropy`) in the mean."""
    fixed_drop_nats: float = Field(0.15, gt=0)
    """Sign: `probe/fixed` this far below its best of the last `memory_steps` (both are means of `lag_window`
    values)."""
    memory_steps: int = Field(60, ge=5)
    """Steps over which the fixed probe's best and the entropy's lowest value are remembered."""
    share_negative: float = Field(0.5, gt=0, lt=1)
    """Sign: share of preserved responses that the update made less likely (mean of `share_window`). Read with
    LLDS off only, which
    lowers it: where `llds/lambda` is 0, or, for trainers that don't say, where there is no
    `llds/active_tokens`."""
    share_window: int = Field(10, ge=1)
    """Values of `displacement/share_negative` in the mean."""
    leak_nats: float = Field(0.1, gt=0)
    """Alarm when sampled tokens' surprise and entropy differ by more: sampler and learner have different
    supports."""
    patience: int = Field(3, ge=1)
    """Steps running that a threshold must be passed."""
    clear_patience: int = Field(8, ge=1)
    """Steps running before an alarm ends."""
    acceleration_nats: float = Field(-0.25, lt=0)
    """Acceleration when the lag probe's mean is below this, or below `lag_nats` together with one of the
    three signs that follow (`grad_norm_mads`, `entropy_rise_nats`, `share_negative`)."""
    grad_norm_mads: float = Field(5.0, gt=0)
    """Sign: gradient norm (mean of 3) above the baseline's median by so many median absolute deviations."""
    entropy_rise_nats: float = Field(0.3, gt=0)
    """Sign: entropy this far above its lowest mean of the last `memory_steps`."""
    baseline_steps: int = Field(20, ge=5)
    """Steps without trouble that make the baseline of gradient norm."""
    collapse_share: float = Field(0.5, gt=0, lt=1)
    """Collapsed when the mean reward is under this share of its running maximum."""
    reward_window: int = Field(8, ge=1)
    """Steps in the mean reward, and steps running that it must stay low."""
    reward_floor: float = Field(0.05, ge=0)
    """A running maximum below this is no reward to lose: the collapse rule waits. A mean up to this, with no
    group of two different rewards, is a dead batch."""
    nonfinite_steps: int = Field(2, ge=1)
    """Collapsed when the gradient norm was not finite (null) for so many steps running."""
    dead_clip_fraction: float = Field(0.99, gt=0, le=1)
    """A dead batch also where no group has two different rewards and at least this share of ratios is clipped
    (for trainers that count the ratios of trajectories without advantage)."""
    flat_nats: float = Field(-0.015, lt=0)
    """Slow slip: the lag probe's mean over `share_window` values is below this (until above a third of it).
    With reward that holds or rises it is stagnation; with `probe/fixed` down by `fixed_drop_nats` it is
    decay."""
    hold_share: float = Field(0.95, gt=0, le=1)
    """Reward holds while its mean is at least this share of its running maximum."""
    silence_steps: int = Field(30, ge=1)
    """Steps without a value of the likelihood's signs, or of the reward, after which a phase that had been
    `healthy` is `unknown`; three times the distance of the values where they come more seldom. A probe that
    repeats one value says nothing either."""
    recover_steps: int = Field(15, ge=1)
    """Steps without trouble until `recovering` becomes `healthy`."""
    warmup_steps: int = Field(10, ge=0)
    """Values of a metric that are passed over before the next `baseline_steps` make its usual level, for the
    rules from `gradient` on."""
    baseline_mads: float = Field(6.0, gt=0)
    """A metric must leave its usual level by at least so many standard deviations of its noise (from the
    median absolute deviation), beside the threshold of its rule."""
    gradient_ratio: float = Field(8.0, gt=1)
    """Alarm `gradient` when the gradient norm is this many times its usual level."""
    entropy_floor_nats: float = Field(0.01, ge=0)
    """Alarm `entropy_low` when entropy is below this, in nats per token ..."""
    entropy_low_share: float = Field(0.05, ge=0, lt=1)
    """... or below this share of its usual level."""
    entropy_rise_alarm_nats: float = Field(1.0, gt=0)
    """Alarm `entropy_high` when entropy is this far above its usual level (and twice as high), in nats per
    token."""
    searches_low_share: float = Field(0.25, gt=0, lt=1)
    """Alarm `interaction` when trajectories have fewer searches than this share of their usual number."""
    searches_high_ratio: float = Field(1.8, gt=1)
    """Alarm `interaction` when there are this many times the usual number of searches (and 1.4 more)."""
    share_rise: float = Field(0.2, gt=0, lt=1)
    """Alarms about shares (`validity`, `truncation`, `retrieval`, `garbage`, turns used up): change from the
    usual share."""
    mismatch_nats: float = Field(0.1, gt=0)
    """Alarm `mismatch` when sampler and learner differ by this more than usual (and twice as much), in nats
    per token."""
    degenerate_share: float = Field(0.9, gt=0, lt=1)
    """Alarm `degenerate_groups` when this share of groups, and .15 more than usual, has one reward
    throughout."""
    degenerate_wrong: float = Field(0.07, ge=0, lt=1)
    """The same rule waits while fewer than this share of groups must be wrong throughout."""
    length_ratio: float = Field(3.0, gt=1)
    """Alarm `length` when trajectories are this many times as long as usual, or as short."""
    control_drop_nats: float = Field(0.5, gt=0)
    """Alarm `control_tokens` when the log-prob of tag tokens is this far below its usual level."""
    gap_drop: float = Field(0.15, gt=0)
    """Alarm `reward_gap` when the held-out score is this far below its best, twice running, while the reward
    in training is not below what it was then."""
    silent_steps: int = Field(5, ge=1)
    """Alarm `silent_llds` when LLDS is on and held no token for so many steps running."""

    @field_validator("lag_clear_nats")
    @classmethod
    def _ends_above(cls, value: float, info: ValidationInfo) -> float:
        if value <= info.data.get("lag_nats", -math.inf):
            raise ValueError(
                f"must be above lag_nats={info.data['lag_nats']}, or the alarm would end where it begins"
            )
        return value


class MonitorSettings(Settings):
    """Reaction to a bad phase."""

    action: Literal["none", "raise_lambda", "lower_lr", "rollback", "stop"] = "none"
    """`raise_lambda`, `lower_lr`: by a factor of 2 at an alarm, at most three times, put back when the run is
    healthy. `rollback`: at acceleration or collapse, to the newest checkpoint from before the fall, with half
    the learning rate. `stop`: when the phase becomes `collapsed`, save a checkpoint and end the run with exit
    status 4."""
    rules: MonitorRules = MonitorRules()
