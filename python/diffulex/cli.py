# SPDX-License-Identifier: Apache-2.0
"""The ``diffulex`` command.

Exit codes: 0 done, 1 something is broken, 2 the request cannot be served as asked. Errors are one
line on standard error. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import shutil
import sys
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffulex
from diffulex.bench.evaluate import Setting, run_evaluation
from diffulex.bench.serve.command import add_serve_flags, run_serve_command
from diffulex.bench.zoo import run_zoo
from diffulex.cli_flags import (
    Parser,
    UsageError,
    add_engine_flags,
    engine_kwargs,
    integer,
    integers,
    numbers,
    positive_integer,
    seconds,
    some,
)
from diffulex.env import get_text, get_unchecked
from diffulex.errors import ConfigError, DiffulexError, OutOfPagesError, PromptError
from diffulex.logging import configure
from diffulex.model.resolve import DEMO, DEMO_PURPOSE, demo_dir, resolve_model
from diffulex.standard_streams import close_standard_output, open_standard_streams
from diffulex.terminal import DenoisePainter, opening_spans, printable, snapshot_spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diffulex import Diffulex, SamplingParams
    from diffulex.engine.output import RequestOutput, StreamEvent

_USER_ERROR = 2
_INTERRUPTED = 130
_WRITE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EBADF)
_DEFAULT_MAX_TOKENS = 512
_FRAME_DELAY = 0.2
_CHAT_HELP = "/help, /reset forgets the conversation, /quit ends it"
#: Where a checkout has its models, one per decoding strategy.
_ZOO_DIR = "examples/zoo"
#: Keys of the table that `eval` takes as lists.
_SWEPT = ("buffer_size", "accept_threshold")
_COMMANDS = ("generate", "chat", "eval", "serve", "bench", "doctor", "info", "help", "version")


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
        code = _INTERRUPTED
    except BrokenPipeError:  # the reader left and wants no more
        code = 1
    except Exception as error:  # the last line of defence: never a traceback for a user
        if _is_debugging(arguments):
            raise
        code = _report(error)
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
        print(f"diffulex {version('diffulex')}")
        return 0
    if arguments[:1] == ["serve"]:
        return _serve(arguments[1:])
    if arguments[:1] == ["omni"]:
        return _omni(arguments[1:])
    parser = _build_parser()
    if not arguments or arguments[0] == "help":
        parser.print_help()
        return 0
    _check_command(arguments[0])
    try:
        options = parser.parse_checked(arguments)
    except SystemExit:  # after the help of a command
        return 0
    configure(level=_log_level(options))
    code: int = options.command(options)
    return code


def _check_command(name: str) -> None:
    """Answers a misspelt command with the nearest one."""
    near = difflib.get_close_matches(name, _COMMANDS, n=1)
    if not name.startswith("-") and name not in _COMMANDS:
        hint = f", nearest is {near[0]}" if near else ""
        raise UsageError(f"command: expected one of {', '.join(_COMMANDS)}{hint}, got {name!r}")


def _log_level(options: argparse.Namespace) -> str | None:
    """The option, the environment, or what suits the command."""
    if options.log_level is not None or get_unchecked("DIFFULEX_LOG_LEVEL"):
        level: str | None = options.log_level
        return level
    # An evaluation takes long; without a terminal there is no bar, only log lines.
    return "info" if options.command is _eval and not sys.stderr.isatty() else "warning"


def _report(error: Exception) -> int:
    """Prints one line; 2 for what the user can change, 1 for the rest."""
    text = str(error)
    if isinstance(error, OSError) and error.errno in _WRITE_ERRORS and not error.filename:
        text = f"standard output: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        text = f"expected the package {package} (pip install {package}), got none"
    text = " ".join(text.split()) or type(error).__name__
    print(f"error: {text}", file=sys.stderr)
    is_user_error = isinstance(error, (ValueError, NotImplementedError, OutOfPagesError))
    return _USER_ERROR if is_user_error else 1


def _build_parser() -> Parser:
    parser = Parser(
        prog="diffulex",
        description="Runs block-diffusion language models.",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", dest="name", metavar="COMMAND")
    commands.required = True

    def add(
        name: str, command: Any, text: str, aliases: Sequence[str] = (), parent: Any = commands
    ) -> Parser:
        child: Parser = parent.add_parser(
            name,
            help=text,
            description=text,
            aliases=list(aliases),
            allow_abbrev=False,
            # One flag per key would fill two screens before the first one is explained.
            usage=f"diffulex {name}{' [PROMPT]' if name == 'generate' else ''} [flags]",
        )
        child.set_defaults(command=command)
        child.add_argument(
            "--log-level",
            choices=("debug", "info", "warning", "error"),
            help="least severe log line on standard error [warning; eval into a file: info]",
        )
        return child

    generate = add("generate", _generate, "answer one prompt")
    generate.add_argument("text", nargs="?", metavar="PROMPT", help="default, or -: standard input")
    generate.add_argument("--prompt", help="the prompt, as an option")
    generate.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without chat template"
    )
    generate.add_argument("--system", help="system message of the chat template")
    _add_output_flags(generate)
    _add_sampling_flags(generate)
    add_engine_flags(generate)

    chat = add("chat", _chat, f"converse; {_CHAT_HELP}")
    chat.add_argument("--system", help="system message")
    _add_output_flags(chat)
    _add_sampling_flags(chat)
    add_engine_flags(chat)

    evaluate = add("eval", _eval, "accuracy and speed on word problems")
    evaluate.add_argument(
        "--data",
        metavar="FILE",
        help="JSON lines with question and answer, the format of GSM8K [held-out set]",
    )
    evaluate.add_argument("--limit", type=positive_integer, help="only the first problems")
    evaluate.add_argument(
        "--batch", type=positive_integer, default=32, help="problems decoded together [32]"
    )
    evaluate.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write a report, .json or .md; may be given more than once",
    )
    evaluate.add_argument(
        "--zoo",
        nargs="?",
        const=_ZOO_DIR,
        metavar="DIR",
        help=f"every model of a zoo, each under its own strategy [{_ZOO_DIR}]",
    )
    evaluate.add_argument(
        "--output-dir", metavar="DIR", help="with --zoo: write zoo_results.{json,md,svg} there"
    )
    evaluate.add_argument(
        "--buffer-size", type=some(integers), metavar="N[,N]", help="one run per value"
    )
    evaluate.add_argument(
        "--accept-threshold", type=some(numbers), metavar="T[,T]", help="one run per value"
    )
    _add_sampling_flags(evaluate)
    add_engine_flags(evaluate, without=(*_SWEPT, "max_num_reqs"))

    # Its flags are those of `diffulex.server`, which needs more packages; see `_serve`.
    commands.add_parser("serve", help="serve a model over HTTP (OpenAI API, live page at /ui)")

    # Its flags are those of `diffulex.omni`, which needs more packages; see `_omni`.
    commands.add_parser("omni", help="draw images with diffusion transformers")

    bench = commands.add_parser(
        "bench", help="measure a server", description="Measures a server.", allow_abbrev=False
    )
    benchmarks = bench.add_subparsers(title="benchmarks", dest="benchmark", metavar="BENCHMARK")
    benchmarks.required = True
    text = "load on any server that speaks the OpenAI API"
    add_serve_flags(add("serve", run_serve_command, text, parent=benchmarks))

    doctor = add(
        "doctor", _doctor, "what is installed and whether it works on each device", ("info",)
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=positive_integer,
        default=_DEFAULT_MAX_TOKENS,
        help=f"most generated tokens [{_DEFAULT_MAX_TOKENS}, or what fits]",
    )
    group.add_argument("--max-nfe", type=positive_integer, help="forwards of a request [no limit]")
    group.add_argument(
        "--max-repetition-run", type=positive_integer, help="equal tokens that end the answer"
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at stop ids")
    group.add_argument(
        "--min-tokens", type=integer, default=0, help="tokens before the answer may end [0]"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text that ends the answer; may be given more than once",
    )
    group.add_argument(
        "--stop-token-ids", type=integers, default=(), metavar="ID[,ID]", help="further stop ids"
    )


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--show-denoising", action="store_true", help="redraw the blocks being denoised"
    )
    parser.add_argument(
        "--frame-delay",
        type=seconds,
        metavar="SECONDS",
        help=f"pause after a redrawn frame, at most 10 [{_FRAME_DELAY} in a terminal]",
    )


def _sampling_params(options: argparse.Namespace) -> SamplingParams:
    return diffulex.SamplingParams(
        max_tokens=options.max_tokens,
        max_nfe=options.max_nfe,
        max_repetition_run=options.max_repetition_run,
        ignore_eos=options.ignore_eos,
        stop_token_ids=options.stop_token_ids,
        stop=options.stop,
        min_tokens=options.min_tokens,
    )


def _open_engine(options: argparse.Namespace, **overrides: Any) -> Diffulex:
    kwargs = engine_kwargs(options)
    # Before anything slow is imported: a misspelt name should be answered at once.
    resolve_model(kwargs.get("model", DEMO))
    return diffulex.Diffulex(**{"show_progress": True, **kwargs, **overrides})


def _read_prompt(options: argparse.Namespace) -> str:
    if options.text is not None and options.prompt is not None:
        raise PromptError("prompt: expected one, got both PROMPT and --prompt")
    text = options.prompt if options.prompt is not None else options.text
    if text is None or (text == "-" and options.prompt is None):
        if sys.stdin is None or (text is None and sys.stdin.isatty()):
            raise PromptError("prompt: expected PROMPT, --prompt or standard input, got none")
        text = sys.stdin.read().removesuffix("\n")
    if not text.strip():
        raise PromptError("prompt: expected some text, got an empty prompt")
    return _utf8(str(text))


def _utf8(text: str) -> str:
    """The text, or an error that counts in what the user wrote, not in the rendered template."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"prompt: expected UTF-8 text, got {text[error.start]!r} at {error.start}"
        ) from error
    return text


