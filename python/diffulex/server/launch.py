# SPDX-License-Identifier: Apache-2.0
"""Starts a server: cheap checks, listening socket, backend process, HTTP application."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from diffulex.errors import CheckpointError, DiffulexError
from diffulex.log import get_logger, name_process
from diffulex.server.loopback import is_loopback
from diffulex.server.replicas.settings import has_replicas
from diffulex.serving.backend_process import BackendProcess
from diffulex.serving.frontend import FrontendLimits, FrontendManager
from diffulex.serving.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

    from diffulex.server.args import ServerArgs
    from diffulex.serving.replicas.frontend import ReplicaFrontend

__all__ = [
    "default_ipc_addr",
    "in_process_frontend",
    "ipc_directory",
    "limits_of",
    "load_tokenizer",
    "main",
    "remove_ipc_directory",
    "replica_frontend",
    "resolve_zmq_addrs",
    "serve",
    "start_backend",
    "worker_settings",
]

logger = get_logger(__name__)

# The kernel's limit on socket paths, which ZMQ reports late and unclearly.
_MAX_IPC_PATH = 107
_BACKLOG = 2048
_USAGE_ERROR = 2
_STOP_GRACE_S = 10.0
_DIRECTORY_PREFIX, _OWNER_FILE = "diffulex-", "owner"
#: Directories of this process, with the lock by which others know that it lives.
_owned: dict[Path, int] = {}


class _StartupError(RuntimeError):
    """The server cannot start; the message is one line for the user."""


# Addresses.


def ipc_directory() -> Path:
    """A directory only this user can enter, with a path short enough for sockets; for
    `remove_ipc_directory`. Those of processes that were killed are removed."""
    candidates = [Path(tempfile.gettempdir()), Path("/dev/shm"), Path("/tmp")]
    for parent in candidates:
        if parent.is_dir() and len(str(parent)) + 40 <= _MAX_IPC_PATH:
            _remove_ownerless(parent)
            directory = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=parent))
            # Locked before it has the name by which others find it.
            lock = os.open(directory / "new", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                os.close(lock)
                shutil.rmtree(directory, ignore_errors=True)
                continue
            (directory / "new").rename(directory / _OWNER_FILE)
            _owned[directory] = lock
            return directory
    raise _StartupError(f"ipc: expected a short temporary directory, got {candidates[0]}")


def remove_ipc_directory(directory: Path) -> None:
    """Removes what `ipc_directory` has made."""
    shutil.rmtree(directory, ignore_errors=True)
    os.close(_owned.pop(directory))


def _remove_ownerless(parent: Path) -> None:
    """Removes directories for sockets whose process has ended without doing so.

    A process that lives holds the lock of its file, whatever its number or container.
    """
    for path in parent.glob(f"{_DIRECTORY_PREFIX}*/{_OWNER_FILE}"):
        with contextlib.suppress(OSError):  # of another user, or gone by now
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)


def default_ipc_addr(args: ServerArgs, name: str, directory: Path | None = None) -> str:
    """Address of a socket of this process; a file that is left over there is removed."""
    parent = Path(tempfile.gettempdir()) if directory is None else directory
    path = parent / f"diffulex-{os.getpid()}-{args.port}-{name}.ipc"
    if len(str(path)) > _MAX_IPC_PATH:
        return f"ipc://@diffulex-{os.getpid()}-{args.port}-{name}"
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()
    return f"ipc://{path}"


def resolve_zmq_addrs(args: ServerArgs, directory: Path | None = None) -> tuple[str, str]:
    """(commands, events); those given on the command line win."""
    command = args.zmq_command_addr or default_ipc_addr(args, "command", directory)
    event = args.zmq_event_addr or default_ipc_addr(args, "event", directory)
    for addr in (command, event):
        url = urlsplit(addr)
        if url.scheme == "tcp" and not is_loopback(url.hostname or ""):
            logger.warning("%s: anybody who reaches this address controls the engine", addr)
    return command, event


def _backend(
    args: ServerArgs,
    command_addr: str,
    event_addr: str,
    engine_factory: Callable[..., Any] | None = None,
    socket_directory: Path | None = None,
) -> BackendProcess:
    return BackendProcess(
        *(args.model, worker_settings(args, engine_factory), command_addr, event_addr),
        engine_factory=engine_factory,
        socket_directory=socket_directory,
    )


def worker_settings(
    args: ServerArgs, engine_factory: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Keyword arguments of what makes the engine of a backend."""
    kwargs = dict(args.engine_kwargs())
    if engine_factory is None:
        kwargs["detokenize_snapshots"] = False  # the frontend has a tokenizer as well
    template = _chat_template(args)
    if template is not None:
        kwargs["chat_template"] = template
    return kwargs


