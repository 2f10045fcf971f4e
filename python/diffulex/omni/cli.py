# SPDX-License-Identifier: Apache-2.0
"""``diffulex omni``: draw pictures from a prompt, and measure how often they are right.

Exit codes and errors are those of ``diffulex``: its `main` calls `run` and reports what is raised.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.config.flags import (
    Commands,
    Parser,
    add_config_flag,
    add_engine_flags,
    add_log_level,
    boolean,
    engine_kwargs,
    integer,
    integers,
    mapping,
    number,
    numbers,
    positive_integer,
    seconds,
    some,
    texts,
)
from diffulex.env import get_text, get_unchecked
from diffulex.errors import ConfigError
from diffulex.log import configure
from diffulex.omni.bench.evaluate import DEFAULT_LIMIT, evaluate_shapes
from diffulex.omni.bench.fit_teacache import DEFAULT_CAPTIONS, fit_teacache, shape_captions
from diffulex.omni.bench.speed import measure_speed
from diffulex.omni.cache.selector import cache_name
from diffulex.omni.config import OmniDiffusionConfig
from diffulex.omni.config_table import OMNI_CONFIG_TABLE
from diffulex.omni.half_blocks import PicturePainter
from diffulex.omni.mp4 import save_video
from diffulex.omni.omni_diffusion import OmniDiffusion
from diffulex.omni.pictures import read_picture
from diffulex.omni.request import make_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from diffulex.omni.outputs import OmniRequestOutput
    from diffulex.omni.worker import StepEvent

__all__ = ["add_omni_commands", "build_parser", "run"]

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_VIDEO_SUFFIXES = (".mp4", ".gif")
_DEFAULT_OUTPUT = "picture.png"
#: Frames of a second.
_DEFAULT_FPS, _MOST_FPS = 16.0, 120
_BENCH_PROMPT = "a red circle left of a blue square"
#: Pictures shown on the way to the result.
_NUM_PREVIEWS = 10
#: Fields of a request that are options of `generate`, with their types.
_FIELDS: dict[str, tuple[Any, str]] = {
    "negative_prompt": (str, "what the picture should not show"),
    "height": (positive_integer, "pixels"),
    "width": (positive_integer, "pixels"),
    "num_frames": (positive_integer, "frames of a video"),
    "num_inference_steps": (positive_integer, "denoising steps"),
    "guidance_scale": (number, "weight of the prompt; one scale"),
    "true_cfg_scale": (number, "weight of the prompt; models with a branch for the negative one"),
    "strength": (number, "how much of --image goes, up to 1"),
    "max_sequence_length": (positive_integer, "tokens of the prompt"),
    "timeout_s": (number, "seconds until it is stopped [never]"),
    "seed": (integer, "of the first picture, the next ones count on [drawn]"),
}
#: Fields that `eval` takes as lists, one run per combination.
_SWEPT = {
    "num_inference_steps": some(integers),
    "true_cfg_scale": some(numbers),
    "guidance_scale": some(numbers),
}
#: Keys that `eval --cache` sets by a number.
_THRESHOLDS = {"tea_cache": "rel_l1_thresh", "cache_dit": "residual_diff_threshold"}
#: Keys that a command sets itself.
_OWN_KEYS = ("output_type", "num_inference_steps")
#: Short names of keys, unless a command has a flag that is called so.
_SHORT: dict[str, tuple[str, Any]] = {
    "--cache": ("cache_backend", str),
    "--cfg-parallel": ("cfg_parallel_size", positive_integer),
    "--tp": ("tensor_parallel_size", positive_integer),
    "--dp": ("data_parallel_size", positive_integer),
    "--pp": ("pipeline_parallel_size", positive_integer),
    "--usp": ("ulysses_degree", positive_integer),
    "--ulysses": ("ulysses_degree", positive_integer),
    "--ring": ("ring_degree", positive_integer),
}
#: Keys of the engine in the short help.
_COMMON_KEYS = ("model", "device", "cache_backend")


def run(arguments: list[str]) -> int:
    """Runs ``diffulex omni`` with these arguments and returns its exit code."""
    parser = build_parser()
    if not arguments:
        parser.print_help()
        return 0
    try:
        options = parser.parse_with_file(arguments)
    except SystemExit:  # after the help
        return 0
    has_level = options.log_level is not None or get_unchecked("DIFFULEX_LOG_LEVEL")
    configure(level=options.log_level if has_level else "warning")
    code: int = options.command(options)
    return code


def build_parser() -> Parser:
    """The parser of all commands of images."""
    parser = Parser(
        prog="diffulex omni",
        description="Draws images and videos with diffusion transformers.",
        allow_abbrev=False,
    )
    add_omni_commands(parser)
    return parser


def add_omni_commands(parser: Parser) -> None:
    """Adds the commands and their flags."""
    commands = Commands(parser, "diffulex omni")

    def add(name: str, command: Any, text: str, words: str = "") -> Parser:
        child = commands.add(name, text, words)
        child.set_defaults(command=command)
        add_log_level(child)
        add_config_flag(child)
        return child

    _add_generate(add("generate", _generate, "draw a prompt", "PROMPT"))
    _add_eval(add("eval", _eval, "how often a model of shapes draws what a caption says"))
    _add_bench(add("bench", _bench, "how long a picture takes"))
    _add_serve(add("serve", _serve, "serve the images API of OpenAI"))


def _add_generate(parser: Parser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default=_DEFAULT_OUTPUT,
        help=".png, .jpg or .webp, .mp4 or .gif for a video"
        f" [{_DEFAULT_OUTPUT}]; several: FILE_0, FILE_1",
    )
    parser.add_argument(
        "--fps",
        type=_frames_a_second,
        default=_DEFAULT_FPS,
        help="frames of a second of a video [16]",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="a picture to change, for models that do it; may be given more than once",
    )
    parser.add_argument("-n", type=positive_integer, default=1, help="pictures [1]")
    for name, (kind, text) in _FIELDS.items():
        shown = text if text.endswith("]") else f"{text} [the model's]"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=shown)
    parser.add_argument(
        "--show-denoising", action="store_true", help="show the picture on the way, in a terminal"
    )
    _add_engine_keys(parser)


def _add_engine_keys(parser: Parser) -> None:
    """All of them, after the command's own flags, which fill the short help."""
    own = parser.names()
    add_engine_flags(parser, table=OMNI_CONFIG_TABLE, without=_OWN_KEYS)
    for flag, (key, kind) in _SHORT.items():
        if flag.strip("-").replace("-", "_") not in own:
            text = f"short for --{key.replace('_', '-')}"
            parser.add_argument(flag, dest=key, type=kind, default=argparse.SUPPRESS, help=text)
    parser.add_argument(
        "--cache-config",
        type=mapping,
        metavar="JSON",
        default={},
        help="keys of the cache by name; their own flags count more",
    )
    parser.shorten_help((*own, *_COMMON_KEYS))