def _generate(options: argparse.Namespace) -> int:
    prompt = _read_prompt(options)
    with _open_engine(options, max_num_reqs=1) as engine:
        ids: str | list[int] = prompt
        if engine.tokenizer.has_chat_template and not options.raw:
            ids = engine.tokenizer.apply_chat_template(_messages(options.system, prompt))
        elif options.system is not None:
            raise PromptError("--system: expected a chat template in use, got raw generation")
        output = _answer(engine, ids, options)
        _print_summary(output, engine)
    return 0


def _messages(system: str | None, prompt: str) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def _answer(
    engine: Diffulex, prompt: str | list[int], options: argparse.Namespace
) -> RequestOutput:
    """Streams one answer to standard output and returns it."""
    params = _sampling_params(options)
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if options.show_denoising:
        with closing(engine.stream(ids, params, mode="denoise")) as events:
            return _paint(engine, len(ids), events, options)
    output: RequestOutput | None = None
    has_text = False
    with closing(engine.stream(ids, params)) as stream:
        try:
            for event in stream:
                sys.stdout.write(_shown(event.text))
                sys.stdout.flush()
                has_text = has_text or bool(event.text)
                output = event.output or output
        except KeyboardInterrupt:
            if has_text or sys.stdout.isatty():
                print(flush=True)
            raise
    print(flush=True)
    return _checked(output)


