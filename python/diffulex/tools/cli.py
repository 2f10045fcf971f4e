# SPDX-License-Identifier: Apache-2.0
"""The ``diffulex`` command.

Exit codes: 0 done, 1 something is broken, 2 the request cannot be served as asked. Errors are one
line on standard error. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from diffulex.config.flags import (
    Commands,
    Parser,
    UsageError,
    add_config_flag,
    add_log_level,
    expected_one_of,
)
from diffulex.env import get_unchecked
from diffulex.interruption import INTERRUPTED, ending_at_once
from diffulex.log import configure
from diffulex.standard_streams import close_standard_output, open_standard_streams
from diffulex.tools.error_line import report_error

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 1
    try:
        open_standard_streams()
        code = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # the reader left and wants no more
        code = 1
    except Exception as error:  # the last line of defence: never a traceback for a user
        if _is_debugging(arguments):
            raise
        code = report_error(error)
    finally:
        close_standard_output()
    return code


def _is_debugging(arguments: list[str]) -> bool:
    """Whether a failure is shown with its traceback."""
    level = get_unchecked("DIFFULEX_LOG_LEVEL")
    for first, second in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, has_value, value = first.partition("=")
        if flag == "--log-level":
            level = value if has_value else second
    return level.lower() == "debug"


def _run(arguments: list[str]) -> int:
    if arguments[:1] in (["--version"], ["-V"], ["version"]):
        from importlib.metadata import version  # noqa: PLC0415 (slow to import)

        print(f"diffulex {version('diffulex')}")
        return 0
    other = {"serve": _serve, "omni": _omni, "edge": _edge}.get(arguments[0]) if arguments else None
    if other is not None:
        return other(arguments[1:])
    if asks_for_tasks(arguments):
        arguments = ["bench", *arguments]
    if arguments[:2] == ["bench", "lm-eval"]:
        return _lm_eval(arguments[2:])
    if not arguments or arguments[0] == "help" or arguments == ["bench"]:  # as omni and edge do
        return _help([name for name in arguments if name != "help"])
    _check_command(arguments[0])
    try:
        with ending_at_once():
            options = build_parser(arguments[0]).parse_with_file(arguments)
    except SystemExit:  # after the help of a command
        return 0
    configure(level=_log_level(options))
    code: int = options.command(options)
    return code


def _help(names: list[str]) -> int:
    """`diffulex help` and `diffulex help COMMAND`."""
    if names:
        return _run([*names, "--help"])
    build_parser("").print_help()
    return 0


def _check_command(name: str) -> None:
    """Answers a misspelt command with the nearest one."""
    known = [name for row in _COMMANDS for name in (row.name, *row.aliases)]
    known += ["help", "version"]
    if name in ("-h", "--help", "--help-all", *known):
        return
    raise UsageError(f"command: {expected_one_of(name, known)}")


def _log_level(options: argparse.Namespace) -> str | None:
    """The option, the environment, or what suits the command."""
    if options.log_level is not None or get_unchecked("DIFFULEX_LOG_LEVEL"):
        level: str | None = options.log_level
        return level
    # An evaluation takes long; without a terminal there is no bar, only log lines.
    is_eval = options.name == "eval" or getattr(options, "benchmark", None) == "eval"
    return "info" if is_eval and not sys.stderr.isatty() else "warning"


_TRACE_HELP = "show in which order the tokens of answers were written"


class _Command(NamedTuple):
    """A row of the table of commands; `fill` adds its flags and the function that runs it."""

    name: str
    help: str
    fill: Callable[[Parser], None]
    words: str = ""
    aliases: tuple[str, ...] = ()


def build_parser(name: str | None = None) -> Parser:
    """The parser with the flags of one command, or of all: they take long to collect."""
    parser = Parser(
        prog="diffulex",
        description="Runs block-diffusion language models.",
        epilog="Flags of a command: diffulex COMMAND --help",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version and exit")
    commands = Commands(parser, "diffulex")
    for row in _COMMANDS:
        child = commands.add(row.name, row.help, row.words, row.aliases)
        if name is None or name in (row.name, *row.aliases):
            row.fill(child)
    return parser


def _add_log_level(parser: Parser) -> None:
    add_log_level(parser, "warning; eval into a file: info")


def _fill_generate(parser: Parser) -> None:
    from diffulex.tools.request_flags import add_generate_flags  # noqa: PLC0415

    _add_log_level(parser)
    add_generate_flags(parser)
    parser.set_defaults(command=_generate)


def _generate(options: argparse.Namespace) -> int:
    from diffulex.tools.answers import generate  # noqa: PLC0415

    return generate(options)


def _fill_chat(parser: Parser) -> None:
    from diffulex.tools.request_flags import add_chat_flags  # noqa: PLC0415

    _add_log_level(parser)
    add_chat_flags(parser)
    parser.set_defaults(command=_chat)


def _chat(options: argparse.Namespace) -> int:
    from diffulex.tools.answers import chat  # noqa: PLC0415

    return chat(options)


def _fill_eval(parser: Parser) -> None:
    from diffulex.tools.evaluation import add_eval_flags, evaluate  # noqa: PLC0415

    _add_log_level(parser)
    add_eval_flags(parser)
    parser.epilog = f"With {', '.join(_OF_TASKS)} it runs tasks instead: diffulex bench eval --help"
    parser.set_defaults(command=evaluate)


#: Flags with which `eval` is that of `bench`.
_OF_TASKS = ("--dataset", "--preset", "--resume")


def asks_for_tasks(arguments: Sequence[str]) -> bool:
    """Whether `diffulex eval` is asked for tasks rather than for word problems."""
    flags = {item.partition("=")[0] for item in arguments[1:]}
    return arguments[:1] == ["eval"] and not flags.isdisjoint(_OF_TASKS)


def _fill_bench(parser: Parser) -> None:
    from diffulex.bench.compare import add_compare_flags  # noqa: PLC0415
    from diffulex.bench.main import add_bench_eval_flags, add_tasks_flags  # noqa: PLC0415
    from diffulex.bench.report_command import add_report_flags  # noqa: PLC0415
    from diffulex.bench.serve.command import add_serve_flags, run_serve_command  # noqa: PLC0415
    from diffulex.bench.throughput import add_throughput_flags  # noqa: PLC0415

    benchmarks = Commands(parser, "diffulex bench", "benchmark", "benchmark")
    for name, words, text, fill in (
        ("eval", "", "accuracy and speed on tasks, with a folder of results", add_bench_eval_flags),
        ("tasks", "", "list, fetch and verify tasks and their data", add_tasks_flags),
        ("throughput", "", "steps and tokens per second of synthetic load", add_throughput_flags),
        ("report", "RUN...", "runs as a page or a table, with plots", add_report_flags),
        ("compare", "BASE CAND", "what changed between two runs; a gate for CI", add_compare_flags),
    ):
        child = benchmarks.add(name, text, words)
        if name != "eval":
            _add_log_level(child)
        fill(child)
    # `_lm_eval` parses what is run: the flags are those of another program.
    text = "the command of lm-eval, with this engine as --model diffulex"
    benchmarks.add_foreign("lm-eval", text)
    serve = benchmarks.add("serve", "load on any server that speaks the OpenAI API")
    _add_log_level(serve)
    add_config_flag(serve)
    add_serve_flags(serve)
    serve.set_defaults(command=run_serve_command)

    _fill_trace(benchmarks.add("trace", _TRACE_HELP, "FILE"))


def _fill_trace(parser: Parser) -> None:
    from diffulex.trace.command import add_trace_flags  # noqa: PLC0415

    _add_log_level(parser)
    add_trace_flags(parser)


def _fill_serve(parser: Parser) -> None:
    """For completion; `_serve` parses what is run."""
    from diffulex.server.args import add_server_flags  # noqa: PLC0415

    add_server_flags(parser)


def _fill_batch(parser: Parser) -> None:
    from diffulex.tools.run_batch import add_batch_flags, run_batch  # noqa: PLC0415

    _add_log_level(parser)
    add_batch_flags(parser)
    parser.set_defaults(command=run_batch)


def _fill_folder_batch(parser: Parser) -> None:
    from diffulex.tools.batch import add_folder_batch_flags, run_folder_batch  # noqa: PLC0415

    _add_log_level(parser)
    add_folder_batch_flags(parser)
    parser.set_defaults(command=run_folder_batch)


def _fill_omni(parser: Parser) -> None:
    """For completion; `_omni` parses what is run."""
    from diffulex.omni.cli import add_omni_commands  # noqa: PLC0415

    add_omni_commands(parser)


def _fill_edge(parser: Parser) -> None:
    """For completion; `_edge` parses what is run."""
    from diffulex_edge.cli import add_edge_commands  # noqa: PLC0415

    add_edge_commands(parser)


def _fill_doctor(parser: Parser) -> None:
    _add_log_level(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="test instead what several ranks need: devices, peer access, ports, exchanges",
    )
    parser.set_defaults(command=_doctor)


def _fill_verify(parser: Parser) -> None:
    from diffulex.tools.verification import add_verify_flags, run_verify  # noqa: PLC0415

    _add_log_level(parser)
    add_verify_flags(parser)
    parser.set_defaults(command=run_verify)


def _fill_quantize(parser: Parser) -> None:
    from diffulex.quantization.command import add_quantize_flags  # noqa: PLC0415

    _add_log_level(parser)
    add_config_flag(parser)
    add_quantize_flags(parser)


def _fill_completion(parser: Parser) -> None:
    _add_log_level(parser)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="for which shell")
    parser.set_defaults(command=_completion)


def _completion(options: argparse.Namespace) -> int:
    from diffulex.tools.completion import script  # noqa: PLC0415

    with ending_at_once():
        text = script(build_parser(), options.shell)
    print(text)
    return 0


def _lm_eval(arguments: list[str]) -> int:
    from diffulex.bench.lm_eval_run import run_command  # noqa: PLC0415 (optional)

    return run_command(arguments)


def _serve(arguments: list[str]) -> int:
    with ending_at_once():
        from diffulex.server.__main__ import main as serve  # noqa: PLC0415

    try:
        return serve(arguments)
    except SystemExit:  # after the help
        return 0


def _omni(arguments: list[str]) -> int:
    with ending_at_once():
        from diffulex.omni.cli import run  # noqa: PLC0415

    return run(arguments)


def _edge(arguments: list[str]) -> int:
    with ending_at_once():
        from diffulex_edge.cli import run  # noqa: PLC0415

    return run(arguments)


def _doctor(options: argparse.Namespace) -> int:
    if options.distributed:
        from diffulex.tools.distributed_doctor import examine_distributed  # noqa: PLC0415

        text, is_healthy = examine_distributed(options.json)
        print(text)
        return 0 if is_healthy else 1

    with ending_at_once():
        from diffulex.tools.doctor import examine  # noqa: PLC0415 (must run where the rest cannot)

        report = examine()
    print(report.to_json() if options.json else report.to_text())
    return 0 if report.is_healthy else 1


_COMMANDS = (
    _Command(
        "generate", "answer a prompt, or every prompt of a file", _fill_generate, "[MODEL] PROMPT"
    ),
    _Command(
        "chat",
        "converse; /help lists its own commands",
        _fill_chat,
        "[MODEL]",
    ),
    _Command("eval", "accuracy and speed on word problems", _fill_eval, "[MODEL]"),
    _Command(
        "serve", "serve a model over HTTP (OpenAI API, live page at /ui)", _fill_serve, "[MODEL]"
    ),
    _Command("run-batch", "answer a file of OpenAI batch requests", _fill_batch, "[MODEL]"),
    _Command(
        "batch",
        "answer a file of prompts on several replicas, into a folder",
        _fill_folder_batch,
        "[MODEL]",
    ),
    _Command("omni", "draw images with diffusion transformers", _fill_omni),
    _Command("edge", "export models to ExecuTorch for small devices", _fill_edge),
    _Command("bench", "evaluate a model on tasks, or measure a server", _fill_bench, "BENCHMARK"),
    _Command("trace", _TRACE_HELP, _fill_trace, "FILE"),
    _Command(
        "verify", "whether a checkpoint is computed as its authors mean it", _fill_verify, "[MODEL]"
    ),
    _Command(
        "quantize",
        "write a checkpoint in low precision (compressed-tensors)",
        _fill_quantize,
        "MODEL OUT",
    ),
    _Command(
        "doctor",
        "what is installed and whether it works on each device",
        _fill_doctor,
        aliases=("info",),
    ),
    _Command("completion", "print the completion script of a shell", _fill_completion, "SHELL"),
)
