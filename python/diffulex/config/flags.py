# SPDX-License-Identifier: Apache-2.0
"""Command-line flags made from the configuration table, and a parser that fails in one line."""

from __future__ import annotations

import argparse
import copy
import difflib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from diffulex.config.docs import help_text
from diffulex.config.table import CONFIG_TABLE, THRESHOLD_KEYS, ConfigKey, Support
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
#: Least similarity of a flag that is offered instead of an unknown one.
_NEAREST_CUTOFF = 0.75
#: Longer lists of choices are in the long help alone.
_MANY_CHOICES = 6


class UsageError(ConfigError):
    """The command line itself is wrong."""


def expected_one_of(name: str, known: Sequence[str]) -> str:
    """What was expected instead of `name`: the known names, and the nearest one if one is near."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f", nearest is {near[0]}" if near else ""
    return f"expected one of {', '.join(known)}{hint}, got {name!r}"


def _short(action: argparse.Action) -> argparse.Action:
    """The same with the help that names neither range nor default, if it has one, and few choices."""
    result = copy.copy(action)
    result.help = getattr(action, "short_help", action.help)
    if action.choices is not None and len(list(action.choices)) > _MANY_CHOICES:
        result.metavar = action.metavar or "NAME"
    return result


def _with_listed_choices(action: argparse.Action) -> argparse.Action:
    """The same with its choices in the help, if they are too many for a name of the value."""
    choices = [] if action.choices is None else [str(choice) for choice in action.choices]
    if len(choices) <= _MANY_CHOICES or action.metavar is not None:
        return action
    result = copy.copy(action)
    result.metavar = "NAME"
    result.help = f"{action.help or ''} [one of {', '.join(choices)}]".strip()
    return result


class _HelpAll(argparse.Action):
    """Prints every flag and leaves."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_help_all(), end="", flush=True)
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing its usage and leaving.

    A parser with many flags names the common ones: its help is one screen of these, and
    ``--help-all`` prints the rest. Every parser takes it: where nothing is left out, it is ``--help``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)
        self._common: frozenset[str] = frozenset()
        if self.add_help:
            self._help_all = self.add_argument(
                "--help-all", action=_HelpAll, nargs=0, dest="help_all", default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )  # fmt: skip

    def shorten_help(self, common: Iterable[str]) -> None:
        """Lists only the arguments with these destinations in ``--help``."""
        self._common = frozenset((*common, "help", "help_all"))
        self._help_all.help = "list all flags and exit"

    def names(self) -> list[str]:
        """Destinations of the arguments that the parser has so far."""
        return [action.dest for action in self._actions]

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does it, for misspelt commands of commands as well, with the nearest choice."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, expected_one_of(str(value), known))

    def print_help(self, file: Any = None) -> None:
        """Unlike argparse, does not hide that the text cannot be written."""
        print(self.format_help(), end="", file=file, flush=True)

    def format_help_all(self) -> str:
        """Every flag with its help."""
        return super().format_help()

    def format_help(self) -> str:
        """The common flags, or all of them where none is marked."""
        if not self._common:
            return self.format_help_all()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        sections: dict[str, list[argparse.Action]] = {}
        for group in self._action_groups:
            title = (group.title or "").partition(":")[0]
            shown = [
                _short(action) for action in group._group_actions if action.dest in self._common
            ]
            sections.setdefault(title, []).extend(shown)
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_checked(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses all of `argv`; an unknown flag is answered with the nearest known one.

        Raises:
            UsageError: anything is missing, unknown or malformed.
        """
        options, rest = self._with_late_words(*self.parse_known_args(list(_plain_switches(argv))))
        if rest:
            _check_no_switch_value(argv, rest[0])
            flag = rest[0].split("=")[0]
            known = _flags_of_command(self, options)
            cutoff = _NEAREST_CUTOFF
            near = difflib.get_close_matches(flag, known, n=1, cutoff=cutoff)
            hint = f", nearest is {near[0]}" if near and flag.startswith("-") else ""
            raise UsageError(f"command line: expected a known argument{hint}, got {rest[0]!r}")
        return options

    def _with_late_words(
        self, options: argparse.Namespace, rest: list[str]
    ) -> tuple[argparse.Namespace, list[str]]:
        """argparse takes `words` from one place of the line only; further ones lie in `rest`."""
        if not hasattr(options, "words"):
            return options, rest
        place = rest.index("--") if "--" in rest else len(rest)
        early = rest[:place]
        if any(item.startswith("-") and item != "-" and " " not in item for item in early):
            return options, rest
        options.words = [*options.words, *early, *rest[place + 1 :]]
        return options, []

    def parse_with_file(self, argv: Sequence[str]) -> argparse.Namespace:
        """As `parse_checked`, after the settings of a file of `--config`, if one is named.

        A key that the line gives is not taken from the file. `from_file` of the result are the
        destinations that were.

        Raises:
            UsageError: as for `parse_checked`, and the file cannot be used.
        """
        has_file = any(item.partition("=")[0] == "--config" for item in argv)
        required = [action for action in self._flags() if action.required] if has_file else []
        for action in required:  # may be in the file
            action.required = False
        try:
            options = self.parse_checked(argv)
        finally:
            for action in required:
                action.required = True
        path = getattr(options, "config", None)
        if path is None:
            options.from_file = frozenset()
            return options
        parser, place = self._command_parser(options, argv)
        given = {item.partition("=")[0] for item in argv}
        settings = [
            item
            for item in file_arguments(parser, Path(path))
            if item.partition("=")[0] not in given
        ]
        result = self.parse_checked([*argv[:place], *settings, *argv[place:]])
        flags = {
            option: action.dest for action in parser._actions for option in action.option_strings
        }
        result.from_file = frozenset(flags[item.partition("=")[0]] for item in settings)
        return result

    def _flags(self) -> Iterator[argparse.Action]:
        """The flags of the parser and of the commands below it."""
        for action in self._actions:
            if action.option_strings:
                yield action
            if isinstance(action, argparse._SubParsersAction):
                for child in dict.fromkeys(action.choices.values()):
                    yield from child._flags()

    def _command_parser(
        self, options: argparse.Namespace, argv: Sequence[str]
    ) -> tuple[Parser, int]:
        """The parser of the command that was chosen, and the place of its arguments."""
        parser, place = self, 0
        while True:
            commands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
            if not commands:
                return parser, place
            name = str(getattr(options, commands[0].dest))
            parser = commands[0].choices[name]
            place = list(argv).index(name, place) + 1


class _Formatter(argparse.HelpFormatter):
    """Room for the longest of the usual flags before its help."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **kwargs})

    def _format_action(self, action: argparse.Action) -> str:
        """Many choices stand in the help, where lines are broken, and not in place of the value."""
        return super()._format_action(_with_listed_choices(action))


class Commands:
    """The commands below a parser, of which a line has to name one: the name is stored as `dest`.

    The usage of each begins with `program`; the help calls them by their `kind`.
    """

    def __init__(
        self, parser: Parser, program: str, dest: str = "name", kind: str = "command"
    ) -> None:
        self._program = program
        self._parsers: argparse._SubParsersAction[Parser] = parser.add_subparsers(
            title=f"{kind}s", dest=dest, metavar=kind.upper(), required=True
        )

    def add(self, name: str, text: str, words: str = "", aliases: Sequence[str] = ()) -> Parser:
        """The parser of a command with the help `text`; the usage names its arguments, `words`."""
        return self._parsers.add_parser(
            name,
            help=text,
            description=text,
            aliases=list(aliases),
            allow_abbrev=False,
            # One flag per key would fill two screens before the first one is explained.
            usage=" ".join(filter(None, (self._program, name, words, "[flags]"))),
        )

    def add_foreign(self, name: str, text: str) -> None:
        """A command whose flags are those of another program, which reads them."""
        self._parsers.add_parser(name, help=text, description=text, add_help=False)


def add_log_level(parser: argparse.ArgumentParser, usual: str = "warning") -> None:
    """The flag for the log of a command; `usual` is what applies without it."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help=f"least severe log line on standard error [{usual}]",
    )


# Files of `--config`: every key becomes the flag of the same name.


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that `Parser.parse_with_file` reads."""
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file whose keys are flags; the command line wins"
    )


