"""Settings of the retrieval server."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from services.common.errors import UserError

SHARDS = "shards+"
"""Begins an index that is a list of servers."""


class ServerSettings(BaseModel):
    """All that `create_app` and `serve_in_thread` need.

    Every field is a flag of `unspiral serve retriever`: of its own name, but `--timeout-seconds` for
    `request_timeout_seconds`, and `--token-env`, which names the environment variable that `token` is read
    from.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_assignment=True)

    index: str
    """Folder of a built index; or a FAISS file, beside `corpus`; or a Qdrant collection
    (`qdrant+http://HOST:PORT/NAME`); or servers of this package that are searched together
    (`shards+URL,URL,...`, which the flag `--shards` writes)."""
    corpus: str | None = None
    """Corpus file that the index must have been built from; None trusts the index, which holds its own
    documents."""
    retriever_name: str | None = None
    """The encoder's family where the index does not say: e5, bge, contriever or auto. For an index folder,
    its backend."""
    retriever_model: str | None = None
    """Folder or hub name of the encoder; None takes the one that a dense index was made with."""
    encoder_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Numbers of the encoder: `auto` is float16 on a GPU and float32 on a CPU."""
    faiss_gpu: bool = False
    """Search a dense index on all GPUs, in half precision."""
    dense_device: Literal["cpu", "cuda"] | None = None
    """Search the vectors by brute force in PyTorch instead of FAISS: on all GPUs that torch sees (with one
    worker), or on the CPU."""
    dense_dtype: Literal["float32", "float16", "int8"] | None = None
    """Numbers of that search; None is float16 on GPUs and float32 on a CPU. float32 is exact, float16 rounds
    the vectors, int8 scores its candidates again by the vectors as they are."""
    reranker: str | None = None
    """Folder or hub name of a cross-encoder that reorders the best passages and answers `/rerank`; None for
    none."""
    rerank_depth: int = Field(20, ge=1)
    """Passages per query that the reranker reads."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 is any free one."""
    topk: int = Field(3, ge=1)
    """Documents returned when a request names no number."""
    max_topk: int = Field(1000, ge=1)
    """Most documents that one request may ask for; more means this number."""
    max_passages: int = Field(1_000_000, ge=1)
    """Most passages of one answer, queries times `topk`: with passages of 600 bytes that is 600 MB."""
    max_queries: int = Field(16_384, ge=1)
    """Most queries of one request; more is a 422."""
    max_query_chars: int = Field(8192, ge=1)
    """Longest query, in characters; a longer one is cut."""
    max_body_bytes: int = Field(32 << 20, ge=1024)
    """Largest request body; more is a 413."""
    max_bodies_bytes: int = Field(512 << 20, ge=1024)
    """Most bytes of the bodies of all requests in flight; more is a 503 with Retry-After (a request alone is
    always taken)."""
    max_connections: int = Field(4000, ge=1)
    """Most open connections of a process. A further one takes the place of an idle one, or gets a 503."""
    batch_size: int = Field(256, ge=1)
    """Most queries searched together; 1 handles them one at a time. With a reranker, most passages that it
    reads together."""
    concurrency: int = Field(1, ge=1, le=1024)
    """Most calls at a time, in each worker, of a function that `index` names (`package.module:function`)."""
    batch_wait_ms: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Milliseconds that a batch waits for more queries if it is not full. 0: a batch is whatever came in
    while the last one was searched."""
    max_queued: int = Field(8192, ge=1)
    """Most queries that wait; past it a request gets a 503 with Retry-After (a request alone in the queue is
    always taken)."""
    cache_size: int = Field(10_000, ge=0)
    """Queries whose results are kept, the most recently used ones; 0 keeps none. It counts queries, not
    bytes: one takes its `topk` passages and about 120 bytes per passage."""
    request_timeout_seconds: float = Field(30.0, gt=0, allow_inf_nan=False)
    """Deadline of one request, a 504 after it; a client may ask for a shorter one with the header
    X-Timeout-Seconds."""
    shard_seconds: float = Field(10.0, gt=0, allow_inf_nan=False)
    """Longest wait for the shards of a search; a shard that has not answered then fails it."""
    partial_answers: bool = False
    """Answer without shards that fail, as an index of the others would; such answers are marked. Otherwise a
    shard that fails is a 503."""
    shard_token: SecretStr | None = Field(None, min_length=1)
    """The token that the shards ask for."""
    reload_seconds: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Seconds between two looks at the place of the index for another one, which is then opened and takes the
    old one's place; 0 looks at none, and only the signal SIGUSR1 has the index opened anew."""
    dialect: Literal["auto", "zerosearch"] = "auto"
    """The form of the answer to a `query` with `top_k`: `zerosearch` is a list of `{"text"}`; `auto` is that
    on port 6002, which ZeroSearch's client asks, and rLLM's form otherwise."""
    mcp: bool = False
    """Whether the tool `search` of the Model Context Protocol is served at `/mcp`; needs the package mcp."""
    workers: int = Field(1, ge=1)
    """Processes that serve; they share the memory-mapped index."""
    drain_seconds: float = Field(10.0, ge=0, allow_inf_nan=False)
    """Seconds that requests in flight may go on at a stop."""
    token: SecretStr | None = Field(None, min_length=1)
    """If set, every route but the health ones wants `Authorization: Bearer TOKEN`. Existing clients send
    none."""
    insecure: bool = False
    """Listen beyond this machine without a token: inside a private network, for clients that send none."""

    @model_validator(mode="after")
    def _default_is_within_the_limit(self) -> ServerSettings:
        if self.topk > self.max_topk:
            raise UserError(f"topk {self.topk}: at most max_topk, {self.max_topk}, passages are answered")
        return self