def start_backend(
    args: ServerArgs,
    command_addr: str,
    event_addr: str,
    engine_factory: Callable[..., Any] | None = None,
) -> BaseProcess:
    """Starts a backend and waits until it is ready: for front ends of other programs.

    Raises:
        RuntimeError: it failed to start.
    """
    backend = _backend(args, command_addr, event_addr, engine_factory)
    backend.start()
    try:
        backend.wait_ready(args.startup_timeout)
    except RuntimeError:
        backend.process.terminate()
        backend.stop(0.0)
        raise
    return backend.process


# What is checked before anything is loaded.


def _chat_template(args: ServerArgs) -> str | None:
    """The text of --chat-template: of a file, or the template itself."""
    given = args.chat_template
    if not given:
        return None
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _StartupError(f"--chat-template: cannot read {given}: {error}") from error


def load_tokenizer(args: ServerArgs) -> Any:
    """The tokenizer of a server; RuntimeError where its chat template cannot be used."""
    from diffulex.checkpoint.resolve import resolve_model  # noqa: PLC0415
    from diffulex.checkpoint.tokenizer import Tokenizer  # noqa: PLC0415 (at run time only)

    template = _chat_template(args)
    place = (args.tokenizer,) if args.tokenizer else (args.model, args.revision)
    tokenizer = Tokenizer.from_dir(resolve_model(*place))
    if template is not None:
        tokenizer.use_chat_template(template)
    try:
        tokenizer.check_chat_template()
    except CheckpointError as error:
        source = "--chat-template: " if template is not None else ""
        raise _StartupError(f"{source}{error}") from error
    if not tokenizer.has_chat_template:
        logger.warning("no chat template: conversations are rendered as lines of role and content")
    return tokenizer


