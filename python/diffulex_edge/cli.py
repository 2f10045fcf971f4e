# SPDX-License-Identifier: Apache-2.0
"""``diffulex edge``: export a model to ExecuTorch, look at programs, measure them.

Exit codes and errors are those of ``diffulex``: its `main` calls `run` and reports what is raised.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.checkpoint.resolve import DEMO
from diffulex.config.flags import (
    Commands,
    Parser,
    add_config_flag,
    add_log_level,
    engine_kwargs,
)
from diffulex.env import get_unchecked
from diffulex.log import configure
from diffulex_edge.flags import (
    DECODING_KEYS,
    add_bench_flags,
    add_estimate_flags,
    add_eval_flags,
    add_export_flags,
    add_verify_flags,
    path_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffulex_edge.exporter import ExportResult

__all__ = ["add_edge_commands", "build_parser", "run"]

#: Recipes that `eval` compares by itself.
_EVALUATED = ("none", "8da8w", "8da4w")


def run(arguments: Sequence[str]) -> int:
    """Runs ``diffulex edge`` with these arguments and returns its exit code."""
    parser = build_parser()
    if not arguments:
        parser.print_help()
        return 0
    try:
        options = parser.parse_with_file(arguments)
    except SystemExit:  # after the help
        return 0
    has_level = options.log_level is not None or get_unchecked("DIFFULEX_LOG_LEVEL")
    # A stage that takes minutes is worth a line where there is no bar.
    quiet_level = "warning" if sys.stderr.isatty() or options.name != "export" else "info"
    configure(level=options.log_level if has_level else quiet_level)
    code: int = options.command(options)
    return code


def build_parser() -> Parser:
    """The parser of all edge commands."""
    parser = Parser(
        prog="diffulex edge",
        description="Exports models to ExecuTorch programs, for phones and small computers.",
        allow_abbrev=False,
    )
    add_edge_commands(parser)
    return parser


def add_edge_commands(parser: Parser) -> None:
    """Adds the commands and their flags."""
    commands = Commands(parser, "diffulex edge")

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str, words: str = ""
    ) -> Parser:
        child = commands.add(name, text, words)
        child.set_defaults(command=command)
        add_log_level(child, "warning; export into a file: info")
        child.add_argument("--json", action="store_true", help="print one JSON object")
        if name not in ("info", "backends"):
            add_config_flag(child)
        return child

    add_export_flags(
        add("export", _export, "write a bundle: a program beside the checkpoint's files", "-o DIR")
    )
    info = add("info", _info, "what a bundle holds", "BUNDLE")
    info.add_argument("bundle", metavar="BUNDLE")
    add_estimate_flags(add("estimate", _estimate, "memory of a program, without exporting it"))
    add("backends", _backends, "which backends export and run on this machine")
    add_eval_flags(
        add("eval", _eval, "accuracy, size and time of programs beside their model", "[BUNDLE...]")
    )
    text = "compare a program with its checkpoint and with transformers"
    add_verify_flags(add("verify", _verify, text, "BUNDLE"))
    text = "time and memory of programs, each in a process of its own"
    add_bench_flags(add("bench", _bench, text, "BUNDLE..."))


def _export(options: argparse.Namespace) -> int:
    from diffulex_edge.exporter import ExportConfig, export_model  # noqa: PLC0415
    from diffulex_edge.recipes import with_searched_scales  # noqa: PLC0415

    names = ("compute_unit", "soc")
    result = export_model(
        ExportConfig(
            model=options.model,
            output=Path(options.output).expanduser(),
            backend=options.backend,
            quant=with_searched_scales(options.quant) if options.hqq else options.quant,
            max_model_len=options.max_model_len,
            max_rows=options.max_rows,
            max_logits=options.max_logits,
            overwrite=options.overwrite,
            lora=path_of(options.lora),
            mask_token_id=options.mask_token_id,
            calibration=path_of(options.calibration),
            model_name=options.model_name,
            tolerance=options.tolerance,
            backend_options={
                name: getattr(options, name) for name in names if getattr(options, name)
            },
        ),
        show_progress=True,
    )
    print(json.dumps(result.to_json()) if options.json else _export_text(result), flush=True)
    return 0


def _export_text(result: ExportResult) -> str:
    lines = [
        f"{result.output_path}: {result.file_size_mb:.2f} MB, {result.backend}, {result.quant},"
        f" {result.compilation_time_sec:.0f} s, peak {result.peak_rss_mb:.0f} MB",
        f"  delegates    {result.num_delegates}; left to the runtime:"
        f" {sum(result.undelegated_ops.values())} operators",
    ]
    found = result.self_check
    what = "" if result.device_verified else " (the graph: such programs do not run here)"
    lines.append(
        f"  self-check   error {found.max_error:.2g} at scale {found.scale:.3g}, equal best ids"
        f" {found.argmax:.1%} of {found.num_rows} rows{what}"
    )
    if result.quant != "none":
        lines.append(f"  unquantised  equal best ids {result.agreement.argmax:.1%} (random tokens)")
    lines += [f"  note         {text}" for text in result.warnings]
    return "\n".join(lines)


def _info(options: argparse.Namespace) -> int:
    from diffulex.checkpoint.resolve import resolve_model  # noqa: PLC0415
    from diffulex_edge.backends import backend_of  # noqa: PLC0415
    from diffulex_edge.bundle import file_sha256, read_bundle  # noqa: PLC0415
    from diffulex_edge.program import PteProgram, check_file  # noqa: PLC0415

    bundle = read_bundle(resolve_model(options.bundle))
    check_file(bundle.program_path)
    is_unchanged = file_sha256(bundle.program_path) == bundle.program_sha256
    state = backend_of(bundle.backend).availability()
    # A damaged program is not opened, and one of another machine cannot be.
    program = PteProgram(bundle.program_path) if is_unchanged and state.can_run else None
    facts = {
        name: value for name, value in bundle.facts.items() if not isinstance(value, dict | list)
    }
    report: dict[str, Any] = {
        "bundle": str(bundle.directory),
        "backend": {"name": bundle.backend, **dataclasses.asdict(state)},
        "constants": program.constants if program else {},
        "inputs": [
            {"name": name, "shape": shape}
            for name, shape in zip(program.INPUTS, program.input_shapes(), strict=True)
        ]
        if program
        else [],
        "cache_bytes": program.cache_bytes if program else None,
        "file_bytes": bundle.program_path.stat().st_size,
        "is_unchanged": is_unchanged,
        "self_check": bundle.facts.get("self_check"),
        "agreement_with_unquantised": bundle.facts.get("agreement_with_unquantised"),
        "facts": facts,
    }
    print(json.dumps(report) if options.json else _info_text(report), flush=True)
    return 0


def _info_text(report: dict[str, Any]) -> str:
    backend, constants = report["backend"], report["constants"]
    lines = [
        f"{report['bundle']}: {report['file_bytes'] / 1e6:.2f} MB"
        f"{'' if report['is_unchanged'] else ', CHANGED since the export: not opened'}"
    ]
    if not report["is_unchanged"]:
        return lines[0]
    if not constants:
        lines.append(f"  not opened   {backend['name']}: {backend['reason']}; as edge.json says:")
    else:
        rows = constants["get_max_context_len"]
        lines.append(f"  cache        {report['cache_bytes'] / 1e6:.2f} MB, {rows} positions")
    lines += [
        f"  input        {item['name']} int64 up to {item['shape']}" for item in report["inputs"]
    ]
    shown = constants or report["facts"]
    return "\n".join([*lines, *(f"  {name} = {value!r}" for name, value in sorted(shown.items()))])


def _backends(options: argparse.Namespace) -> int:
    from diffulex_edge.backends import BACKENDS  # noqa: PLC0415

    backends = [backend for _, backend in sorted(BACKENDS.items())]
    if options.json:
        print(json.dumps({"backends": [backend.get_metadata() for backend in backends]}))
        return 0
    for backend in backends:
        print(f"{backend.name:<9} {backend.availability()}")
        print(f"          {backend.target}; recipes {', '.join(backend.recipes)}")
    return 0


def _estimate(options: argparse.Namespace) -> int:
    from diffulex.checkpoint.auto_model import detect  # noqa: PLC0415
    from diffulex.checkpoint.resolve import resolve_model  # noqa: PLC0415
    from diffulex_edge.families import check_family  # noqa: PLC0415
    from diffulex_edge.measure import estimate, longest_length, parse_bytes  # noqa: PLC0415
    from diffulex_edge.presets import preset_spec  # noqa: PLC0415
    from diffulex_edge.recipes import parse_recipe  # noqa: PLC0415

    if options.preset is None:
        spec = detect(resolve_model(options.model))[1]
    else:
        spec = preset_spec(options.preset)
    check_family(spec)
    recipe = parse_recipe(options.quant)
    length = min(options.max_model_len or 2048, spec.max_positions)
    found = estimate(spec, recipe, length)
    report: dict[str, Any] = {"quant": str(recipe), **found.to_json()}
    if options.budget:
        report["longest_max_model_len"] = longest_length(spec, recipe, parse_bytes(options.budget))
    if options.json:
        print(json.dumps(report))
        return 0
    print(f"{options.preset or options.model}, {recipe}, {length} tokens")
    for name in ("weights", "rotary", "graph", "cache", "logits", "scores", "file", "resident"):
        print(f"  {name:<9} {report[name] / 1e6:12.2f} MB")
    if options.budget:
        fits = report["longest_max_model_len"]
        print(
            f"  longest   {fits} tokens within {options.budget}"
            if fits
            else f"  longest   none: the weights alone exceed {options.budget}"
        )
    return 0


def _eval(options: argparse.Namespace) -> int:
    from diffulex.config.sampling_params import SamplingParams  # noqa: PLC0415
    from diffulex_edge.evaluation import evaluate_programs  # noqa: PLC0415

    model, recipes = options.model, options.quant or []
    if not options.bundles:
        model, recipes = model or DEMO, recipes or list(_EVALUATED)
    given = {"top_p": options.top_p, "seed": options.seed}
    evaluate_programs(
        options.bundles,
        model=model,
        recipes=recipes,
        sampling_params=SamplingParams(
            temperature=options.temperature,
            **{name: value for name, value in given.items() if value is not None},
        ),
        engine_kwargs=engine_kwargs(options, table=DECODING_KEYS),
        data=options.data,
        limit=options.limit,
        outputs=options.output,
        show=lambda report: print(
            report.to_json().rstrip() if options.json else report.to_text(), flush=True
        ),
        command="diffulex " + " ".join(sys.argv[1:]),
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    from diffulex_edge.verify import verify_bundle  # noqa: PLC0415

    report = verify_bundle(
        options.bundle,
        options.reference,
        num_inputs=options.inputs,
        tolerance=options.tolerance,
        lora=path_of(options.lora),
        model_name=options.model_name,
        mask_token_id=options.mask_token_id,
        calibration=path_of(options.calibration),
    )
    program = report.program
    if options.json:
        decoder = report.decoder.to_json()
        text = {"passed": report.passed, "decoder": decoder, "program": program.to_json()}
        print(json.dumps(text))
    else:
        print(f"transformers and decoder: {report.decoder}")
        print(
            f"decoder and program: largest difference {program.max_error:.2g} at scale"
            f" {program.scale:.3g}, equal best ids {program.argmax:.1%} of {program.num_rows} rows"
        )
    report.check()
    return 0


def _bench(options: argparse.Namespace) -> int:
    from diffulex.checkpoint.resolve import resolve_model  # noqa: PLC0415
    from diffulex_edge.measure import bench_bundle, table  # noqa: PLC0415

    rows = [
        bench_bundle(resolve_model(name), threads, rows=options.rows, repeat=options.repeat)
        for name in options.bundles
        for threads in options.threads
    ]
    if options.json:
        print(json.dumps({"rows": [dataclasses.asdict(row) for row in rows]}))
        return 0
    head = ("bundle", "threads", "load ms", "step ms", "median", "ratio", "RSS MB", "file MB")
    first = rows[0].step_min_ms
    cells = [
        (
            row.bundle,
            str(row.threads),
            row.load_ms,
            row.step_min_ms,
            row.step_median_ms,
            row.step_min_ms / first,
            row.rss_mb,
            row.file_mb,
        )
        for row in rows
    ]
    print(table([head, *cells]))
    return 0