def file_arguments(parser: Parser, path: Path, json_flags: Collection[str] = ()) -> list[str]:
    """The command line that says what a YAML file of settings says.

    Args:
        parser: the flags that may stand in the file.
        path: the file.
        json_flags: destinations of flags that take a list as JSON.

    Raises:
        UsageError: the file cannot be read, or has a key or value that no flag takes.
    """
    import yaml  # noqa: PLC0415 (slow to import)

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--config: expected a readable YAML file, got {reason}") from error
    if document is None:
        return []
    if not isinstance(document, Mapping):
        raise UsageError(f"--config {path}: expected a map of settings, got {document!r}")
    actions = {option: action for action in parser._actions for option in action.option_strings}
    arguments: list[str] = []
    for key, value in document.items():
        flag = "--" + str(key).replace("_", "-")
        action = actions.get(flag)
        if action is None or action.dest in ("config", "help", "help_all"):
            near = difflib.get_close_matches(flag, actions, n=1)
            hint = f", nearest is {near[0][2:]!r}" if near else ""
            raise UsageError(f"--config {path}: expected a known key{hint}, got {key!r}")
        arguments += _flag_arguments(action, flag, value, path, json_flags)
    return arguments


def _flag_arguments(
    action: argparse.Action, flag: str, value: Any, path: Path, json_flags: Collection[str]
) -> list[str]:
    """The command line that says the same."""
    if value is None:
        return []
    name = flag[2:]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"--config {path}: expected true or false as {name}, got {value!r}")
        if value:
            return [flag]
        return ["--no-" + name] if isinstance(action, argparse.BooleanOptionalAction) else []
    if isinstance(value, Mapping) and action.type in (mapping, text_or_mapping):
        values = [json.dumps(value)]
    elif isinstance(value, Mapping):
        if action.dest != "engine_arg":
            raise UsageError(f"--config {path}: expected no map as {name}, got {value!r}")
        values = [f"{key}={json.dumps(item)}" for key, item in value.items()]
    elif isinstance(value, list) and isinstance(action, argparse._AppendAction):
        values = [str(item) for item in value]
    elif isinstance(value, list):
        is_json = action.dest in json_flags
        values = [json.dumps(value) if is_json else ",".join(map(str, value))]
    else:
        values = [str(value).lower() if isinstance(value, bool) else str(value)]
    return [f"{flag}={text}" for text in values]


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
    """`--flag false` was meant as one; a flag does not take the argument after it."""
    switches = _switch_flags()
    place = list(argv).index(stray) if stray in argv else 0
    before = argv[place - 1] if place else ""
    if before in switches and stray.lower() in (*_TRUE, *_FALSE):
        raise UsageError(
            f"argument {before}: expected no value after it ({before} or {switches[before]}),"
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


def number(text: str) -> float:
    """Argument type: a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def within(
    kind: Callable[[str], Any], is_legal: Callable[[Any], bool], legal: str
) -> Callable[[str], Any]:
    """Argument type: values of `kind` that are legal, or an error that says what would be."""

    def parse(text: str) -> Any:
        if is_legal(value := kind(text)):
            return value
        raise argparse.ArgumentTypeError(f"expected {legal}, got {text!r}")

    return parse


#: Argument types: numbers in a range; `seconds` are a pause.
positive_integer = within(integer, lambda value: value >= 1, "an integer of at least 1")
count = within(integer, lambda value: value >= 0, "a count")
share = within(number, lambda value: 0 <= value < 1, "a share in [0, 1)")
seconds = within(number, lambda value: 0 <= value <= 10, "seconds in [0, 10]")


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


def texts(text: str) -> tuple[str, ...]:
    """Argument type: texts separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[float, ...]:
    """Argument type: numbers separated by commas."""
    return tuple(number(part) for part in text.split(",") if part.strip())


def mapping(text: str) -> dict[str, Any]:
    """Argument type: an object in JSON."""
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")


def text_or_mapping(text: str) -> str | dict[str, Any]:
    """Argument type: an object in JSON, or a text that begins otherwise."""
    return mapping(text) if text.lstrip().startswith("{") else text


_TYPES: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": integer,
    "float": number,
    "ids": integers,
    "floats": numbers,
    "strs": texts,
    "str or mapping": text_or_mapping,
}


