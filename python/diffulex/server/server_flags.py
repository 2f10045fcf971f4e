# SPDX-License-Identifier: Apache-2.0
"""The one table of the server's own settings: field, flag, kind, default, range, help.

The engine's settings are in `diffulex.config.table`; `diffulex.server.args` puts both together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diffulex.config.flags import integer, number
from diffulex.env import get_flag, get_text
from diffulex.errors import ConfigError

__all__ = ["HttpArgs", "ServerFlag", "add_http_flags", "check_http_args", "http_flags"]


#: Settings of a backend in a separate process.
_TWO_PROCESSES = (
    "early_bind",
    "restart_backend",
    "keep_alive_on_backend_death",
    "kill_stuck_backend",
    "zmq_command_addr",
    "zmq_event_addr",
)


class _Rule(NamedTuple):
    kind: str
    help: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None


class ServerFlag(NamedTuple):
    """One row of the table.

    Attributes:
        kind: `str`, `int`, `float`, `switch` (off unless given), `toggle` (has a `--no-` form),
            `repeat` (may be given more than once), `json` (a JSON list) or `key_value`.
    """

    name: str
    kind: str
    default: Any
    help: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.name.replace("_", "-")


def _flag(
    kind: str,
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    rule = _Rule(kind, help_text, choices, low, high)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"rule": rule})
    return field(default=default, metadata={"rule": rule})


def _switch(help_text: str) -> Any:
    return _flag("switch", False, help_text)


@dataclass
class HttpArgs:
    """Settings of the HTTP process. Times are in seconds; 0 turns a limit off where it says so."""

    model: str = _flag("str", "demo", "`demo` (bundled), a checkpoint directory or a hub id.")
    # The safe choice for a command without arguments: 0.0.0.0 is one flag away.
    host: str = _flag("str", "127.0.0.1", "Address to listen on; 0.0.0.0: all.")
    port: int = _flag("int", 8000, "Port to listen on; 0: any free one.", low=0, high=65535)
    uds: str | None = _flag("str", None, "Unix domain socket to listen on instead of a port.")
    log_level: str = _flag(
        "str",
        "info",
        "Least severe log line.",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )
    log_format: str = _flag("str", "text", "Form of log lines.", choices=("text", "json"))
    log_requests: str = _flag(
        "str",
        "summary",
        "A log line per generating request; `full` includes prompts, for DIFFULEX_LOG_PROMPTS=1 and"
        " --log-level debug.",
        choices=("none", "summary", "full"),
    )
    access_log: bool = _flag("toggle", True, "A log line per HTTP request.")
    config: str | None = _flag("str", None, "YAML file with the same keys; the command line wins.")
    zmq_command_addr: str = _flag("str", "", "Address of the command socket; empty: private ipc.")
    zmq_event_addr: str = _flag("str", "", "Address of the event socket; empty: private ipc.")
    inproc: bool = _switch("One process: the engine runs beside the HTTP side.")
    early_bind: bool = _switch("Answer (503) before the model is loaded.")
    served_model_name: tuple[str, ...] = _flag(
        "repeat", (), "Name clients use, the first is the default [last part of --model]."
    )
    accept_any_model: bool = _switch("Answer to any model name.")
    tokenizer: str | None = _flag("str", None, "Tokenizer directory [--model].")
    trust_remote_code: bool = _switch("Refused: code of checkpoints is never run.")
    chat_template: str | None = _flag("str", None, "Chat template: a file, or the template itself.")
    trust_request_chat_template: bool = _switch("Requests may bring a chat template.")
    v1_stream_mode: str = _flag(
        "str",
        "block_append",
        "Stream mode of the OpenAI routes for requests that name none.",
        choices=("block_append", "denoise", "both"),
    )
    default_max_tokens: int = _flag(
        "int", 512, "max_tokens of /generate and chat requests that give none.", low=1
    )
    min_accept_threshold: float = _flag(
        "float", 0.0, "Least accept_threshold that a request may set.", low=0, high=1
    )
    max_accept_threshold: float = _flag(
        "float", 1.0, "Largest accept_threshold that a request may set.", low=0, high=1
    )
    max_request_post_edit_steps: int = _flag(
        "int", 1024, "Largest max_post_edit_steps that a request may set.", low=0
    )
    max_request_penalty: float = _flag(
        "float", 1000.0, "Largest penalty_lambda that a request may set.", low=0
    )
    max_trajectory_tokens: int = _flag(
        "int", 8192, "Largest max_tokens of a request with return_trajectory; 0: none.", low=0
    )
    max_n: int = _flag("int", 16, "Most choices (n) of a request.", low=1)
    max_prompts_per_request: int = _flag("int", 256, "Most prompts of a completion.", low=1)
    api_key: tuple[str, ...] = _flag(
        "repeat", (), "Key that requests must carry as Bearer token; also DIFFULEX_API_KEY."
    )
    admin_api_key: tuple[str, ...] = _flag(
        "repeat",
        (),
        "Key that pauses and changes of weights ask for, and that opens every other route as well; also"
        " DIFFULEX_ADMIN_API_KEY [--api-key].",
    )
    allowed_hosts: tuple[str, ...] = _flag(
        "repeat",
        (),
        "Name that requests may have in `Host`; * is any"
        " [without --api-key on 127.0.0.1 or localhost: this machine, else any].",
    )
    allowed_origins: tuple[str, ...] = _flag("json", (), "CORS: origins; empty: no CORS headers.")
    allowed_methods: tuple[str, ...] = _flag("json", ("*",), "CORS: methods.")
    allowed_headers: tuple[str, ...] = _flag("json", ("*",), "CORS: headers.")
    allow_credentials: bool = _switch("CORS: cookies and authorisation from other origins.")
    max_body_bytes: int = _flag(
        "int",
        0,
        "Limit of a request body, bytes; 0: 256 per token of max_model_len, 4 MiB to 32 MiB.",
        low=0,
    )
    max_header_bytes: int = _flag(
        "int", 64 << 10, "Limit of the head of a request, bytes; 0: no limit.", low=0
    )
    max_connections: int = _flag(
        "int", 0, "Most connections; 0: by the limit of open files.", low=0
    )
    read_timeout: float = _flag(
        "float",
        30.0,
        "Longest wait for the head of a request, and for its body to go on; 0: off.",
        low=0,
    )
    ping_interval: float = _flag(
        "float", 15.0, "Pause after which a stream sends a comment; 0: never.", low=0
    )
    max_queue_size: int = _flag(
        "int", 1024, "Requests in flight beyond max_num_reqs; 0: no limit.", low=0
    )
    max_queued_tokens: int = _flag("int", 0, "Prompt plus wanted tokens in flight; 0: off.", low=0)
    queue_timeout: float = _flag("float", 0.0, "Longest wait for the first step; 0: off.", low=0)
    request_timeout: float = _flag("float", 0.0, "Longest request; 0: off.", low=0)
    denoise_min_interval_ms: float = _flag(
        "float", 0.0, "Least time between snapshots of a request.", low=0
    )
    startup_timeout: float = _flag("float", 1800.0, "Longest start of the backend.", low=0)
    drain_timeout: float = _flag("float", 30.0, "Time open requests get after SIGTERM.", low=0)
    step_timeout: float = _flag("float", 600.0, "Step time that counts as stuck; 0: off.", low=0)
    kill_stuck_backend: bool = _switch("Kill a backend that is stuck or gives no sign of life.")
    restart_backend: bool = _switch("Start the backend again when it dies.")
    min_ready_replicas: int = _flag(
        "int", 0, "Replicas that must be ready before the server is; 0: all.", low=0
    )
    replica_retries: int = _flag(
        "int", 2, "How often a request starts again when its replica is lost.", low=0
    )
    keep_alive_on_backend_death: bool = _switch("Keep answering (503) when the backend died.")
    disable_metrics: bool = _switch("No /metrics.")
    metrics_port: int | None = _flag("int", None, "Port of /metrics [--port].", low=1, high=65535)
    metrics_auth: bool = _switch("/metrics needs an API key; not for --metrics-port.")
    disable_ui: bool = _switch("No page at /ui.")
    disable_admin_routes: bool = _switch(
        "No routes for operators: /abort, /flush_cache, profiles, pauses, weights."
    )
    disable_dllm_usage: bool = _switch("`usage` without the fields of diffusion models.")
    root_path: str = _flag("str", "", "Path prefix a proxy adds.")
    ssl_keyfile: str | None = _flag("str", None, "TLS key.")
    ssl_certfile: str | None = _flag("str", None, "TLS certificate.")
    profiler: str | None = _flag("str", None, "Profiler of the engine.", choices=("torch",))
    torch_profiler_dir: str = _flag("str", "", "Directory of the traces.")
    profiler_record_shapes: bool = _switch("Trace shapes.")
    profiler_memory: bool = _switch("Trace memory.")
    profiler_with_stack: bool = _switch("Trace stacks.")
    profiler_delay_iterations: int = _flag("int", 0, "Steps before tracing starts.", low=0)
    profiler_max_iterations: int = _flag("int", 200, "Steps that are traced; 0: all.", low=0)
    engine_arg: Mapping[str, Any] = _flag(
        "key_value", {}, "KEY=VALUE of docs/configuration.md; the value is YAML."
    )


def http_flags() -> list[ServerFlag]:
    """The table."""
    flags = []
    for item in dataclasses.fields(HttpArgs):
        rule: _Rule = item.metadata["rule"]
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        flags.append(
            ServerFlag(item.name, rule.kind, default, rule.help, rule.choices, rule.low, rule.high)
        )
    return flags


def _json_list(text: str) -> tuple[str, ...]:
    """Argument type: a JSON list of texts."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"expected a JSON list of texts, got {text!r}")
    return tuple(value)


