# SPDX-License-Identifier: Apache-2.0
"""The server's command line: its own settings and those of the engine.

Both halves are generated from tables (`server_flags`, `diffulex.config.table`): a row gives the
field of `ServerArgs`, the flag, the key of `--config` files and the engine's keyword.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from diffulex.config.flags import Parser, UsageError, add_engine_flags, file_arguments
from diffulex.config.parse import normalise
from diffulex.config.table import CONFIG_TABLE, THRESHOLD_KEYS, Support
from diffulex.env import get_text
from diffulex.errors import ConfigError
from diffulex.log import configure, get_logger, warn_once
from diffulex.server.loopback import LOCALHOST, is_loopback
from diffulex.server.replicas.settings import check_replica_args
from diffulex.server.server_flags import HttpArgs, add_http_flags, check_http_args, http_flags

__all__ = [
    "INTERNAL_ENGINE_KEYS",
    "ServerArgs",
    "add_server_flags",
    "build_arg_parser",
    "parse_args",
    "parse_device_ids",
]

logger = get_logger(__name__)

#: Keys of the engine without a flag of the same name: the model is a setting of the server, and the
#: profiler has flags for its parts.
INTERNAL_ENGINE_KEYS = ("model", "profiler_config")

#: Flags of older servers that turn a key of the engine off.
_DISABLING = {
    "--disable-prefill-cudagraph": "enable_prefill_cudagraph",
    "--disable-full-static-runner": "enable_full_static_runner",
    "--disable-torch-compile": "enable_torch_compile",
    "--disable-prefix-caching": "enable_prefix_caching",
}
#: Flags of older servers that do nothing here, so that launch scripts keep working.
_IGNORED = ("deepep_mode", "deepep_num_max_dispatch_tokens_per_rank")
#: Names of kernels in older servers, and what they mean here.
_LEGACY_VALUES = {
    "attn_impl": {"triton_grouped": "auto", "triton": "auto"},
    "moe_gemm_impl": {"triton": "auto", "vllm": "auto", "vllm_modular": "auto"},
}
#: What most servers need, in the help of one screen.
_COMMON = (
    *("words", "host", "port", "api_key", "served_model_name", "config", "log_level", "device"),
    *("dtype", "revision", "decoding_strategy", "block_size", "buffer_size", "accept_threshold"),
    *("max_num_reqs", "max_model_len", "gpu_memory_utilization", "allowed_origins", "metrics_port"),
)
_SECRET = ("api_key", "admin_api_key", "ssl_keyfile", "ssl_certfile")


def parse_device_ids(value: str | None) -> list[int]:
    """Device ids of a comma-separated text; blanks are skipped.

    Raises:
        ValueError: a part is no integer.
    """
    parts = (value or "").split(",")
    return [int(part) for part in parts if part.strip()]


class _ArgsMethods(HttpArgs):
    """What `ServerArgs` does with its fields."""

    def engine_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the engine.

        A setting that was not given is absent, so that what the checkpoint and the model family
        prefer holds; `device_ids` and `decoding_thresholds` are always there.

        Raises:
            ConfigError: a key is unknown or given twice.
        """
        given = {name: getattr(self, name) for name in _ENGINE_FIELDS}
        kwargs = {name: value for name, value in given.items() if value is not None}
        for name, value in self.engine_arg.items():
            if name in INTERNAL_ENGINE_KEYS[:1]:
                raise ConfigError(f"--engine-arg {name}: expected it as --{name}, got it here")
            if name in kwargs:
                raise ConfigError(
                    f"--engine-arg {name}: expected it once, got --{name.replace('_', '-')} as well"
                )
            kwargs[name] = value
        thresholds = dict(kwargs.pop("decoding_thresholds", None) or {})
        thresholds |= {name: kwargs.pop(name) for name in THRESHOLD_KEYS if name in kwargs}
        kwargs["decoding_thresholds"] = thresholds
        kwargs["device_ids"] = list(kwargs.get("device_ids") or ())
        for name, names in _LEGACY_VALUES.items():
            if kwargs.get(name) in names:
                kwargs[name] = _renamed(name, kwargs[name], names[kwargs[name]])
        for name in _IGNORED:
            if name in kwargs:
                _warn_ignored(name)
                del kwargs[name]
        profiler = self._profiler_config()
        if profiler is not None:
            kwargs["profiler_config"] = profiler
        return kwargs

    def _profiler_config(self) -> dict[str, Any] | None:
        if self.profiler is None:
            return None
        return {
            "profiler": self.profiler,
            "torch_profiler_dir": self.torch_profiler_dir,
            "record_shapes": self.profiler_record_shapes,
            "profile_memory": self.profiler_memory,
            "with_stack": self.profiler_with_stack,
            "delay_iterations": self.profiler_delay_iterations,
            "max_iterations": self.profiler_max_iterations,
        }

    def app_options(self) -> dict[str, Any]:
        """Options of `create_app`."""
        names = {item.name for item in dataclasses.fields(_app_options())}
        own = {item.name for item in dataclasses.fields(HttpArgs)}
        return {
            **{name: getattr(self, name) for name in own & names},
            "served_model_name": self.served_names,
            "allowed_hosts": self.host_names,
            "has_weight_routes": bool(
                self.api_key or self.admin_api_key or self.uds or is_loopback(self.host)
            ),
            "metrics_host": self.host,
            "settings": self.public_settings(),
        }

    def configure_logging(self) -> None:
        """Installs the handlers of the log; processes started from here use the same settings."""
        level = {"critical": "error", "trace": "debug"}.get(self.log_level, self.log_level)
        os.environ["DIFFULEX_LOG_LEVEL"] = level
        os.environ["DIFFULEX_LOG_FORMAT"] = self.log_format
        configure()
        # The lines of the HTTP server go where the others go, in the same form.
        http = get_logger("uvicorn")
        http.handlers, http.propagate = list(get_logger().handlers), False

    def log_warnings(self) -> None:
        """Says what is allowed but may not be meant."""
        is_public = not (self.uds or is_loopback(self.host))
        if is_public and not self.api_key:
            logger.warning("--host %s: anybody who reaches it may use it (no --api-key)", self.host)

    def uvicorn_options(self) -> dict[str, Any]:
        """Options of `uvicorn.Config`; the socket and the time to drain are the launcher's."""
        from diffulex.server.http.http_protocol import (  # noqa: PLC0415 (needs the extra `serve`)
            ConnectionLimits,
            bounded_protocol,
        )

        limits = ConnectionLimits.of(self.max_header_bytes, self.read_timeout, self.max_connections)
        return {
            "http": bounded_protocol(limits),
            "log_level": self.log_level,
            "log_config": None,
            "access_log": self.access_log,
            "root_path": self.root_path,
            "ssl_keyfile": self.ssl_keyfile,
            "ssl_certfile": self.ssl_certfile,
            # Answers do not say which software serves them.
            "server_header": False,
        }

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the model, the default one first."""
        return self.served_model_name or (PurePath(self.model).name or self.model,)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names that requests may have in `Host`; empty: any.

        A server that only this machine reaches, and that asks for no key, is open to every page in
        a browser on it: a page can have its own name resolve to 127.0.0.1, but not claim another.
        """
        if "*" in self.allowed_hosts:
            return ()
        is_open = self.api_key or self.uds or not is_loopback(self.host)
        if is_open and not self.allowed_hosts:
            return ()
        return (*self.allowed_hosts, LOCALHOST)

    def public_settings(self) -> dict[str, Any]:
        """Every setting that was given or has a default, without secrets."""
        shown = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name not in _SECRET and value is not None:
                shown[item.name] = list(value) if isinstance(value, tuple) else value
        return shown

    def check(self) -> None:
        """Checks everything that can be checked without the model.

        Raises:
            ConfigError: a setting is unknown, out of range or contradicts another one.
        """
        check_http_args(self)
        kwargs = self.engine_kwargs()
        if kwargs.get("use_lora") and not kwargs.get("lora_path"):
            raise ConfigError("--lora-path: expected a directory with --use-lora, got none")
        settings = normalise(kwargs, where="")
        if self.min_accept_threshold > self.max_accept_threshold:
            raise ConfigError(
                f"--min-accept-threshold: expected at most --max-accept-threshold"
                f" {self.max_accept_threshold:g}, got {self.min_accept_threshold:g}"
            )
        _check_names(settings)
        check_replica_args(self, settings)
        for name in kwargs:
            key = CONFIG_TABLE.get(name)
            if key is not None and key.support is Support.IGNORED:
                _warn_ignored(name)


