# SPDX-License-Identifier: Apache-2.0
"""Every environment variable the Python package reads, in one table."""

from __future__ import annotations

import os
from dataclasses import dataclass

from diffulex.errors import ConfigError

__all__ = ["ENV_VARIABLES", "EnvVariable", "get_choice", "get_flag", "get_text"]


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
            "DIFFULEX_LOG_PROMPTS", "0", _FLAG, "1 shows 200 characters of each prompt at DEBUG."
        ),
        EnvVariable(
            "DIFFULEX_API_KEY", "", (), "Keys of the server, separated by commas; see --api-key."
        ),
        EnvVariable("NO_COLOR", "", (), "Any value turns colour off."),
    )
}


def get_text(name: str) -> str:
    """Value of a declared variable, or its default.

    Raises:
        ConfigError: the value is not one of the declared choices.
        KeyError: the variable is not declared.
    """
    variable = ENV_VARIABLES[name]
    value = os.environ.get(name, variable.default)
    if variable.choices and value.lower() not in variable.choices:
        choices = ", ".join(variable.choices)
        raise ConfigError(f"environment variable {name}: expected one of {choices}, got {value!r}")
    return value


def get_choice(name: str) -> str:
    """Lower-case value of a variable that has choices."""
    return get_text(name).lower()


def get_flag(name: str) -> bool:
    """Value of a 0/1 variable."""
    return get_text(name) == "1"
