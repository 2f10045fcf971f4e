# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the installed package reads, in one table.

Python code reads them through this module. diffulex_ext and the compiled libraries, which stand below
it, read theirs themselves; a test compares both with the table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from diffulex.errors import ConfigError

__all__ = ["ENV_VARIABLES", "EnvVariable", "get_choice", "get_flag", "get_text", "get_unchecked"]


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
            "DIFFULEX_API_KEY", "", (), "Keys of the server, separated by commas; see --api-key."
        ),
        EnvVariable("NO_COLOR", "", (), "Any value turns colour off."),
        EnvVariable(
            "OPENAI_API_KEY", "", (), "Key that `diffulex bench serve` sends; see its --api-key."
        ),
        EnvVariable(
            "DIFFULEX_BATCH_INVARIANT",
            "0",
            _FLAG,
            "1 makes results independent of the other requests of a step; slower.",
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
