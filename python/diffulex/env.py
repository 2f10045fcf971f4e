# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the installed package reads, in one table.

Python code reads them through this module. diffulex_ext and the compiled libraries, which stand below
it, read theirs themselves; a test compares both with the table.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "ENV_VARIABLES",
    "EnvVariable",
    "get_choice",
    "get_flag",
    "get_text",
    "get_unchecked",
    "set_meanwhile",
]


@dataclass(frozen=True, slots=True)
class EnvVariable:
    """Declaration of one variable: `choices` is empty for free text."""

    name: str
    default: str
    choices: tuple[str, ...]
    help: str


_FLAG = ("0", "1")

ENV_VARIABLES: dict[str, EnvVariable] = {
    variable.name: variable
    for variable in (
        EnvVariable(
            "DIFFULEX_LOG_LEVEL",
            "info",
            ("debug", "info", "warning", "error"),
            "Level of the log written by diffulex applications.",
        ),
        EnvVariable(
            "DIFFULEX_LOG_FORMAT", "text", ("text", "json"), "Text lines or one JSON object a line."
        ),
        EnvVariable("DIFFULEX_LOG_FILE", "", (), "File that receives the log as well."),
        EnvVariable(
            "DIFFULEX_LOG_ALL_RANKS",
            "0",
            _FLAG,
            "1 makes every rank of one engine log as the first does, not warnings and errors alone.",
        ),
        EnvVariable(
            "DIFFULEX_LOG_PROMPTS",
            "0",
            _FLAG,
            "1 logs the first 200 characters of every prompt, at level debug; else none is logged.",
        ),
        EnvVariable(
            "DIFFULEX_API_KEY", "", (), "Keys of the server, separated by commas; see --api-key."
        ),
        EnvVariable(
            "DIFFULEX_ADMIN_API_KEY",
            "",
            (),
            "Keys of those who change its weights, separated by commas; see --admin-api-key.",
        ),
        EnvVariable(
            "OMP_NUM_THREADS",
            "",
            (),
            "Threads of the ops on CPU; replicas share the cores where it is unset.",
        ),
        EnvVariable("NO_COLOR", "", (), "Any value turns colour off."),
        EnvVariable(
            "OPENAI_API_KEY", "", (), "Key that `diffulex bench` sends to servers; see --api-key."
        ),
        EnvVariable(
            "DIFFULEX_CHECK",
            "0",
            _FLAG,
            "1 makes CUDA ops check the data they index with, which waits for the device: only"
            " without graphs (`enforce_eager`).",
        ),
        EnvVariable(
            "DIFFULEX_FORCE_SM80", "0", _FLAG, "1 turns the Hopper kernels off; for comparisons."
        ),
        EnvVariable(
            "DIFFULEX_STEP_TRACE",
            "",
            (),
            "File to which engines append a line of JSON for each of their steps.",
        ),
        EnvVariable(
            "DIFFULEX_NVTX",
            "0",
            _FLAG,
            "1 makes NVTX ranges of the stages of every step, by the package nvtx.",
        ),
        EnvVariable(
            "DIFFULEX_CUDA_STAGE_TIMING_PATH",
            "",
            (),
            "File, with the rank put into its name, for the times of the stages of the first steps.",
        ),
        EnvVariable(
            "DIFFULEX_CUDA_STAGE_TIMING_MAX_STEPS", "256", (), "Steps whose stages are timed."
        ),
        EnvVariable(
            "DIFFULEX_CUDA_PROFILER_API",
            "0",
            _FLAG,
            "1 makes recordings mark the range that Nsight Systems captures; they see the CPU alone.",
        ),
        EnvVariable(
            "DIFFUSION_CACHE_BACKEND", "", (), "Cache of image engines; see `cache_backend`."
        ),
        EnvVariable("DIFFUSION_CACHE_ADAPTER", "", (), "Its earlier name."),
        EnvVariable(
            "DIFFUSION_ATTENTION_BACKEND",
            "",
            (),
            "Attention of image engines; see `attention_backend`.",
        ),
        EnvVariable(
            "DIFFULEX_NO_TORCH",
            "0",
            _FLAG,
            "1 imports `diffulex_ext` without torch and without the ops.",
        ),
    )
}


def get_text(name: str) -> str:
    """Value of a declared variable; its default if it is unset or empty.

    Raises:
        ConfigError: the value is not one of the declared choices.
        KeyError: the variable is not declared.
    """
    variable = ENV_VARIABLES[name]
    value = os.environ.get(name) or variable.default
    if variable.choices and value.lower() not in variable.choices:
        choices = ", ".join(variable.choices)
        raise ConfigError(f"environment variable {name}: expected one of {choices}, got {value!r}")
    return value


def get_unchecked(name: str) -> str:
    """Value of a declared variable, whatever it is; empty if unset. For the report of an error."""
    return os.environ.get(ENV_VARIABLES[name].name, "")


def get_choice(name: str) -> str:
    """Lower-case value of a variable that has choices."""
    return get_text(name).lower()


def get_flag(name: str) -> bool:
    """Value of a 0/1 variable."""
    return get_text(name) == "1"


@contextmanager
def set_meanwhile(variables: Mapping[str, str]) -> Iterator[None]:
    """A block in which variables of other libraries have these values; then what they had before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