def _check_names(settings: Mapping[str, Any]) -> None:
    """The names of a strategy and of a model, which no checkpoint is needed for."""
    from diffulex.checkpoint.auto_model import check_model_name  # noqa: PLC0415
    from diffulex.config.resolve import check_strategy_name  # noqa: PLC0415

    if settings.get("worker_imports"):  # which may register both
        return
    strategy, model_name = settings.get("decoding_strategy"), settings.get("model_name")
    if strategy is not None:
        check_strategy_name(strategy)
    if model_name is not None:
        check_model_name(model_name)


def _app_options() -> type[Any]:
    from diffulex.server.http.app_options import AppOptions  # noqa: PLC0415 (needs the extra `serve`)

    return AppOptions


def _renamed(name: str, old: str, new: str) -> str:
    text = "--%s %s: deprecated name, read as %s"
    warn_once(logger, f"legacy {name}", text, name.replace("_", "-"), old, new)
    return new


def _warn_ignored(name: str) -> None:
    warn_once(logger, f"ignored {name}", "--%s: accepted, has no effect", name.replace("_", "-"))


_ENGINE_FIELDS = tuple(
    key.name for key in CONFIG_TABLE.values() if key.name not in INTERNAL_ENGINE_KEYS
)

if TYPE_CHECKING:

    class ServerArgs(_ArgsMethods):
        """Settings of the server and of its engine."""

        def __init__(self, **settings: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...
else:
    # One field per key of the engine; None: not given.
    ServerArgs = dataclasses.make_dataclass(
        "ServerArgs",
        [(name, Any, dataclasses.field(default=None)) for name in _ENGINE_FIELDS],
        bases=(_ArgsMethods,),
        namespace={"__doc__": "Settings of the server and of its engine.", "__module__": __name__},
    )


def build_arg_parser() -> Parser:
    """The parser; flags that are not given leave no trace in the result."""
    parser = Parser(
        prog="diffulex serve",
        description="Serves a block-diffusion language model over HTTP.",
        usage="diffulex serve [MODEL] [flags]",
        allow_abbrev=False,
    )
    add_server_flags(parser)
    return parser


def add_server_flags(parser: Parser) -> None:
    """The server's settings and those of the engine."""
    parser.add_argument(
        "words", nargs="*", metavar="MODEL", default=argparse.SUPPRESS, help="as --model"
    )
    parser.shorten_help(_COMMON)
    add_http_flags(parser)
    add_engine_flags(parser, without=INTERNAL_ENGINE_KEYS)
    group = parser.add_argument_group("names of older servers")
    for flag, name in _DISABLING.items():
        group.add_argument(
            flag,
            dest=name,
            action="store_const",
            const=False,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS if CONFIG_TABLE[name].support is Support.IGNORED else None,
        )


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """The checked settings of a command line, of its `--config` file and of the environment.

    Raises:
        ConfigError: anything is missing, unknown or out of range; one line says what.
    """
    parser = build_arg_parser()
    given = vars(parser.parse_checked(sys.argv[1:] if argv is None else argv))
    given_model = given.get("model")
    if given.get("config") is not None:
        from_file = file_arguments(parser, Path(given["config"]), _JSON_FLAGS)
        given = {**vars(parser.parse_checked(from_file)), **given}
    given |= _model_of(given.pop("words", []), given_model)
    given["engine_arg"] = _once(given.get("engine_arg", []))
    keys = {
        "api_key": get_text("DIFFULEX_API_KEY"),
        "admin_api_key": get_text("DIFFULEX_ADMIN_API_KEY"),
    }
    for name, text in keys.items():
        if name not in given:
            given[name] = [key.strip() for key in text.split(",") if key.strip()]
    args = ServerArgs(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    args.check()
    return args


def _model_of(words: Sequence[str], given: str | None) -> dict[str, str]:
    """The model as the one word of the command line, which may name it as a flag instead."""
    if len(words) > 1:
        raise UsageError(f"command line: expected one MODEL, got {' '.join(map(repr, words))}")
    if words and given is not None:
        raise UsageError(f"model: expected MODEL or --model, got both {words[0]!r} and {given!r}")
    return {"model": words[0]} if words else {}


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise UsageError(f"--engine-arg {key}: expected it once, got it again")
        values[key] = value
    return values


_JSON_FLAGS = tuple(row.name for row in http_flags() if row.kind == "json")