def add_engine_flags(
    parser: argparse.ArgumentParser,
    *,
    table: Mapping[str, ConfigKey] = CONFIG_TABLE,
    without: Collection[str] = (),
    sampling_group: argparse._ArgumentGroup | None = None,
) -> None:
    """Adds one flag per key of a configuration table, absent unless given.

    Keys without effect today are accepted but not listed in the help. Those of the section `sampler`
    go into `sampling_group`, if there is one.
    """
    sections = dict.fromkeys(key.section for key in table.values())
    groups = {} if sampling_group is None else {"sampler": sampling_group}
    for section in sections:
        if section not in groups:
            groups[section] = parser.add_argument_group(f"engine options: {section}")
    for key in table.values():
        kind = key.kind.removesuffix("?")
        if key.name not in without and kind in READABLE_KINDS:
            _add_flag(groups[key.section], key, kind)


#: Further names of flags, which other servers have.
_ALIASES = {"distributed_executor": "--distributed-executor-backend"}


def _add_flag(group: argparse._ArgumentGroup, key: ConfigKey, kind: str) -> None:
    flags = ["--" + key.name.replace("_", "-")]
    if key.name in _ALIASES:
        flags.append(_ALIASES[key.name])
    # A percent sign in a help text would be read as a format.
    legal = "" if kind == "bool" or key.legal == "any" else f"{key.legal}; "
    text = f"{help_text(key)} [{legal}default {_shown(key.default)}]".replace("%", "%%")
    shown = text if key.support is Support.FULL else argparse.SUPPRESS
    common: dict[str, Any] = {"dest": key.name, "default": argparse.SUPPRESS}
    if kind != "bool":
        metavar = kind.upper()
        action = group.add_argument(
            *flags, type=_TYPES[kind], metavar=metavar, help=shown, **common
        )
    else:
        switch = argparse.BooleanOptionalAction
        action = group.add_argument(*flags, action=switch, help=shown, **common)
    action.short_help = help_text(key).replace("%", "%%")  # type: ignore[attr-defined]


def _shown(value: object) -> str:
    if value is None or value == ():
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


#: Kinds that a flag can hold; whole mappings are for Python callers only.
READABLE_KINDS = ("bool", *_TYPES)


def read_value(name: str, kind: str, text: str) -> Any:
    """The value of a key from a text, as its flag reads it.

    Raises:
        UsageError: it is none.
    """
    try:
        return boolean(text) if kind == "bool" else _TYPES[kind](text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from None


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


def check_single_model(options: argparse.Namespace) -> None:
    """Moves MODEL, the only word of a command, to the flag.

    Raises:
        UsageError: more than one word, or the flag as well.
    """
    if len(options.words) > 1:
        raise UsageError(
            f"command line: expected one MODEL, got {' '.join(map(repr, options.words))}"
        )
    if options.words:
        set_model(options, options.words[0])


def set_model(options: argparse.Namespace, model: str) -> None:
    """Takes MODEL for ``--model``.

    Raises:
        UsageError: the flag was given too. What a file says gives way.
    """
    given = getattr(options, "model", None)
    if given is not None and "model" not in options.from_file:
        raise UsageError(f"model: expected MODEL or --model, got both {model!r} and {given!r}")
    options.model = model
