# SPDX-License-Identifier: Apache-2.0
"""A program on this machine, and the same as a model of the engine.

Symbols: S rows of a call, n logits rows, V vocabulary.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from diffulex.log import get_logger
from diffulex.quiet import quiet
from diffulex_edge.bundle import file_sha256
from diffulex_edge.errors import ProgramError, native_reason, require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from diffulex.families.spec import ModelSpec
    from diffulex_edge.bundle import Bundle

__all__ = ["FORMAT", "PteModel", "PteProgram", "check_program", "split_rows"]

logger = get_logger(__name__)

#: Version of the constants; a program of a later one is refused.
FORMAT = 2
METHOD = "forward"
_MAGIC = b"ET12"
_HEADER = b"eh00"
_RUNTIME = "executorch.extension.pybindings._C"
_CONSTANTS = ("get_", "use_", "enable_", "dlx_")


class _Threads:
    """The one thread pool of the process; made anew only when another size is wanted."""

    count: int | None = None


def check_file(path: Path) -> None:
    """Raises ProgramError unless a file has the header of a program and its whole length."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
        size = path.stat().st_size
    except OSError as error:
        raise ProgramError(f"program: cannot read {path}: {error.strerror}") from error
    if len(head) < 8 or head[4:8] != _MAGIC:
        raise ProgramError(f"program: {path}: expected an ExecuTorch program, got another file")
    if head[8:12] != _HEADER or len(head) < 40:
        return
    program_size, segment_base, segment_size = struct.unpack_from("<QQQ", head, 16)
    needed = segment_base + segment_size if segment_base else program_size
    if size < needed:
        raise ProgramError(
            f"program: {path}: expected at least {needed} bytes, got {size}: the file is cut short"
        )


def check_program(bundle: Bundle) -> None:
    """Raises ProgramError unless the program of a bundle is, byte for byte, the exported one.

    The runtime follows what a damaged file points at, and computes with damaged weights.
    """
    path = bundle.program_path
    check_file(path)
    found = file_sha256(path)
    if found != bundle.program_sha256:
        raise ProgramError(
            f"program: {path}: expected SHA-256 {bundle.program_sha256[:12]} as in edge.json,"
            f" got {found[:12]}: the file is damaged or of another export"
        )