def _add_eval(parser: Parser) -> None:
    parser.add_argument(
        "--limit",
        type=positive_integer,
        default=DEFAULT_LIMIT,
        help=f"held-out captions [{DEFAULT_LIMIT}]",
    )
    parser.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write a report, .json or .md; may be given more than once",
    )
    for name, kind in _SWEPT.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=(), metavar="X[,X]", help="one run per value")
    _add_cache_list(
        parser,
        "one run per cache, with X as its threshold, compared with the first: none,cache_dit=0.1",
    )
    _add_engine_keys(parser)


def _add_cache_list(parser: Parser, text: str) -> None:
    parser.add_argument(
        "--cache", type=some(texts), default=(), metavar="NAME[=X][,...]", help=text
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE[,...]",
        help="one more run with these settings, compared with the first, which has none of them;"
        " may be given more than once",
    )


def _add_bench(parser: Parser) -> None:
    parser.add_argument("--prompt", default=_BENCH_PROMPT, help=f"[{_BENCH_PROMPT}]")
    for name in ("height", "width", "num_frames", "guidance_scale", "true_cfg_scale"):
        kind, text = _FIELDS[name]
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=f"{text} [the model's]")
    parser.add_argument(
        "--steps",
        "--num-inference-steps",
        dest="steps",
        type=positive_integer,
        help="denoising steps [the model's]",
    )
    parser.add_argument("-n", type=positive_integer, default=1, help="pictures of a request [1]")
    parser.add_argument(
        "--repeat", type=positive_integer, default=5, help="requests after a first one [5]"
    )
    _add_cache_list(parser, "one row per cache, with X as its threshold: none,cache_dit=0.1")
    parser.add_argument(
        "--fit-teacache",
        action="store_true",
        help="instead: find coefficients of tea_cache for the model; --output FILE.json gets them",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt a line, for --fit-teacache [captions of shapes]",
    )
    parser.add_argument(
        "--limit",
        type=positive_integer,
        default=DEFAULT_CAPTIONS,
        help=f"most prompts of --fit-teacache [{DEFAULT_CAPTIONS}]",
    )
    parser.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="write a report, .json or .md; may be given more than once",
    )
    _add_engine_keys(parser)


