# SPDX-License-Identifier: Apache-2.0
"""Registration of the ops: schemas, kernels per device, fakes, torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import diffulex_ext
import op_calls
import op_schemas
from fixtures.quick import quick

ROOT = Path(__file__).resolve().parents[3]
OPS = sorted(op_calls.CALLS)
RESERVED = {"mode", "self", "_mutable_op", "_all_bases"}


def test_every_registered_op_is_covered_here() -> None:
    registered = {
        name.removeprefix("diffulex::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("diffulex::")
    }
    assert registered == set(OPS) | op_calls.CUDA_ONLY.keys()


def test_rows_of_the_list_expand_to_the_recorded_schemas() -> None:
    """A changed schema shows in a review: `python tests/python/ops/op_schemas.py` records it."""
    is_recorded = (ROOT / op_schemas.RECORD).read_text("utf-8") == op_schemas.text(ROOT)
    assert is_recorded, "run: python tests/python/ops/op_schemas.py"


@pytest.mark.parametrize("op", OPS)
def test_schema_writes_and_returns_nothing(op: str) -> None:
    schema = getattr(torch.ops.diffulex, op).default._schema
    assert len(schema.returns) == 0
    assert op_calls.written(op)
    assert not RESERVED & {argument.name for argument in schema.arguments}


@pytest.mark.parametrize("op", OPS)
def test_kernels_are_registered(op: str) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"diffulex::{op}", "CPU")
    with_cuda = has_kernel("diffulex::rms_norm", "CUDA")
    # Those of op_calls.CPU_ONLY are registered too: their kernel is the error that explains it.
    assert has_kernel(f"diffulex::{op}", "CUDA") == with_cuda


@pytest.mark.parametrize("op", quick(OPS, OPS[::12]))
def test_opcheck(device: str, op: str) -> None:
    tensors, numbers = op_calls.make(op, device)
    torch.library.opcheck(getattr(torch.ops.diffulex, op).default, tuple(tensors.values()), numbers)


@pytest.mark.parametrize("op", OPS)
def test_meta_tensors_are_accepted(op: str) -> None:
    tensors, numbers = op_calls.make(op, "meta")
    op_calls.run(op, tensors, numbers)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", quick(OPS, OPS[::16]))
def test_compiled_call_equals_eager(device: str, op: str, dynamic: bool) -> None:
    eager, numbers = op_calls.make(op, device)
    traced, _ = op_calls.make(op, device)
    written = op_calls.written(op)

    def step(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
        named = dict(zip(eager, tensors))
        op_calls.run(op, named, numbers)
        # Reading the written tensors catches a functionalisation that lost the mutation.
        return [named[name] * 1 for name in written if named[name] is not None]

    expected = step(*eager.values())
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    actual = compiled(*traced.values())
    for name, first, second in zip(written, expected, actual):
        if name != "workspace":
            assert torch.equal(first, second), name
    for name in written:
        if eager[name] is not None and name != "workspace":
            assert torch.equal(eager[name], traced[name]), name


def test_compiled_wrappers_allocate_their_outputs() -> None:
    from diffulex import ops

    x, weight = torch.randn(5, 64), torch.randn(64)

    def layer(x: torch.Tensor) -> torch.Tensor:
        residual = x.clone()
        normed = ops.rms_norm(x, weight, 1e-6)
        ops.add_rms_norm(normed, residual, weight, 1e-6)
        return ops.act_and_mul(normed) + residual[:, :32]

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_inputs_that_require_grad_give_no_graph() -> None:
    from diffulex import ops

    x = torch.randn(3, 64, requires_grad=True)
    assert not ops.rms_norm(x, None, 1e-6).requires_grad


@pytest.mark.parametrize("op", OPS)
def test_inference_mode(device: str, op: str) -> None:
    with torch.inference_mode():
        tensors, numbers = op_calls.make(op, device)
        op_calls.run(op, tensors, numbers)


def test_warmup_knows_its_devices(device: str) -> None:
    from diffulex import ops

    ops.warmup(device)
    with pytest.raises(ValueError, match=r"ops\.warmup: device: expected cpu or cuda, got meta"):
        ops.warmup("meta")


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_import_without_torch() -> None:
    done = _python(
        "import sys, diffulex_ext; print(diffulex_ext.has_ops, 'torch' in sys.modules)",
        DIFFULEX_NO_TORCH="1",
    )
    assert (done.returncode, done.stdout.split()) == (0, ["False", "False"]), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "diffulex_ext"])
def test_both_import_orders(first: str) -> None:
    second = "diffulex_ext" if first == "torch" else "torch"
    done = _python(
        f"import {first}, {second}; import diffulex_ext; "
        "print(diffulex_ext.has_ops, hasattr(torch.ops.diffulex, 'rms_norm'))"
        if first == "torch"
        else f"import {first}, {second}; "
        "print(diffulex_ext.has_ops, hasattr(torch.ops.diffulex, 'rms_norm'))"
    )
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr


_TRACE = """
import diffulex_ext
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