class PteProgram:
    """A loaded program with its constants. One sequence: its cache lives in it.

    Args:
        path: the ``.pte`` file.
        threads: of the runtime's pool, which the whole process shares; None: as many as torch uses.

    Raises:
        ProgramError: the file is damaged, foreign or needs what this runtime lacks.
        ConfigError: executorch is not installed.
    """

    INPUTS = ("tokens", "positions", "visible_end", "logits_rows")

    def __init__(self, path: Path | str, *, threads: int | None = None) -> None:
        self.path = Path(path)
        check_file(self.path)
        with quiet():
            runtime = require(_RUNTIME)
            # Registers the operators of quantised embeddings.
            require("executorch.kernels.quantized")
            _set_threads(runtime, torch.get_num_threads() if threads is None else threads)
            try:
                self._program = runtime._load_program(
                    os.fspath(self.path),
                    program_verification=runtime.Verification.InternalConsistency,
                )
                self._methods = self._load_methods()
            except RuntimeError as error:
                reason = native_reason(error)
                raise ProgramError(f"program: cannot load {self.path}: {reason}") from error
        self.threads: int = runtime._threadpool_get_thread_count()
        self._forward = self._methods[METHOD]

    def _load_methods(self) -> dict[str, Any]:
        count = self._program.num_methods()
        names = [self._program.get_method_name(index) for index in range(count)]
        if METHOD not in names or "dlx_format" not in names:
            raise ProgramError(
                f"program: {self.path}: expected a program of diffulex edge export, got the methods"
                f" {', '.join(names[:8])}"
            )
        self.constants: dict[str, Any] = {}
        for name in names:
            if name.startswith(_CONSTANTS):
                values = self._program.load_method(name)([])
                single = len(values) == 1 and not name.endswith("_ids")
                self.constants[name] = values[0] if single else list(values)
        if self.constants["dlx_format"] > FORMAT:
            raise ProgramError(
                f"program: {self.path}: expected format {FORMAT} or older,"
                f" got {self.constants['dlx_format']}: it needs a newer diffulex"
            )
        if not self.constants.get("enable_dynamic_shape"):
            raise ProgramError(
                f"program: {self.path}: expected a program for any number of rows, got one of fixed"
                " shapes"
            )
        return {METHOD: self._program.load_method(METHOD)}

    @property
    def max_rows(self) -> int:
        """Most rows of a call."""
        return int(self.constants["dlx_max_rows"])

    @property
    def max_logits(self) -> int:
        """Most logits rows of a call."""
        return int(self.constants["dlx_max_logits"])

    @property
    def cache_rows(self) -> int:
        """Positions that the cache holds."""
        return int(self.constants["get_max_context_len"])

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return int(self.constants["get_vocab_size"])

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V of all layers."""
        names = ("dlx_num_layers", "dlx_num_kv_heads", "dlx_head_dim")
        layers, heads, dim = (int(self.constants[name]) for name in names)
        size = 2 if self.constants.get("dlx_kv_dtype") == "float16" else 4
        return layers * 2 * heads * self.cache_rows * dim * size

    def input_shapes(self) -> list[list[int]]:
        """Largest shape of every input."""
        meta = self._forward.method_meta()
        return [list(meta.input_tensor_meta(i).sizes()) for i in range(meta.num_inputs())]

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible_end: Tensor, logits_rows: Tensor
    ) -> Tensor:
        """Logits [n, V] float32 of int64 tokens [S], positions [S], ends [S] and rows [n].

        Raises:
            ProgramError: an argument is out of range, or the runtime fails.
        """
        self._check("tokens", tokens, self.vocab_size, self.max_rows)
        self._check("positions", positions, self.cache_rows, self.max_rows)
        self._check("visible_end", visible_end, self.cache_rows + 1, self.max_rows)
        self._check("logits_rows", logits_rows, tokens.numel(), self.max_logits)
        inputs = (tokens.view(1, -1), positions, visible_end, logits_rows)
        try:
            outputs = self._forward([item.contiguous() for item in inputs])
        except RuntimeError as error:
            raise ProgramError(
                f"program: cannot run {self.path}: {native_reason(error)}"
            ) from error
        logits: Tensor = outputs[0][0]
        return logits

    def _check(self, name: str, values: Tensor, limit: int, longest: int) -> None:
        if values.dtype != torch.int64 or values.dim() != 1 or not 1 <= values.numel() <= longest:
            raise ProgramError(
                f"program: {name}: expected 1 to {longest} int64 values, got"
                f" {list(values.shape)} {values.dtype}"
            )
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= limit:
            bad = low if low < 0 else high
            raise ProgramError(f"program: {name}: expected values in [0, {limit}), got {bad}")


def _set_threads(runtime: Any, threads: int) -> None:
    if threads != _Threads.count:
        runtime._unsafe_reset_threadpool(threads)
        _Threads.count = threads


def split_rows(
    positions: Sequence[int], visible_end: Sequence[int], max_rows: int
) -> Iterator[tuple[int, int]]:
    """Cuts rows into calls: [begin, end) of each.

    A row may begin a call if no row before it sees its position: what the call before has stored is
    then all that its own rows should have seen.

    Raises:
        ProgramError: rows that see each other do not fit one call.
    """
    count, begin = len(positions), 0
    while begin < count:
        end = min(count, begin + max_rows)
        if end < count:
            # Largest visible end of the rows [begin, i), for every i.
            highest, allowed = 0, begin
            for row in range(begin, end + 1):
                if row > begin and highest <= positions[row]:
                    allowed = row
                if row < end:
                    highest = max(highest, visible_end[row])
            if allowed == begin:
                raise ProgramError(
                    f"program: expected at most {max_rows} rows that see each other, got more:"
                    " export with a larger --max-rows"
                )
            end = allowed
        yield begin, end
        begin = end


class Program(Protocol):
    """What `PteModel` needs: a loaded program, or a module that stands for one."""

    @property
    def max_rows(self) -> int: ...

    @property
    def max_logits(self) -> int: ...

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible_end: Tensor, logits_rows: Tensor
    ) -> Tensor:
        """Logits [n, V]."""


class PteModel(nn.Module):
    """A program as the model of a `ModelRunner` with one request on the CPU.

    A program computes only the logits that a step asks for. Its "hidden states" are therefore one
    number a row, the place of the row's logits; `compute_logits` looks them up.
    """

    #: The cache lives in the program: the runner's has no layers.
    owns_kv = True

    def __init__(self, spec: ModelSpec, program: Program) -> None:
        super().__init__()
        self.spec, self.program = spec, program
        self._ends = torch.zeros(0, dtype=torch.int64)
        self._wanted = torch.zeros(0, dtype=torch.int64)
        self._logits = torch.zeros(0, spec.vocab_size)
        #: Calls of the program and rows of them.
        self.num_calls = self.num_rows = 0

    @classmethod
    def load(cls, spec: ModelSpec, bundle: Bundle) -> PteModel:
        """The model of a bundle.

        Raises:
            ProgramError: it cannot be loaded, or is not the program that the bundle describes.
        """
        check_program(bundle)
        path = bundle.program_path
        program = PteProgram(path)
        for name, value in bundle.expected_constants.items():
            if program.constants.get(name) != value:
                raise ProgramError(
                    f"program: {path}: {name}: expected {value!r} as in edge.json,"
                    f" got {program.constants.get(name)!r}"
                )
        logger.info(
            "program: %s, %s, %s, %d threads",
            path.name,
            program.constants["dlx_backend"],
            program.constants["dlx_quant"],
            program.threads,
        )
        return cls(spec, program)

    def begin_step(self, visible_end: Tensor, logits_rows: Tensor) -> None:
        """Takes what a step adds to its rows: ends [S] int64 of the real ones, wanted rows [n]."""
        self._ends, self._wanted = visible_end, logits_rows.long()

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: Any, kv_cache: Any) -> Tensor:
        """Places [T, 1] int64 of the rows' logits, -1 for rows that the step does not ask for."""
        del metadata, kv_cache  # both describe pages
        count = self._ends.numel()
        places = torch.full((input_ids.size(0), 1), -1, dtype=torch.int64)
        wanted = torch.unique(self._wanted)
        places[wanted, 0] = torch.arange(wanted.numel())
        pieces = []
        for begin, end in split_rows(
            positions[:count].tolist(), self._ends.tolist(), self.program.max_rows
        ):
            rows = wanted[(wanted >= begin) & (wanted < end)] - begin
            self.num_rows += end - begin
            # Rows are the same in every call for them, so that repeating one changes nothing.
            for part in rows.split(self.program.max_logits) if rows.numel() else (None,):
                self.num_calls += 1
                asked = torch.zeros(1, dtype=torch.int64) if part is None else part
                logits = self.program(
                    input_ids[begin:end], positions[begin:end], self._ends[begin:end], asked
                )
                if part is not None:
                    pieces.append(logits)
        self._logits = torch.cat(pieces) if pieces else self._logits[:0]
        return places

    def compute_logits(self, hidden_rows: Tensor) -> Tensor:
        """Logits [n, V] for places [n, 1] of `forward`."""
        return self._logits.index_select(0, hidden_rows[:, 0])
