# SPDX-License-Identifier: Apache-2.0
"""Command-line flags made from the configuration table, and a parser that fails in one line."""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING, Any, NoReturn

from diffulex.config_table import CONFIG_TABLE, THRESHOLD_KEYS, ConfigKey, Support
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

_MAX_SECONDS = 10
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
#: Least similarity of a flag that is offered instead of an unknown one.
_NEAREST_CUTOFF = 0.75
#: Kinds a flag can hold; mappings are for Python callers only.
_FLAG_KINDS = ("str", "int", "float", "bool", "ids")


class UsageError(ConfigError):
    """The command line itself is wrong."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def print_help(self, file: Any = None) -> None:
        """Unlike argparse, does not hide that the text cannot be written."""
        print(self.format_help(), end="", file=file, flush=True)

    def parse_checked(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses all of `argv`; an unknown flag is answered with the nearest known one.

        Raises:
            UsageError: anything is missing, unknown or malformed.
        """
        options, rest = self.parse_known_args(list(_plain_switches(argv)))
        if rest:
            _check_no_switch_value(argv, rest[0])
            flag = rest[0].split("=")[0]
            known = _flags_of_command(self, options)
            cutoff = _NEAREST_CUTOFF
            near = difflib.get_close_matches(flag, known, n=1, cutoff=cutoff)
            hint = f", nearest is {near[0]}" if near and flag.startswith("-") else ""
            raise UsageError(f"command line: expected a known argument{hint}, got {rest[0]!r}")
        return options


def _switch_flags() -> dict[str, str]:
    """Flag of every key that is on or off -> the flag that turns it off."""
    names = [key.name.replace("_", "-") for key in CONFIG_TABLE.values() if key.kind == "bool"]
    return {f"--{name}": f"--no-{name}" for name in names}


def _plain_switches(argv: Sequence[str]) -> Iterator[str]:
    """`--flag=true` as `--flag` and `--flag=false` as `--no-flag`, for flags that take no value."""
    switches = _switch_flags()
    rest = iter(argv)
    for item in rest:
        flag, has_value, value = item.partition("=")
        if item == "--":
            yield item
            yield from rest
        elif not has_value or flag not in switches:
            yield item
        else:
            try:
                yield flag if boolean(value) else switches[flag]
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"argument {flag}: {error}") from None


def _check_no_switch_value(argv: Sequence[str], stray: str) -> None:
    """`--flag false` was meant as one; a flag takes no argument from behind it."""
    switches = _switch_flags()
    place = list(argv).index(stray) if stray in argv else 0
    before = argv[place - 1] if place else ""
    if before in switches and stray.lower() in (*_TRUE, *_FALSE):
        raise UsageError(
            f"argument {before}: expected no value behind it ({before} or {switches[before]}),"
            f" got {stray!r}"
        )


def _flags_of_command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Flags of the parser and of the command that was chosen, if any."""
    flags: list[str] = []
    for action in parser._actions:
        flags += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            child = action.choices.get(str(getattr(options, action.dest, None)))
            flags += _flags_of_command(child, options) if child is not None else []
    return flags


def integer(text: str) -> int:
    """Argument type: an integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def positive_integer(text: str) -> int:
    """Argument type: an integer of at least 1."""
    value = integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def number(text: str) -> float:
    """Argument type: a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def seconds(text: str) -> float:
    """Argument type: a pause in seconds."""
    value = number(text)
    if not 0 <= value <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"expected seconds in [0, {_MAX_SECONDS}], got {text!r}")
    return value


def boolean(text: str) -> bool:
    """Argument type: a truth value."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")


def some(kind: Callable[[str], tuple[Any, ...]]) -> Callable[[str], tuple[Any, ...]]:
    """Argument type: a list that is not empty."""

    def parse(text: str) -> tuple[Any, ...]:
        values = kind(text)
        if not values:
            raise argparse.ArgumentTypeError(f"expected one value or more, got {text!r}")
        return values

    return parse


def integers(text: str) -> tuple[int, ...]:
    """Argument type: integers separated by commas."""
    return tuple(integer(part) for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[float, ...]:
    """Argument type: numbers separated by commas."""
    return tuple(number(part) for part in text.split(",") if part.strip())


_TYPES: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": integer,
    "float": number,
    "ids": integers,
}


def add_engine_flags(
    parser: argparse.ArgumentParser,
    *,
    table: Mapping[str, ConfigKey] = CONFIG_TABLE,
    without: Collection[str] = (),
) -> None:
    """Adds one flag per key of a configuration table, absent unless given.

    Keys without effect today are accepted but not listed in the help.
    """
    sections = dict.fromkeys(key.section for key in table.values())
    groups = {
        section: parser.add_argument_group(f"engine options: {section}") for section in sections
    }
    for key in table.values():
        kind = key.kind.removesuffix("?")
        if key.name not in without and kind in _FLAG_KINDS:
            _add_flag(groups[key.section], key, kind)


def _add_flag(group: argparse._ArgumentGroup, key: ConfigKey, kind: str) -> None:
    flag = "--" + key.name.replace("_", "-")
    # A percent sign in a help text would be read as a format.
    legal = "" if kind == "bool" else f"{key.legal}; "
    text = f"{key.help} [{legal}default {_shown(key.default)}]".replace("%", "%%")
    shown = text if key.support is Support.FULL else argparse.SUPPRESS
    common: dict[str, Any] = {"dest": key.name, "default": argparse.SUPPRESS}
    if kind != "bool":
        metavar = kind.upper()
        group.add_argument(flag, type=_TYPES[kind], metavar=metavar, help=shown, **common)
        return
    group.add_argument(flag, action=argparse.BooleanOptionalAction, help=shown, **common)


def _shown(value: object) -> str:
    if value is None or value == ():
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def engine_kwargs(
    options: argparse.Namespace,
    *,
    table: Mapping[str, ConfigKey] = CONFIG_TABLE,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Keyword arguments of the engine for the flags that were given, except those of `without`."""
    given = {
        name: value
        for name, value in vars(options).items()
        if name in table and name not in without
    }
    thresholds = {name: given.pop(name) for name in THRESHOLD_KEYS if name in given}
    if thresholds:
        given["decoding_thresholds"] = thresholds
    return given
