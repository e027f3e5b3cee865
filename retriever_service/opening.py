"""From the settings of a server to its index, whichever kind it is."""

from __future__ import annotations

from pathlib import Path

from retriever_service.dense.encoder import family_of
from retriever_service.dense.model_files import check_model
from retriever_service.errors import BadSetting, IndexInvalid
from retriever_service.index import Index, IndexInfo, read_info, verify
from retriever_service.settings import ServerSettings

REMOTE_PREFIX = "qdrant+"


def check_settings(settings: ServerSettings) -> str:
    """What is searched, in a few words. Raises what is wrong with the index, so far as it shows without
    loading it."""
    path = Path(settings.index)
    for what, model in (("--retriever_model", settings.retriever_model), ("--reranker", settings.reranker)):
        if model:
            check_model(what, model)
    if settings.index.startswith(REMOTE_PREFIX):
        return settings.index
    if path.is_file():
        if not settings.corpus or not Path(settings.corpus).is_file():
            raise BadSetting(
                f"index {path} is a FAISS file: it needs --corpus_path, the JSONL file that it was made from"
            )
        return f"{path.name} over {Path(settings.corpus).name}"
    info = verify(path, settings.corpus)
    name = settings.retriever_name
    if name and ("bm25" in name.lower()) != (info.backend == "bm25") and name != info.backend:
        raise BadSetting(f"--retriever_name {name}: index {path} is {info.backend}")
    if family := _family(settings, info):
        made_with = info.settings["encoder"]
        known = made_with["family"] != "auto" or made_with["model"]
        if known and family_of(family, "") != made_with["family"]:
            raise BadSetting(
                f"--retriever_name {name}: index {path} was made with an encoder of the family {made_with['family']}"
            )
    if info.backend == "bm25" and settings.faiss_gpu:
        raise BadSetting(
            f"--faiss_gpu: index {path} is bm25, which is searched on the CPU; accepted with a dense index"
        )
    return f"{info.passages:,} passages ({info.backend})"


def _family(settings: ServerSettings, info: IndexInfo) -> str | None:
    """`--retriever_name` where it is the family of an encoder and not the backend."""
    return (
        settings.retriever_name
        if info.backend != "bm25" and settings.retriever_name != info.backend
        else None
    )


def open_index(settings: ServerSettings):
    """The index of a server: a folder, a FAISS file beside its corpus, or a remote collection."""
    reranker = None
    if settings.reranker:
        from retriever_service.dense.rerank import CrossEncoderReranker

        reranker = CrossEncoderReranker(settings.reranker)
    second = {"reranker": reranker, "rerank_depth": settings.rerank_depth, "dtype": settings.encoder_dtype}
    encoder = {"name": settings.retriever_name, "model": settings.retriever_model}
    if settings.index.startswith(REMOTE_PREFIX):
        from retriever_service.remote import QdrantIndex

        return QdrantIndex(settings.index, **encoder, **second)
    if Path(settings.index).is_file():
        from retriever_service.dense.published import PublishedIndex

        return PublishedIndex(settings.index, settings.corpus, **encoder, gpu=settings.faiss_gpu, **second)
    if not Path(settings.index).exists() and settings.index.endswith(".index"):
        raise IndexInvalid(f"index {settings.index}: no such file")
    name = _family(settings, read_info(settings.index))
    return Index(
        settings.index,
        settings.corpus,
        name=name,
        model=settings.retriever_model,
        gpu=settings.faiss_gpu,
        **second,
    )
