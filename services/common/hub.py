"""Models and data sets on the Hugging Face hub: from its cache where they are there, otherwise by download.

`huggingface_hub` does the work, and with it HF_HUB_OFFLINE, HF_HOME and HF_ENDPOINT hold. What cannot be had
is one line with the command that fetches it on a machine that reaches the hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from services.common.errors import EnvironmentLacks, UserError
from services.common.loading.extras import needed_for
from services.common.names import path_like

Say = Callable[[str], None]

PREFIX = "hf:"
SECONDS = 20.0
"""Longest wait for the hub's first answer."""
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""Files of a model that are downloaded: never code or pickles."""
_PACKED = ("", ".gz", ".zst", ".bz2", ".xz")
_FORMS = (".json", ".jsonl", ".csv", ".tsv")
DATA_FILES = ("*.parquet", "*.arrow", *(f"*{form}{packed}" for form in _FORMS for packed in _PACKED))
"""Files of a data set that are downloaded."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_GIVEN = re.compile(rf"({_NAME.pattern})(/[^\\:*?]+)?")
_ENDING = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow|txt|gz|zst|bz2|xz|db|index|ya?ml|safetensors)$", re.I)


_FOLDERS = frozenset(
    {"checkpoints", "corpora", "corpus", "data", "index", "indexes", "mine", "models", "out", "runs"}
)
"""First parts of paths that people write down before the folder is there."""


class HubName(NamedTuple):
    """A repository on the hub, and perhaps a file in it."""

    repository: str
    """ORG/NAME."""
    kind: Literal["model", "dataset"]
    file: str | None = None
    bare: bool = False
    """Given without `hf:`, so that it may be a mistyped path."""

    @property
    def absent(self) -> str:
        """What is known before the hub is asked."""
        if not self.bare:
            return "not here"
        near = path_like(self.repository)
        hint = f" (did you mean {near}?)" if near else ""
        return ("no such folder" if self.kind == "model" else "no such file or folder") + hint

    def command(self) -> str:
        """What fetches it into the cache."""
        file = f" {self.file}" if self.file else ""
        return f"hf download {self.repository}{file}" + (
            " --repo-type dataset" if self.kind == "dataset" else ""
        )


def has_form(given: str) -> bool:
    """Whether it is of the form ORG/NAME, as names on the hub are."""
    return _NAME.fullmatch(given) is not None


def hub_name(given: str, kind: Literal["model", "dataset"]) -> HubName | None:
    """What `hf:ORG/NAME`, or of a data set `hf:ORG/NAME/FILE`, stands for; and `ORG/NAME`, unless a folder
    ORG is here or usual, or NAME ends as a file does. None for any other name.

    Raises UserError for an `hf:` name that is none.
    """
    if not given.startswith(PREFIX):
        if not _NAME.fullmatch(given) or _ENDING.search(given):
            return None
        first = given.partition("/")[0]
        local = first in _FOLDERS or Path(first).exists()
        return None if local else HubName(given, kind, bare=True)
    found = _GIVEN.fullmatch(given.removeprefix(PREFIX))
    file = found[2][1:] if found and found[2] else None
    if found is None or (file and (kind == "model" or ".." in file.split("/"))):
        form = "hf:ORG/NAME" if kind == "model" else "hf:ORG/NAME or hf:ORG/NAME/FILE"
        raise UserError(f"{given}: no name on the Hugging Face hub; expected {form}")
    return HubName(found[1], kind, file)


def fetched(name: HubName, what: str, say: Say = print) -> Path:
    """The file or folder in the cache, downloaded where it is not there whole.

    what: the setting that names it, such as `data.train hf:a/b`, for messages. Raises EnvironmentLacks where
    the hub is out of reach, or the package that reads it is not installed, and UserError where the hub shows
    no such repository.
    """
    with needed_for(what):
        from huggingface_hub import constants, errors, hf_hub_download, snapshot_download
    patterns = list(MODEL_FILES if name.kind == "model" else DATA_FILES)

    def get(cached_alone: bool) -> Path:
        options: dict[str, Any] = {
            "repo_type": name.kind,
            "local_files_only": cached_alone,
            "etag_timeout": SECONDS,
        }
        if name.file:
            return Path(hf_hub_download(name.repository, name.file, **options))
        return Path(snapshot_download(name.repository, allow_patterns=patterns, **options))

    with suppress(OSError, RuntimeError, ValueError):  # its own errors are of these: not there, or not whole
        found = get(cached_alone=True)
        if constants.HF_HUB_OFFLINE or _whole(found, name):
            return found
    if constants.HF_HUB_OFFLINE:
        raise EnvironmentLacks(
            f"{what}: {name.absent}, and not in the hub's cache at {constants.HF_HUB_CACHE} "
            f"(HF_HUB_OFFLINE is set); fetch it with: {name.command()}"
        )
    say(
        f"{what}: {name.absent}; asking the Hugging Face hub for it"
        if name.bare
        else f"downloading {name.repository} from the Hugging Face hub"
    )
    try:
        return get(cached_alone=False)
    except errors.GatedRepoError as e:
        raise EnvironmentLacks(
            f"{what}: {name.absent}, and {name.repository} on the Hugging Face hub is gated: accept its "
            "terms on the hub, then set HF_TOKEN"
        ) from e
    except errors.RepositoryNotFoundError as e:
        kind = "model" if name.kind == "model" else "data set"
        raise UserError(
            f"{what}: {name.absent}, and the Hugging Face hub shows no {kind} {name.repository} "
            "(a private one needs HF_TOKEN)"
        ) from e
    except (OSError, RuntimeError, ValueError) as e:  # httpx's errors among them
        reason = e.__cause__ or e
        cause = " ".join(str(reason).split()).partition(". ")[0][:160].rstrip(".")
        raise EnvironmentLacks(
            f"{what}: {name.absent}, and cannot be downloaded from the Hugging Face hub "
            f"({type(reason).__name__}: {cause}); where the hub is in reach, fetch it with: {name.command()} "
            "(--local-dir DIR makes a folder to copy here)"
        ) from e


def local_file(what: str, given: str | Path, say: Say = print) -> Path:
    """The path of a corpus or question file, which may be a name on the hub. what: the option or key that
    holds it."""
    name = hub_name(str(given), "dataset")
    return fetched(name, f"{what} {given}", say) if name else Path(given)


def _whole(found: Path, name: HubName) -> bool:
    """Whether it can be used without a look at the hub. A data set's folder may lack files that nobody has
    asked for yet, so only single files are known to be whole."""
    if name.kind == "dataset":
        return bool(name.file)
    return any(found.glob("*.safetensors")) and (found / "config.json").is_file()