def _shown(text: str) -> str:
    """Text of a model: a terminal must not obey it, a file gets it as it is."""
    return printable(text) if sys.stdout.isatty() else text


def _paint(
    engine: Diffulex, prompt_len: int, events: Iterator[StreamEvent], options: argparse.Namespace
) -> RequestOutput:
    """Shows each step: on a terminal the masks it starts from, then what it wrote, highlighted."""
    is_terminal = sys.stdout.isatty()
    size = shutil.get_terminal_size()
    painter = DenoisePainter(
        sys.stdout,
        is_terminal=is_terminal,
        columns=size.columns,
        rows=size.lines,
        has_color=not get_text("NO_COLOR"),
    )
    delay = options.frame_delay if options.frame_delay is not None else _FRAME_DELAY * is_terminal
    output: RequestOutput | None = None
    tokenizer = engine.tokenizer
    decoder = tokenizer.incremental_decoder()
    settled: tuple[int, ...] = ()
    num_shown = 0
    try:
        decoding = engine.config.decoding
        # A canvas starts right behind the prompt, blocks at multiples of their size.
        offset = 0 if decoding.decoding_strategy == "diffusion_gemma" else prompt_len
        shown = opening_spans(offset, decoding.block_size)
        painter.show(shown)
        time.sleep(delay)
        for event in events:
            output = event.output or output
            if event.snapshot is None:
                continue
            # What the last step settled was highlighted; now it becomes plain text.
            painter.settle(decoder.push(settled[num_shown:]))
            num_shown = len(settled)
            for is_before in (True, False) if is_terminal else (False,):
                spans = snapshot_spans(
                    event.snapshot, tokenizer, num_settled=num_shown, is_before=is_before
                )
                if spans != shown or not is_terminal:
                    painter.show(spans)
                    time.sleep(delay)
                    shown = spans
            settled = event.snapshot.token_ids
    except KeyboardInterrupt:
        painter.interrupt()
        raise
    final = _checked(output)
    painter.settle(decoder.push(final.token_ids[num_shown:]) + decoder.flush())
    painter.finish()
    return final


def _checked(output: RequestOutput | None) -> RequestOutput:
    if output is None:
        raise RuntimeError("stream: expected a final event, got none")
    if output.error is not None:
        raise PromptError(output.error)
    return output


def _print_summary(output: RequestOutput, engine: Diffulex) -> None:
    """Tokens, forwards (NFE), tokens per forward and speed, on standard error."""
    metrics = output.metrics
    print(
        f"[{metrics.completion_tokens} tokens, NFE {metrics.nfe}, TPF {metrics.tpf or 0:.2f}, "
        f"{metrics.e2e_tps or 0:.1f} tokens/s, {output.completion_reason}]",
        file=sys.stderr,
    )
    if not output.text.strip():
        reason = DEMO_PURPOSE if _is_demo(engine) else "the model ended it without any text"
        print(f"note: the answer is empty, {reason}", file=sys.stderr)


