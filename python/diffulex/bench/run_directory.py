# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: records are appended as they come, everything else is replaced whole."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffulex.bench.config import EvalConfig
from diffulex.errors import ConfigError

__all__ = ["RunDirectory", "read_jsonl"]

_MAX_TASK_CHARS = 96
#: What was run, with what, on what, and how it ended.
MANIFEST = "run.json"
#: Texts with what was generated after the end of the answer.
FULL_RESPONSES = "0x0_full_responses.json"
#: An answer a line.
SAMPLES = "samples.jsonl"
#: In which order the answers were written.
TRACE = "trace.jsonl"
RESPONSE_FILES = (
    FULL_RESPONSES,
    "0x1_truncated_responses.json",
    "0x2_extracted_responses.json",
)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a last line that was cut off by a crash is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


class RunDirectory:
    """Files of one run; with `is_saving` False nothing is written."""

    def __init__(self, path: Path, is_saving: bool = True) -> None:
        self.path = path
        self._is_saving = is_saving

    @classmethod
    def create(cls, settings: EvalConfig) -> RunDirectory:
        """A new folder below `output_dir`, or that folder itself.

        Raises:
            ConfigError: it cannot be made, or holds a run already.
        """
        path = Path(settings.output_dir)
        if settings.use_run_subdirectory:
            now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d_%H%M%S")
            task = re.sub(r"[^A-Za-z0-9._+-]", "_", settings.dataset_name.replace(",", "+"))
            path /= f"run_{now}_{task[:_MAX_TASK_CHARS]}"
        run = cls(path, settings.save_results)
        if not settings.save_results:
            return run
        if (path / MANIFEST).exists():
            raise ConfigError(
                f"output_dir: expected no run in {path}, got one; use --resume {path}"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir: cannot make {path}: {error.strerror}") from error
        return run

    @classmethod
    def resume(cls, path: Path) -> RunDirectory:
        """The folder of an interrupted run; ConfigError if it holds none."""
        if not (path / MANIFEST).is_file():
            raise ConfigError(f"resume: expected a folder with run.json, got {str(path)!r}")
        return cls(path)

    @property
    def log_path(self) -> str | None:
        """The file of the log; None where nothing is written."""
        return str(self.path / "bench.log") if self._is_saving else None

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Adds a line to a file of records."""
        if self._is_saving:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def replace(self, name: str, text: str) -> None:
        """Writes a file whole: whoever reads it sees the old one or the new one."""
        if self._is_saving:
            new = self.path / f".{name}.{os.getpid()}"
            new.write_text(text, encoding="utf-8")
            new.replace(self.path / name)

    def replace_json(self, name: str, content: Any) -> None:
        """`replace` with an object."""
        self.replace(name, json.dumps(content, indent=2) + "\n")

    def replace_records(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        """`replace` with one line a record."""
        self.replace(name, "".join(json.dumps(record) + "\n" for record in records))

    def drop_cut_line(self, name: str) -> None:
        """Takes off what a crash left of a record, so that the next one starts a line."""
        path = self.path / name
        if path.is_file() and not path.read_bytes().endswith(b"\n"):
            self.replace_records(name, list(read_jsonl(path)))