def _add_serve(parser: Parser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    parser.add_argument("--port", type=_port, default=8000, help="0: any free one [8000]")
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the model in requests; may be given more than once [its directory]",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that requests must have; may be given more than once [$DIFFULEX_API_KEY]",
    )
    parser.add_argument(
        "--drain-timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="what running requests get when the server is told to stop [30]",
    )
    _add_engine_keys(parser)


def _port(text: str) -> int:
    value = integer(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return value


def _frames_a_second(text: str) -> float:
    value = number(text)
    if not 1 <= value <= _MOST_FPS:
        raise argparse.ArgumentTypeError(f"expected 1 to {_MOST_FPS} frames, got {text!r}")
    return value


def _serve(options: argparse.Namespace) -> int:
    kwargs = _engine_kwargs(options)
    try:
        from diffulex.omni.serve import ServeOptions, serve  # noqa: PLC0415 (needs an extra)
    except ImportError as error:
        raise ConfigError(
            f"omni serve: expected the package {error.name} (pip install '.[serve]' in the source"
            " directory), got none"
        ) from error
    keys = options.api_key or get_text("DIFFULEX_API_KEY").split(",")
    try:
        return serve(
            kwargs,
            ServeOptions(
                options.host,
                options.port,
                tuple(options.served_model_name),
                tuple(key.strip() for key in keys if key.strip()),
                options.drain_timeout,
            ),
        )
    except OSError as error:
        raise ConfigError(
            f"omni serve: cannot listen on {options.host}:{options.port}: {error.strerror or error}"
        ) from error


def _engine_kwargs(options: argparse.Namespace) -> dict[str, Any]:
    kwargs = _given(options)
    # Before anything slow is imported: what is misspelt should be answered at once.
    OmniDiffusionConfig.from_kwargs(**kwargs)
    return kwargs


def _given(options: argparse.Namespace) -> dict[str, Any]:
    # By itself: its errors say where they are.
    OmniDiffusionConfig.from_kwargs(cache_config=options.cache_config)
    flags = engine_kwargs(options, table=OMNI_CONFIG_TABLE, without=_OWN_KEYS)
    return {**options.cache_config, **flags}


def _generate(options: argparse.Namespace) -> int:
    kwargs = _engine_kwargs(options)
    fields = {name: getattr(options, name) for name in _FIELDS}
    most = OmniDiffusionConfig.from_kwargs(**kwargs).engine.max_pixels
    # Before the pipeline is known, which may want their transparency.
    pictures = [read_picture(path, f"--image {path}", most, "RGBA") for path in options.image]
    more = {"num_outputs_per_prompt": options.n, "pil_image": pictures or None}
    request = make_request(options.prompt, {**fields, **more})
    target = _checked_target(options.output)
    with OmniDiffusion(**kwargs) as engine:
        is_video = engine.engine.spec.media == "video"
        if is_video != (target.suffix.lower() in _VIDEO_SUFFIXES):
            kind = "an .mp4 or .gif file for a video" if is_video else "a .png, .jpg or .webp file"
            raise ConfigError(f"--output: expected {kind}, got {options.output!r}")
        with _Course(options.show_denoising and not is_video) as course:
            (output,) = engine.generate_requests([request], on_step=course.step)
            if course.painter is not None:
                course.painter.show(output.images[0], options.prompt)
    for path in _save(output, target, options.fps):
        print(path)
    metrics = output.metrics
    print(
        f"[{metrics['width']}x{metrics['height']}, {metrics['num_inference_steps']} steps,"
        f" seed {metrics['seed']}, {metrics['execute_s']:.1f} s]",
        file=sys.stderr,
    )
    return 0


def _checked_target(name: str) -> Path:
    path = Path(name)
    if path.suffix.lower() not in (*_IMAGE_SUFFIXES, *_VIDEO_SUFFIXES):
        kinds = ", ".join((*_IMAGE_SUFFIXES, *_VIDEO_SUFFIXES))
        raise ConfigError(f"--output: expected a file name that ends in {kinds}, got {name!r}")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"--output: expected a file in an existing directory, got {name!r}")
    return path


