# SPDX-License-Identifier: Apache-2.0
"""The directory that an export writes: a program beside the files of its checkpoint.

It is a checkpoint directory for every command. `edge.json` says what the program is; the program's own
constants say the same and are compared when it is loaded. Reading this imports neither torch nor
executorch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.errors import CheckpointError, ConfigError
from diffulex_edge.errors import EdgeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "EDGE_FILE",
    "PROGRAM_FILE",
    "Bundle",
    "copy_checkpoint_files",
    "file_sha256",
    "is_bundle",
    "new_directory",
    "read_bundle",
]

PROGRAM_FILE = "model.pte"
EDGE_FILE = "edge.json"
_CONFIG = "config.json"
#: Configuration, tokenizer and template of a checkpoint; never code or weights.
_COPIED = (
    _CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_CHUNK = 1 << 20
#: Of writes: no space, beyond a quota, or beyond the size that a file may have.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Of all programs: what is quantised is so inside of them.
_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Bundle:
    """What `edge.json` says, checked."""

    directory: Path
    #: Tokens of prompt and answer.
    max_model_len: int
    max_rows: int
    max_logits: int
    cache_rows: int
    backend: str
    quant: str
    dtype: str
    config_sha256: str
    program_sha256: str
    program_bytes: int
    #: Everything that stands in the file.
    facts: Mapping[str, Any]

    @property
    def program_path(self) -> Path:
        """The program."""
        return self.directory / PROGRAM_FILE

    @property
    def expected_constants(self) -> dict[str, Any]:
        """Constants that the program must have."""
        return {
            "get_max_seq_len": self.max_model_len,
            "get_max_context_len": self.cache_rows,
            "dlx_max_rows": self.max_rows,
            "dlx_max_logits": self.max_logits,
            "dlx_backend": self.backend,
            "dlx_quant": self.quant,
            "dlx_config_sha256": self.config_sha256,
        }


_KINDS: dict[str, type] = {
    **dict.fromkeys(("max_model_len", "max_rows", "max_logits", "cache_rows"), int),
    **dict.fromkeys(("backend", "quant", "dtype", "config_sha256"), str),
}


def is_bundle(directory: Path) -> bool:
    """Whether a directory holds a program and no weights that the engine could read."""
    return (directory / PROGRAM_FILE).is_file() and not any(directory.glob("*.safetensors"))


def read_bundle(directory: Path) -> Bundle:
    """Reads and checks `edge.json`, without opening the program.

    Raises:
        CheckpointError: a file is missing or malformed, or `config.json` is not the exported one.
    """
    for name in (PROGRAM_FILE, EDGE_FILE, _CONFIG):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"bundle: {directory}: expected a file {name} (diffulex edge export), got none"
            )
    try:
        facts = json.loads((directory / EDGE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"bundle: cannot read {directory / EDGE_FILE}: {error}") from error
    where = f"bundle: {directory / EDGE_FILE}"
    program = facts.get("program") if isinstance(facts, dict) else None
    if not isinstance(facts, dict) or not isinstance(program, dict):
        raise CheckpointError(f"{where}: expected an object with a program, got {facts!r:.60}")
    values = {name: _value(facts, name, kind, where) for name, kind in _KINDS.items()}
    if values["dtype"] != _DTYPE:
        raise CheckpointError(f"{where}: dtype: expected {_DTYPE}, got {values['dtype']!r:.60}")
    found = file_sha256(directory / _CONFIG)
    if found != values["config_sha256"]:
        raise CheckpointError(
            f"bundle: {directory / _CONFIG}: expected the file that was exported"
            f" (SHA-256 {values['config_sha256'][:12]}), got {found[:12]}"
        )
    return Bundle(
        directory=directory,
        program_sha256=_value(program, "sha256", str, f"{where}: program"),
        program_bytes=_value(program, "bytes", int, f"{where}: program"),
        facts=facts,
        **values,
    )


def _value(facts: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = facts.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"{where}: {name}: expected {kind.__name__}, got {value!r:.60}")
    if isinstance(value, int) and value < 1:
        raise CheckpointError(f"{where}: {name}: expected >= 1, got {value}")
    return value


def file_sha256(path: Path) -> str:
    """Digest of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def copy_checkpoint_files(source: Path, target: Path) -> None:
    """Copies what an engine reads besides the weights."""
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raises ConfigError unless a bundle may be written at `path`."""
    if not path.parent.is_dir():
        raise ConfigError(f"output: expected an existing directory {path.parent}, got none")
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"output: expected a directory, got the file {path}")
    is_empty = not any(path.iterdir())
    if is_empty or (overwrite and (path / EDGE_FILE).is_file()):
        return
    hint = ", or --overwrite" if (path / EDGE_FILE).is_file() else ""
    raise ConfigError(f"output: expected a new directory{hint}, got the existing {path}")


@contextmanager
def new_directory(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden directory beside `path` that becomes `path` at the end, or disappears.

    Raises:
        ConfigError: `path` exists and may not be replaced, or cannot be made.
        EdgeError: the disk is full while it is written.
    """
    path = path.expanduser().resolve()  # a link is not replaced by what it points at
    check_target(path, overwrite=overwrite)
    working = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        working.mkdir()
    except OSError as error:
        raise ConfigError(f"output: cannot make {path}: {error.strerror}") from error
    try:
        try:
            yield working
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise EdgeError(f"output: cannot write {path}: {error.strerror}") from error
        old = None
        if path.exists():
            old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
            os.replace(path, old)
        try:
            os.replace(working, path)
        except OSError:
            if old is not None:
                os.replace(old, path)
            raise
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(working, ignore_errors=True)
