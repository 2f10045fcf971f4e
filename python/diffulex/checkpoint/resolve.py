# SPDX-License-Identifier: Apache-2.0
"""From the ``model`` option to a directory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from diffulex.errors import CheckpointError, ConfigError
from diffulex.families.spec.reader import read_optional_json

DEMO = "demo"
#: What the bundled model is for; shown to whoever meets it without having read about it.
DEMO_QUESTION = (
    "Tom has 3 bags with 12 marbles each. He gives 5 marbles to Mia."
    " How many marbles does Tom have now?"
)
DEMO_PURPOSE = (
    "the bundled model `demo` answers arithmetic word problems in English and nothing else,"
    f' for example "{DEMO_QUESTION}"'
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: Configuration, weights, tokenizer and template; never code.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt")


def demo_dir() -> Path:
    """Directory of the bundled model."""
    return Path(__file__).resolve().parent.parent / "assets" / DEMO


def resolve_model(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Directory of a model: ``demo``, a local directory, or a hub id ``organisation/name``.

    A hub id is taken from the local hub cache if it is complete there, otherwise downloaded.

    Args:
        model: the name.
        revision: branch, tag or commit of a hub id; None: its main branch.

    Raises:
        ConfigError: `model` is no text, or what it names has no revisions.
        CheckpointError: there is no such directory, or the hub cannot provide it.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"model: expected {DEMO!r}, a directory or a hub id, got {model!r}")
    model = os.fspath(model)
    path = demo_dir() if model == DEMO else Path(model).expanduser()
    if model and path.exists():
        if revision is not None:
            raise ConfigError(
                f"revision: expected a hub id with it, got {revision!r} for the directory {path}"
            )
        return _checked(path.parent if _is_program(path) else path)
    if model == DEMO:
        return _checked(path)
    if _HUB_ID.fullmatch(model) and not model.startswith("."):
        return _checked(_download(model, revision))
    raise CheckpointError(
        f"model: expected {DEMO!r}, a directory or a hub id organisation/name, got {model!r}"
    )


def _is_program(path: Path) -> bool:
    """Whether a path is the program of an exported directory, which then stands for all of it."""
    return path.name == "model.pte" and path.is_file()


def _checked(path: Path) -> Path:
    if not path.is_dir():
        what = "a directory, or model.pte in one" if path.suffix == ".pte" else "a directory"
        raise CheckpointError(f"model: expected {what}, got the file {path}")
    try:
        is_there = (path / "config.json").is_file()
    except OSError as error:
        raise CheckpointError(f"model: cannot read {path}: {error.strerror}") from error
    if not is_there:
        raise CheckpointError(f"model: {path}: expected a config.json, got none")
    return path


def _is_complete(path: Path) -> bool:
    """Whether a cached snapshot has its weights; other programs cache single files."""
    index = read_optional_json(path / "model.safetensors.index.json")
    shards = set(index.get("weight_map", {}).values())
    if shards:
        return all((path / name).is_file() for name in shards)
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def _download(model: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 (optional, slow)
    except ImportError as error:
        raise CheckpointError(
            f"model: {model!r} is no directory, and reading it from the hub needs the package "
            "huggingface_hub"
        ) from error
    patterns = list(_HUB_FILES)
    with suppress(Exception):  # whatever is wrong with the cache, the download below decides
        cached = Path(
            snapshot_download(
                model, revision=revision, allow_patterns=patterns, local_files_only=True
            )
        )
        if _is_complete(cached):
            return cached
    try:
        fetched = Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises from several unrelated hierarchies
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"model: {model!r} is no directory and cannot be fetched from the hub: {reason}"
            f"{_hub_advice(error, model, revision)}"
        ) from error
    # Without a network the client returns whatever is cached.
    if not _is_complete(fetched):
        raise CheckpointError(
            f"model: {model!r} is no directory and its copy in the hub cache is incomplete"
        )
    return fetched


def _hub_advice(error: Exception, model: str, revision: str | None) -> str:
    """What a user can do about an answer of the hub."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in names:
        return (
            f" (accept its terms on https://huggingface.co/{model}, then `hf auth login`, or put a"
            " token into HF_TOKEN)"
        )
    if "RevisionNotFoundError" in names:
        return f" (it has no revision {revision!r})"
    if "RepositoryNotFoundError" in names:
        return " (check its name; a private one needs `hf auth login` or a token in HF_TOKEN)"
    if "LocalEntryNotFoundError" in names:
        return " (no network, or HF_HUB_OFFLINE is set; HF_HOME is where downloads are kept)"
    return ""