def _save(output: OmniRequestOutput, target: Path, fps: float) -> list[Path]:
    paths = []
    for number_, image in enumerate(output.images):
        path = target
        if output.num_images > 1:
            path = target.with_name(f"{target.stem}_{number_}{target.suffix}")
        if isinstance(image, list):
            save_video(path, image, fps)
        else:
            image.save(path)
        paths.append(path)
    return paths


class _Course:
    """What is seen while a request runs: a bar on standard error, or the picture itself."""

    def __init__(self, shows_picture: bool) -> None:
        is_terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._steps: dict[int, int] = {}
        self.painter: PicturePainter | None = None
        if shows_picture and is_terminal and not get_text("NO_COLOR"):
            size = shutil.get_terminal_size()
            self.painter = PicturePainter(sys.stderr, size.columns, size.lines)
        self._has_bar = is_terminal and self.painter is None

    def __enter__(self) -> _Course:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, event: StepEvent) -> None:
        """The callback of the engine."""
        # Several replicas draw at the same time.
        self._steps[event.call] = event.step
        done, total = sum(self._steps.values()), event.num_calls * event.num_steps
        if self._has_bar:
            if self._bar is None:
                self._bar = _bar("Denoising", total)
            self._bar.update(done - self._bar.n)
        every = max(1, event.num_steps // _NUM_PREVIEWS)
        is_due = event.step % every == 0 or event.step == 1
        if self.painter is not None and is_due:
            self.painter.show(event.preview()[0], f"step {done} of {total}")


def _bar(name: str, total: int) -> Any:
    from tqdm import tqdm  # noqa: PLC0415 (only a terminal needs it)

    return tqdm(total=total, desc=name, leave=False)


def _cache_kwargs(text: str) -> dict[str, Any]:
    """Engine keywords of an item of `eval --cache`."""
    name, has_threshold, threshold = text.partition("=")
    backend = cache_name(name)
    if not has_threshold:
        return {"cache_backend": backend}
    key = _THRESHOLDS.get(str(backend))
    if key is None:
        known = ", ".join(_THRESHOLDS)
        raise ConfigError(f"--cache: expected one of {known} before a threshold, got {text!r}")
    try:
        return {"cache_backend": backend, key: number(threshold)}
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--cache: {error}") from None


def _caches(options: argparse.Namespace, kwargs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Checked engine keywords of every item of `--cache`."""
    caches = {name: _cache_kwargs(name) for name in options.cache}
    for cache in caches.values():
        OmniDiffusionConfig.from_kwargs(**{**kwargs, **cache})
    return caches


def _as_flag(text: str) -> str:
    """`key=value` as an option of the command line, where truth values are switches."""
    name, sign, value = text.partition("=")
    flag = name.replace("_", "-")
    key = OMNI_CONFIG_TABLE.get(name.replace("-", "_"))
    if key is None or key.kind != "bool" or not sign:
        return f"--{flag}{sign}{value}"
    try:
        return f"--{flag}" if boolean(value) else f"--no-{flag}"
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--vary {name}: {error}") from None


def _varied(options: argparse.Namespace, kwargs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Checked engine keywords of every run: the caches, and the items of `--vary`."""
    runs = _caches(options, kwargs)
    if options.vary and not runs:
        runs["as configured"] = {}
    for item in options.vary:
        parser = Parser(prog="--vary", allow_abbrev=False)
        _add_engine_keys(parser)
        # A comma separates settings where a name and a sign follow it, else numbers of a list.
        parts = re.split(r",(?=[A-Za-z_]\w*=)", item)
        flags = [_as_flag(part.strip()) for part in parts]
        given = _given(parser.parse_checked(flags))
        OmniDiffusionConfig.from_kwargs(**{**kwargs, **given})
        runs[item] = given
    return runs


def _bench(options: argparse.Namespace) -> int:
    kwargs = _engine_kwargs(options)
    names = ("height", "width", "num_frames", "guidance_scale", "true_cfg_scale")
    fields = {name: getattr(options, name) for name in names}
    fields = {name: value for name, value in fields.items() if value is not None}
    if options.steps is not None:
        fields["num_inference_steps"] = options.steps
    if options.fit_teacache:
        return _fit(options, kwargs, fields)
    if options.prompts is not None:
        raise ConfigError("--prompts: expected --fit-teacache with it, got none")
    fields["num_outputs_per_prompt"] = options.n
    make_request(options.prompt, fields)
    caches = _varied(options, kwargs)
    with _counting("Drawing", (options.repeat + 1) * max(1, len(caches))) as count:
        report = measure_speed(
            kwargs,
            options.prompt,
            fields,
            caches=caches,
            repeat=options.repeat,
            outputs=options.output,
            command="diffulex " + " ".join(sys.argv[1:]),
            on_request=count,
        )
    print(report.to_text())
    return 0


def _fit(options: argparse.Namespace, kwargs: dict[str, Any], fields: dict[str, Any]) -> int:
    if len(options.output) > 1 or options.cache or options.vary:
        raise ConfigError(
            "--fit-teacache: expected one --output at most, no --cache and no --vary, got more"
        )
    prompts = shape_captions(options.limit)
    if options.prompts is not None:
        try:
            lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--prompts: expected a readable file of text, got {error}"
            ) from error
        prompts = [line for line in lines if line.strip()][: options.limit]
    with _counting("Drawing", len(prompts)) as count:
        output = options.output[0] if options.output else None
        fit = fit_teacache(kwargs, prompts, fields, output=output, on_image=count)
    print(fit.to_text())
    return 0


@contextmanager
def _counting(name: str, total: int) -> Iterator[Callable[[], Any] | None]:
    """What moves a bar by one, in a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _bar(name, total)
    try:
        yield bar.update
    finally:
        bar.close()


def _eval(options: argparse.Namespace) -> int:
    settings: list[dict[str, Any]] = [{}]
    for name in _SWEPT:
        values: Sequence[Any] = getattr(options, name)
        if values:
            settings = [{**setting, name: value} for setting in settings for value in values]
    kwargs = _engine_kwargs(options)
    for setting in settings:
        make_request("-", setting)
    caches = _varied(options, kwargs)
    num_images = options.limit * len(settings) * max(1, len(caches))
    with _counting("Drawing", num_images) as count:
        report = evaluate_shapes(
            kwargs,
            settings=settings,
            caches=caches,
            limit=options.limit,
            outputs=options.output,
            command="diffulex " + " ".join(sys.argv[1:]),
            on_image=count,
        )
    print(report.to_text())
    return 0