def _is_demo(engine: Diffulex) -> bool:
    return bool(engine.config.model.model_dir == demo_dir())


def _chat(options: argparse.Namespace) -> int:
    if sys.stdin is None:
        raise PromptError("chat: expected standard input, got a closed one")
    is_interactive = sys.stdin.isatty()
    start = [] if options.system is None else [{"role": "system", "content": options.system}]
    num_errors = 0
    with _open_engine(options, max_num_reqs=1) as engine:
        if not engine.tokenizer.has_chat_template:
            raise ConfigError("chat: expected a checkpoint with a chat template, got none")
        if _is_demo(engine):
            print(DEMO_PURPOSE, file=sys.stderr)
        if is_interactive:
            _enable_line_editing()
            print(_CHAT_HELP, file=sys.stderr)
        messages = list(start)
        for line in _chat_lines(is_interactive):
            if line == "/reset":
                messages = list(start)
            elif line == "/help":
                print(_CHAT_HELP, file=sys.stderr)
            elif line.startswith("/"):
                num_errors += 1
                print(f"error: unknown command {line!r}; {_CHAT_HELP}", file=sys.stderr)
            else:
                messages.append({"role": "user", "content": line})
                try:
                    _utf8(line)
                    ids = engine.tokenizer.apply_chat_template(messages)
                    output = _answer(engine, ids, options)
                except KeyboardInterrupt:
                    if not is_interactive:
                        raise
                    messages.pop()
                    print("interrupted", file=sys.stderr)
                    continue
                except (DiffulexError, ValueError) as error:
                    # A turn that does not fit must not end the conversation.
                    messages.pop()
                    num_errors += 1
                    _report(error)
                    continue
                messages.append({"role": "assistant", "content": output.text})
                _print_summary(output, engine)
    return _USER_ERROR if num_errors and not is_interactive else 0


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401, PLC0415 (gives input() history; absent on some systems)
    except ImportError:
        return


def _chat_lines(is_interactive: bool) -> Iterator[str]:
    """Non-empty lines until the end of input or ``/quit``."""
    while True:
        try:
            line = input("> " if is_interactive else "").strip()
        except EOFError:
            if is_interactive:
                print(flush=True)  # the prompt is still on its line
            return
        except KeyboardInterrupt:
            print(flush=True)  # the prompt is still on its line
            raise
        if line in ("/quit", "/exit"):
            return
        if line:
            yield line


def _eval(options: argparse.Namespace) -> int:
    kwargs = {**engine_kwargs(options, without=_SWEPT), "max_num_reqs": options.batch}
    if options.zoo is not None:
        return _eval_zoo(options, kwargs)
    if options.output_dir is not None:
        raise ConfigError("--output-dir: expected --zoo with it, got none; use --output")
    run_evaluation(
        kwargs,
        settings=[
            Setting(buffer_size, threshold)
            for buffer_size in options.buffer_size or (None,)
            for threshold in options.accept_threshold or (None,)
        ],
        sampling_params=_sampling_params(options),
        data=options.data,
        limit=options.limit,
        outputs=options.output,
        show=lambda report: print(report.to_text(), flush=True),
        command="diffulex " + " ".join(sys.argv[1:]),
    )
    return 0


def _eval_zoo(options: argparse.Namespace, kwargs: dict[str, Any]) -> int:
    given = [
        "--" + name.replace("_", "-")
        for name in ("buffer_size", "accept_threshold", "data", "output")
        if getattr(options, name)
    ]
    if kwargs.pop("model", None) is not None:
        given.append("--model")
    if given:
        raise ConfigError(f"--zoo: expected the settings of its zoo.json, got {', '.join(given)}")
    run_zoo(
        Path(options.zoo),
        output_dir=None if options.output_dir is None else Path(options.output_dir),
        engine_kwargs=kwargs,
        sampling_params=_sampling_params(options),
        limit=options.limit,
        show=lambda report: print(report.to_text(), flush=True),
        command="diffulex " + " ".join(sys.argv[1:]),
    )
    return 0


def _serve(arguments: list[str]) -> int:
    from diffulex.server.__main__ import main as serve  # noqa: PLC0415

    try:
        return serve(arguments)
    except SystemExit:  # after the help
        return 0


def _omni(arguments: list[str]) -> int:
    from diffulex.omni.cli import run  # noqa: PLC0415

    return run(arguments)


def _doctor(options: argparse.Namespace) -> int:
    from diffulex.doctor import examine  # noqa: PLC0415 (must run where the rest cannot)

    report = examine()
    print(report.to_json() if options.json else report.to_text())
    return 0 if report.is_healthy else 1