def _listen(args: ServerArgs) -> socket.socket:
    """The HTTP socket, bound before minutes are spent on loading."""
    if args.uds:
        path = Path(args.uds)
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: Any = str(path)
    else:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        target = (args.host, args.port)
    try:
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        where = args.uds or f"{args.host}:{args.port}"
        raise _StartupError(f"cannot listen on {where}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _url(args: ServerArgs, listener: socket.socket) -> str:
    scheme = "https" if args.ssl_certfile else "http"
    if args.uds:
        return f"unix:{args.uds}"
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def limits_of(args: ServerArgs) -> FrontendLimits:
    """Backpressure of a server."""
    return FrontendLimits(
        max_queue_size=args.max_queue_size,
        max_queued_tokens=args.max_queued_tokens,
        queue_timeout_s=args.queue_timeout,
        request_timeout_s=args.request_timeout,
        denoise_min_interval_ms=args.denoise_min_interval_ms,
    )


def _model_id(args: ServerArgs) -> str:
    names = list(args.served_model_name or ())
    return str(names[0]) if names else Path(str(args.model).rstrip("/")).name


# The server.


def _ready_line(url: str, model_id: str, info: Mapping[str, Any], start: float) -> str:
    return (
        f"READY url={url} model={model_id} strategy={info.get('decoding_strategy', '?')}"
        f" max_model_len={info.get('max_model_len', '?')} load={time.monotonic() - start:.1f}s"
    )


def serve(args: ServerArgs, engine_factory: Callable[..., Any] | None = None) -> int:
    """Serves until stopped; returns the exit code.

    Args:
        args: the command line.
        engine_factory: replaces the real engine; importable by name.
    """
    args.configure_logging()
    try:
        with ExitStack() as stack:
            return _serve(args, engine_factory, stack)
    except (_StartupError, DiffulexError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        print(f"diffulex serve: error: {reason}", file=sys.stderr, flush=True)
        return 1
    except _Terminated:
        return _interrupted(args, 0)
    except KeyboardInterrupt:
        return _interrupted(args, 130)


def _interrupted(args: ServerArgs, code: int) -> int:
    """The exit code of a server that was told to stop while it did not serve."""
    if args.inproc:
        # The thread that loads cannot be interrupted, and Python would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _serve(args: ServerArgs, engine_factory: Any, stack: ExitStack) -> int:
    from diffulex.server.http.api_server import create_app  # noqa: PLC0415 (optional dependencies)
    from diffulex.server.http.http_server import HttpServer  # noqa: PLC0415

    start = time.monotonic()
    # Uvicorn replaces the handler for its time only. Before and after it, too, what is on disk is
    # removed and the backend ended.
    stack.enter_context(_terminated_as_interrupt())
    tokenizer = load_tokenizer(args)
    listener = stack.enter_context(_listen(args))
    if args.uds:
        stack.callback(Path(args.uds).unlink, missing_ok=True)
    url, model_id = _url(args, listener), _model_id(args)
    if args.inproc:
        return _serve_in_process(args, listener, tokenizer, url, start, engine_factory)
    directory = ipc_directory()
    stack.callback(remove_ipc_directory, directory)
    if has_replicas(args):
        name_process("router")
        stack.callback(name_process, "")
        return _serve_replicas(args, listener, tokenizer, url, directory, engine_factory, stack)
    command_addr, event_addr = resolve_zmq_addrs(args, directory)
    frontend = FrontendManager.from_zmq(
        model_id=model_id,
        command_addr=command_addr,
        event_addr=event_addr,
        tokenizer=tokenizer,
        limits=limits_of(args),
        step_timeout_s=args.step_timeout,
    )
    stack.callback(frontend.send_backend.stop)
    stack.callback(frontend.recv_backend.stop)
    server = HttpServer(create_app(frontend, args=args), args, listener, frontend)

    def on_ready(info: Mapping[str, Any]) -> None:
        if info.get("mask_token_id") is not None:
            tokenizer.protect_mask(info["mask_token_id"])
        server.announce(_ready_line(url, model_id, info, supervisor.started_at))

    supervisor = Supervisor(
        frontend,
        lambda: _backend(args, command_addr, event_addr, engine_factory, directory),
        startup_timeout_s=args.startup_timeout,
        is_restarting=args.restart_backend,
        is_staying=args.keep_alive_on_backend_death,
        kills_stuck=args.kill_stuck_backend,
        on_fatal=server.fail,
        on_ready=on_ready,
    )
    server.supervisor = supervisor
    frontend.backend_starting()
    stack.callback(_stop_backend, supervisor)
    supervisor.start_backend()
    if args.early_bind:
        logger.info("listening on %s, loading %s", url, args.model)
    else:
        supervisor.wait_ready()
    return server.run()


def _serve_replicas(
    args: ServerArgs,
    listener: socket.socket,
    tokenizer: Any,
    url: str,
    directory: Path,
    engine_factory: Callable[..., Any] | None,
    stack: ExitStack,
) -> int:
    from diffulex.server.http.api_server import create_app  # noqa: PLC0415
    from diffulex.server.http.http_server import HttpServer  # noqa: PLC0415
    from diffulex.server.replicas import launch as replicas  # noqa: PLC0415

    model_id, start = _model_id(args), time.monotonic()
    settings = worker_settings(args, engine_factory)
    cluster = replicas.joined_cluster(settings)
    frontend = replica_frontend(args, tokenizer, directory, cluster, stack)
    server = HttpServer(create_app(frontend, args=args), args, listener, frontend)

    def on_ready(info: Mapping[str, Any]) -> None:
        if info.get("mask_token_id") is not None:
            tokenizer.protect_mask(info["mask_token_id"])
        sizes = info["data_parallel_size"], info.get("tensor_parallel_size", 1)
        line = _ready_line(url, model_id, info, start)
        server.announce(line + " replicas={} tp={}".format(*sizes))

    options = args, frontend, settings, engine_factory, directory, on_ready, server.fail, cluster
    server.supervisor = group = replicas.make_replica_group(*options)
    stack.callback(group.stop_backends, _STOP_GRACE_S)
    group.start_backends()
    if args.early_bind:
        logger.info("listening on %s, loading %s", url, args.model)
    else:
        group.wait_ready()
    return server.run()


def replica_frontend(
    args: ServerArgs, tokenizer: Any, directory: Path, cluster: Any, stack: ExitStack
) -> ReplicaFrontend:
    """The frontend over all backends.

    Args:
        args: the command line.
        tokenizer: of the model.
        directory: for sockets of this host.
        cluster: where the backends are, see `joined_cluster`; None: on this host.
        stack: closes the sockets.
    """
    from diffulex.server.replicas import launch as replicas  # noqa: PLC0415

    def address(name: str) -> Any:
        if cluster is not None:
            return cluster.new_address()
        return default_ipc_addr(args, name, directory)

    return replicas.make_replica_frontend(
        *(args, address, stack, limits_of(args)),
        model_id=_model_id(args),
        tokenizer=tokenizer,
        step_timeout_s=args.step_timeout,
    )


def _stop_backend(supervisor: Supervisor) -> None:
    supervisor.stop_backend(_STOP_GRACE_S)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came while no server was there to drain."""


def _raise_terminated(number: int, frame: Any) -> None:
    raise _Terminated


class _terminated_as_interrupt:  # noqa: N801 (used like a function)
    """SIGTERM interrupts as Ctrl-C does; in the main thread, where signals arrive."""

    def __enter__(self) -> None:
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, _raise_terminated)

    def __exit__(self, *exc: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)


def in_process_frontend(
    args: ServerArgs,
    *,
    engine_factory: Callable[..., Any] | None = None,
    tokenizer: Any = None,
    on_ready: Callable[[Mapping[str, Any]], None] = lambda info: None,
    on_dead: Callable[[str], None] = lambda reason: None,
) -> Any:
    """The frontend of one process; its `start` loads the model.

    Args:
        args: the command line.
        engine_factory: replaces the real engine.
        tokenizer: of the model; None: it is loaded here.
        on_ready: receives what the engine says about itself.
        on_dead: receives the reason when the engine ends.

    Raises:
        RuntimeError: the tokenizer or the chat template cannot be used.
    """
    from diffulex.serving.inproc import InprocBackend  # noqa: PLC0415
    from diffulex.serving.inproc_frontend import InprocFrontend  # noqa: PLC0415

    reader = load_tokenizer(args) if tokenizer is None else tokenizer

    def ready(info: Mapping[str, Any]) -> None:
        if info.get("mask_token_id") is not None:
            reader.protect_mask(info["mask_token_id"])
        on_ready(info)

    return InprocFrontend(
        InprocBackend(
            args.model, worker_settings(args, engine_factory), engine_factory=engine_factory
        ),
        model_id=_model_id(args),
        tokenizer=reader,
        limits=limits_of(args),
        step_timeout_s=args.step_timeout,
        on_ready=ready,
        on_dead=on_dead,
    )


def _serve_in_process(
    args: ServerArgs,
    listener: socket.socket,
    tokenizer: Any,
    url: str,
    start: float,
    engine_factory: Callable[..., Any] | None,
) -> int:
    from diffulex.server.http.api_server import create_app  # noqa: PLC0415
    from diffulex.server.http.http_server import HttpServer  # noqa: PLC0415

    frontend = in_process_frontend(
        args,
        engine_factory=engine_factory,
        tokenizer=tokenizer,
        on_ready=lambda info: server.announce(_ready_line(url, _model_id(args), info, start)),
        on_dead=lambda reason: server.fail(reason),  # noqa: PLW0108 (bound below)
    )
    server = HttpServer(create_app(frontend, args=args), args, listener, frontend)
    return server.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and serves; returns the exit code."""
    from diffulex.server.args import parse_args  # noqa: PLC0415

    try:
        args = parse_args(argv)
    except DiffulexError as error:
        print(f"diffulex serve: error: {error}", file=sys.stderr, flush=True)
        return _USAGE_ERROR
    return serve(args)