class Norm(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        torch.ops.diffulex.rms_norm(x, None, out, eps=1e-6)
        return out

with FakeTensorMode():
    print(list(Norm()(torch.empty(4, 256)).shape))
exported = torch.export.export(Norm(), (torch.ones(4, 256),)).module()
print(torch.equal(exported(torch.ones(4, 256)), Norm()(torch.ones(4, 256))))
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("diffulex::")]
print([name for name in names if not has_kernel(name, "Meta")])
print([name for name in ("transformers", "diffulex.nn", "diffulex.engine") if name in sys.modules])
"""


@pytest.mark.slow
def test_the_import_alone_is_enough_for_tracing() -> None:
    done = _python(_TRACE)
    expected = ["[4, 256]", "True", "[]", "[]"]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "diffulex.ops",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("diffulex.ops.sampling", "diffulex_ext._core")
        ),
    ],
)
def test_the_fakes_are_registered_whichever_comes_first(first: str) -> None:
    code = (
        f"import {first}, diffulex_ext, torch\n"
        "x = torch.empty(2, 8, device='meta')\n"
        "torch.ops.diffulex.rms_norm(x, None, x, eps=1e-6)\n"
        "from diffulex import ops\n"
        "print(ops.rms_norm(x, None, 1e-6).shape[1])"
    )
    done = _python(code)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


_TWO_THREADS = """
import sys, threading, time
import torch

load, errors = torch.ops.load_library, []

def import_other():
    try:
        import diffulex.ops
    except BaseException as error:
        errors.append(repr(error))

thread = threading.Thread(target=import_other)

def load_slowly(path):
    thread.start()
    while "diffulex.ops" not in sys.modules:
        time.sleep(0.01)
    time.sleep(0.3)  # it waits for this import
    load(path)

torch.ops.load_library = load_slowly
import diffulex_ext
thread.join()
x = torch.empty(2, 8, device="meta")
torch.ops.diffulex.rms_norm(x, None, x, eps=1e-6)
print(errors)
"""


@pytest.mark.slow
def test_threads_may_import_both_packages_at_once() -> None:
    """Each holds what the other one waits for."""
    done = _python(_TWO_THREADS)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.slow
def test_wrong_environment_value_is_an_error() -> None:
    done = _python("import diffulex_ext", DIFFULEX_NO_TORCH="yes")
    assert done.returncode != 0
    assert "DIFFULEX_NO_TORCH: expected 0 or 1, got 'yes'" in done.stderr
    code = (
        "import torch, diffulex_ext\n"
        "x = torch.ones(1, 4)\n"
        "torch.ops.diffulex.rms_norm(x, None, x, eps=1e-6)"
    )
    done = _python(code, DIFFULEX_CHECK="maybe")
    assert done.returncode != 0
    assert "DIFFULEX_CHECK: expected 0 or 1, got maybe" in done.stderr


def test_ops_without_the_library_say_so() -> None:
    done = _python("import diffulex.ops", DIFFULEX_NO_TORCH="1")
    assert done.returncode != 0
    assert "ImportError: diffulex.ops: expected the op library" in done.stderr


def test_cmake_prefix_path() -> None:
    assert Path(diffulex_ext.cmake_prefix_path) == Path(diffulex_ext.__file__).parent
    command = [sys.executable, "-m", "diffulex_ext", "--cmake-prefix-path"]
    environment = {**os.environ, "DIFFULEX_NO_TORCH": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == diffulex_ext.cmake_prefix_path
    done = subprocess.run(command[:-1], env=environment, capture_output=True, check=False)
    assert done.returncode == 2
