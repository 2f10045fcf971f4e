# SPDX-License-Identifier: Apache-2.0
"""`diffulex generate` and `diffulex chat`: answers on standard output, figures on standard error."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.checkpoint.resolve import DEMO_PURPOSE, demo_dir
from diffulex.config.flags import check_single_model
from diffulex.engine.template import template_token_ids
from diffulex.engine.terminal import DenoisePainter, opening_spans, printable, snapshot_spans
from diffulex.env import get_text
from diffulex.errors import ConfigError, DiffulexError, PromptError
from diffulex.tools.error_line import USER_ERROR, report_error
from diffulex.tools.prompts import checked_text, read_prompts
from diffulex.tools.request_flags import (
    FRAME_DELAY,
    open_engine,
    sampling_params,
)
from diffulex.trace.files import TraceFile, trace_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from diffulex import Diffulex, RequestOutput, StreamEvent

__all__ = ["CHAT_HELP", "chat", "generate"]

CHAT_HELP = "/help, /reset forgets the conversation, /quit ends it"
#: Requests decoded together unless --max-num-reqs says otherwise.
_DEFAULT_BATCH = 32


def generate(options: argparse.Namespace) -> int:
    """Answers every prompt `n` times and returns the exit code."""
    prompts = read_prompts(options)
    num_answers = len(prompts) * options.n
    is_plain = num_answers == 1 and not options.json
    if options.show_denoising and not is_plain:
        raise ConfigError(
            "--show-denoising: expected one answer as text, got --json, --n or a file"
        )
    with (
        _trace_file(options) as trace,
        open_engine(options, max_num_reqs=min(num_answers, _DEFAULT_BATCH)) as engine,
    ):
        inputs = [_token_ids(engine, prompt, options) for prompt in prompts]
        if options.template is not None:
            options.template_ids = template_token_ids(options.template, engine.tokenizer)
        if is_plain:
            output = _answer(engine, inputs[0], options)
            _trace([output], prompts, engine, trace)
            if options.logprobs is not None:
                _print_logprobs(output, engine)
            _print_summary(output, engine)
            return 0
        outputs = engine.generate(
            inputs,
            sampling_params(options, logprobs=options.logprobs),
            use_tqdm=sys.stderr.isatty(),
            summary=False,
            n=options.n,
        )
        questions = [prompt for prompt in prompts for _ in range(options.n)]
        _trace(outputs, questions, engine, trace)
        for index, output in enumerate(outputs):
            _print_answer(_checked(output), divmod(index, options.n), engine, options)
    return 0


def _trace_file(options: argparse.Namespace) -> contextlib.AbstractContextManager[TraceFile | None]:
    """The file of --trace, opened before the work is done that it is for."""
    if options.trace is not None:
        return TraceFile(Path(options.trace))
    if options.trace_level is not None:
        raise ConfigError("--trace-level: expected --trace with it, got none")
    return contextlib.nullcontext()


def _trace(
    outputs: Iterable[RequestOutput],
    questions: Iterable[str],
    engine: Diffulex,
    file: TraceFile | None,
) -> None:
    for output, question in zip(outputs, questions, strict=True):
        if file is not None:
            name = engine.config.model.model_dir.name
            file.append(trace_record(output, engine.tokenizer, question=question, model=name))


def _token_ids(engine: Diffulex, prompt: str, options: argparse.Namespace) -> list[int]:
    if engine.tokenizer.has_chat_template and not options.raw:
        first = [] if options.system is None else [{"role": "system", "content": options.system}]
        return engine.tokenizer.apply_chat_template([*first, {"role": "user", "content": prompt}])
    if options.system is not None:
        raise PromptError("--system: expected a chat template in use, got raw generation")
    return engine.tokenizer.encode(prompt)


def _print_answer(
    output: RequestOutput, place: tuple[int, int], engine: Diffulex, options: argparse.Namespace
) -> None:
    """The answer of (prompt, choice): a line of JSON, or its text below a heading."""
    prompt, choice = place
    if options.json:
        print(json.dumps(_record(output, prompt, choice, engine), ensure_ascii=False))
        return
    print(f"==> prompt {prompt + 1}, answer {choice + 1} <==")
    print(_shown(output.text))
    if options.logprobs is not None:
        _print_logprobs(output, engine)


def _record(output: RequestOutput, prompt: int, choice: int, engine: Diffulex) -> dict[str, Any]:
    """What a program wants to know of an answer."""
    metrics = output.metrics
    record: dict[str, Any] = {
        "prompt": prompt,
        "choice": choice,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "completion_reason": output.completion_reason,
        "token_ids": list(output.token_ids),
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": metrics.completion_tokens,
            "nfe": metrics.nfe,
            "tpf": metrics.tpf,
        },
    }
    if output.logprobs is not None:
        name = _token_namer(engine)
        record["logprobs"] = [
            {
                "token": name(item.token_id),
                "token_id": item.token_id,
                "logprob": item.logprob,
                "step": item.step,
                "top": [{"token": name(t), "token_id": t, "logprob": p} for t, p in item.top],
            }
            for item in output.logprobs
        ]
    return record


def _token_namer(engine: Diffulex) -> Callable[[int], str]:
    return lambda token_id: engine.tokenizer.decode([token_id], skip_special_tokens=False)


def _print_logprobs(output: RequestOutput, engine: Diffulex) -> None:
    """A line per token: the forward that wrote it, its log-probability, the likeliest others."""
    name = _token_namer(engine)
    print("forward  logprob  token; the likeliest")
    for item in output.logprobs or ():
        # No minus sign before a rounded zero.
        top = "  ".join(f"{name(token)!r} {round(p, 3) + 0.0:.3f}" for token, p in item.top)
        print(
            f"{item.step:7d} {round(item.logprob, 3) + 0.0:8.3f}  {name(item.token_id)!r}; {top}".rstrip(
                "; "
            )
        )


def _answer(engine: Diffulex, ids: list[int], options: argparse.Namespace) -> RequestOutput:
    """Streams one answer to standard output and returns it."""
    params = sampling_params(options, logprobs=getattr(options, "logprobs", None))
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
    delay = options.frame_delay if options.frame_delay is not None else FRAME_DELAY * is_terminal
    output: RequestOutput | None = None
    tokenizer = engine.tokenizer
    decoder = tokenizer.incremental_decoder()
    settled: tuple[int, ...] = ()
    num_shown = 0
    try:
        decoding = engine.config.decoding
        # A canvas starts where the prompt ends, blocks at multiples of their size.
        offset = 0 if decoding.traits.has_canvas else prompt_len
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


def chat(options: argparse.Namespace) -> int:
    """Converses until the end of input and returns the exit code."""
    check_single_model(options)
    if sys.stdin is None:
        raise PromptError("chat: expected standard input, got a closed one")
    is_interactive = sys.stdin.isatty()
    start = [] if options.system is None else [{"role": "system", "content": options.system}]
    num_errors = 0
    with open_engine(options, max_num_reqs=1) as engine:
        if not engine.tokenizer.has_chat_template:
            raise ConfigError("chat: expected a checkpoint with a chat template, got none")
        if _is_demo(engine):
            print(DEMO_PURPOSE, file=sys.stderr)
        if is_interactive:
            _enable_line_editing()
            print(CHAT_HELP, file=sys.stderr)
        messages = list(start)
        for line in _chat_lines(is_interactive):
            if line == "/reset":
                messages = list(start)
            elif line == "/help":
                print(CHAT_HELP, file=sys.stderr)
            elif line.startswith("/"):
                num_errors += 1
                print(f"error: unknown command {line!r}; {CHAT_HELP}", file=sys.stderr)
            else:
                messages.append({"role": "user", "content": line})
                try:
                    checked_text(line)
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
                    report_error(error)
                    continue
                messages.append({"role": "assistant", "content": output.text})
                _print_summary(output, engine)
    return USER_ERROR if num_errors and not is_interactive else 0


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