def _key_value(text: str) -> tuple[str, Any]:
    """Argument type: KEY=VALUE, the value in YAML."""
    import yaml  # noqa: PLC0415 (comes with the extra `serve`)

    key, has_value, value = text.partition("=")
    if not has_value or not key.strip():
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return key.strip().replace("-", "_"), yaml.safe_load(value)
    except yaml.YAMLError:
        raise argparse.ArgumentTypeError(f"expected a YAML value, got {text!r}") from None


_TYPES: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": integer,
    "float": number,
    "repeat": str,
    "json": _json_list,
    "key_value": _key_value,
}


def add_http_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per row, absent unless given."""
    group = parser.add_argument_group("server options")
    for row in http_flags():
        common: dict[str, Any] = {"dest": row.name, "default": argparse.SUPPRESS}
        shown = f"{row.help} [{_shown(row)}]" if row.kind not in ("switch", "repeat") else row.help
        common["help"] = shown.replace("%", "%%")
        if row.kind == "switch":
            group.add_argument(row.flag, action="store_true", **common)
        elif row.kind == "toggle":
            group.add_argument(row.flag, action=argparse.BooleanOptionalAction, **common)
        else:
            is_many = row.kind in ("repeat", "key_value")
            group.add_argument(
                row.flag,
                type=_TYPES[row.kind],
                action="append" if is_many else "store",
                choices=row.choices or None,
                metavar=None if row.choices else _metavar(row.kind),
                **common,
            )


def _metavar(kind: str) -> str:
    return {"repeat": "TEXT", "str": "TEXT", "key_value": "KEY=VALUE"}.get(kind, kind.upper())


def _shown(row: ServerFlag) -> str:
    if row.default in (None, "", (), {}):
        return "unset"
    if row.kind == "json":
        return json.dumps(row.default)
    return str(row.default).lower() if isinstance(row.default, bool) else str(row.default)


def check_http_args(args: HttpArgs) -> None:
    """Checks ranges and what belongs together.

    Raises:
        ConfigError: a setting is out of range or contradicts another one.
    """
    _check_ranges(args)
    _check_certificate(args)
    _check_metrics(args)
    if args.inproc:
        for name in _TWO_PROCESSES:
            if getattr(args, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}: expected two processes, got --inproc")
    if args.trust_remote_code:
        raise ConfigError(
            "--trust-remote-code: expected it absent: code of checkpoints is never run, got it"
        )
    if args.log_requests == "full" and not (
        get_flag("DIFFULEX_LOG_PROMPTS") and args.log_level in ("debug", "trace")
    ):
        raise ConfigError(
            "--log-requests full: expected DIFFULEX_LOG_PROMPTS=1 and --log-level debug with it, got"
            f" DIFFULEX_LOG_PROMPTS={get_text('DIFFULEX_LOG_PROMPTS')} and {args.log_level}"
        )
    if args.profiler is not None and not args.torch_profiler_dir:
        raise ConfigError("--torch-profiler-dir: expected a directory with --profiler, got none")
    for flag, keys in (("--api-key", args.api_key), ("--admin-api-key", args.admin_api_key)):
        if any(not key.strip() for key in keys):
            raise ConfigError(f"{flag}: expected a key, got an empty one")
    if args.root_path and not args.root_path.startswith("/"):
        raise ConfigError(
            f"--root-path: expected a path that starts with /, got {args.root_path!r}"
        )


def _check_ranges(args: HttpArgs) -> None:
    for row in http_flags():
        value = getattr(args, row.name)
        if value is None or row.low is None:
            continue
        # Not a number compares false as well.
        if not (row.low <= value and (row.high is None or value <= row.high)):
            high = "" if row.high is None else f" and <= {row.high:g}"
            raise ConfigError(f"{row.flag}: expected >= {row.low:g}{high}, got {value!r}")


def _check_certificate(args: HttpArgs) -> None:
    """Loads key and certificate as the server will, which is only after the model."""
    key, certificate = args.ssl_keyfile, args.ssl_certfile
    if key is None and certificate is None:
        return
    if key is None or certificate is None:
        given = "--ssl-keyfile" if certificate is None else "--ssl-certfile"
        raise ConfigError(f"--ssl-keyfile and --ssl-certfile: expected both, got only {given}")
    try:
        # A key with a password is an error rather than a question on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "--ssl-keyfile, --ssl-certfile: expected a key without password and its certificate,"
            f" got {key}, {certificate}: {error}"
        ) from error


def _check_metrics(args: HttpArgs) -> None:
    if args.metrics_auth and not args.api_key:
        raise ConfigError("--metrics-auth: expected --api-key with it, got none")
    if args.metrics_auth and args.metrics_port is not None:
        raise ConfigError(
            "--metrics-auth: expected /metrics beside the other routes, got --metrics-port, whose"
            " port asks for no key"
        )
