# SPDX-License-Identifier: Apache-2.0
"""What is installed and whether it works: build, devices, a self-test on each device."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.errors import CheckpointError
from diffulex.registry import PLUGIN_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


#: Packages of the extras `edge` and `omni`; without them the rest works.
_OPTIONAL = ("executorch", "torchao", "coremltools", "diffusers", "accelerate", "pillow", "nvtx")
#: Packages that every part needs, beside torch.
_REQUIRED = ("transformers", "huggingface_hub", "safetensors", "numpy")
#: Stands for the version of a package that is missing.
_ABSENT = "not installed"
#: Memory that a run of the bundled model takes, with CUDA's own.
_NEEDED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one self-test."""

    device: str
    name: str
    is_ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Facts about the installation and the outcome of every self-test."""

    facts: Mapping[str, Any]
    checks: tuple[Check, ...]

    @property
    def is_healthy(self) -> bool:
        return all(check.is_ok for check in self.checks)

    def to_json(self) -> str:
        checks = [asdict(check) for check in self.checks]
        content = {"facts": dict(self.facts), "checks": checks, "is_healthy": self.is_healthy}
        return json.dumps(content, indent=2, default=str)

    def to_text(self) -> str:
        lines = []
        for key, value in self.facts.items():
            if isinstance(value, dict):
                lines += [f"{key}:", *(f"  {name}: {item}" for name, item in value.items())]
            else:
                lines.append(f"{key}: {value}")
        for check in self.checks:
            outcome = "ok" if check.is_ok else "FAILED"
            detail = f" ({check.detail})" if check.detail else ""
            lines.append(f"self-test {check.device} {check.name}: {outcome}{detail}")
        lines.append("healthy" if self.is_healthy else "broken: see the failed self-tests")
        return "\n".join(lines)


def examine() -> DoctorReport:
    """Collects the facts and runs every self-test; failures become checks, not exceptions."""
    facts: dict[str, Any] = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    checks: list[Check] = []
    build = _attempt(checks, "-", "import diffulex_ext", _build_facts)
    devices = _attempt(checks, "-", "import torch", _device_facts)
    facts.update({"build": build or {}}, **(devices or {}))
    facts["packages"] = {name: _version(name) for name in _REQUIRED}
    facts["optional packages"] = {name: _version(name) for name in _OPTIONAL}
    facts["plug-ins"] = _plugins()
    facts["models"] = _attempt(checks, "-", "read the cache of the hub", _models) or {}
    if devices is not None:
        backends = _attempt(checks, "-", "import diffulex_edge", _edge_backends)
        facts["edge backends"] = backends or {}
        if _version("executorch") != _ABSENT:
            _attempt(checks, "cpu", "edge program", _check_edge)
        images = _attempt(checks, "-", "use the installed diffusers", _image_engine)
        facts["image engine"] = images or "broken: see the self-tests"
    if build is not None and devices is not None:
        tests = _attempt(checks, "-", "load the ops", _self_tests) or {}
        for device in ("cpu", *devices["cuda devices"]):
            if device != "cpu":
                archs = tuple(build["cuda_archs"])
                _attempt(
                    checks, device, "kernels", functools.partial(_check_kernels, device, archs)
                )
                _attempt(checks, device, "free memory", functools.partial(_check_memory, device))
            for name, test in tests.items():
                _attempt(checks, device, name, functools.partial(test, device))
    return DoctorReport(facts, tuple(checks))


def _plugins() -> dict[str, str]:
    """What packages add to the registries, with where it is and the package; nothing is imported."""
    points = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    found: dict[str, list[str]] = {}
    for point in points:
        if point.dist is not None:
            package = f"{point.dist.name} {point.dist.version}"
            found.setdefault(point.name, []).append(f"{point.value} ({package})")
    return {name: " and ".join(sorted(added)) for name, added in found.items()}


def _models() -> dict[str, str]:
    """What can be run without a download: the bundled model, and those in the cache of the hub."""
    from huggingface_hub import constants, scan_cache_dir  # noqa: PLC0415 (slow to import)
    from huggingface_hub.errors import CacheNotFound  # noqa: PLC0415

    from diffulex.checkpoint.resolve import demo_dir  # noqa: PLC0415
    from diffulex.families.detection import detect_family  # noqa: PLC0415

    has_demo = (demo_dir() / "model.safetensors").is_file()
    found = {"demo": "bundled" if has_demo else "not in this installation"}
    try:
        repos = [
            repo
            for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos
            if repo.repo_type == "model"
        ]
    except CacheNotFound:
        return found
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        files = {file.file_name: file for part in repo.revisions for file in part.files}
        if "config.json" not in files:
            continue
        try:
            config = json.loads(files["config.json"].file_path.read_text(encoding="utf-8"))
            family = detect_family(config, tuple)
        except (OSError, ValueError, CheckpointError) as error:
            found[repo.repo_id] = f"not readable: {error}"
            continue
        if family is not None:
            found[repo.repo_id] = f"{family}, {repo.size_on_disk / 1e9:.2f} GB"
    return found


def _self_tests() -> Mapping[str, Callable[[str], str]]:
    from diffulex.tools.self_test import SELF_TESTS  # noqa: PLC0415 (failing to import it is a finding)

    return SELF_TESTS


def _attempt(checks: list[Check], device: str, name: str, action: Callable[[], Any]) -> Any | None:
    """Runs `action`, records the outcome, returns its result or None."""
    try:
        result = action()
    except Exception as error:  # whatever fails, the remaining tests still say something
        lines = str(error).strip().splitlines() or [type(error).__name__]
        checks.append(Check(device, name, is_ok=False, detail=lines[0]))
        return None
    detail = result if isinstance(result, str) else ""
    checks.append(Check(device, name, is_ok=True, detail=detail))
    return result


def _build_facts() -> dict[str, Any]:
    import diffulex_ext  # noqa: PLC0415 (failing to import it is a finding)

    return dict(diffulex_ext.build_info())


def _device_facts() -> dict[str, Any]:
    import torch  # noqa: PLC0415 (failing to import it is a finding)

    from diffulex.profiling.platform import cpu_isa  # noqa: PLC0415

    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    names = {f"cuda:{index}": _describe(index) for index in indices}
    return {
        "torch": torch.__version__,
        "torch cuda": torch.version.cuda or "none",
        "cpu threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cpu kernels": cpu_isa(),
        "free memory": _host_memory(),
        "cuda driver": _driver(),
        "cuda devices": names,
    }


def _describe(index: int) -> str:
    """Name, compute capability and memory of a device."""
    import torch  # noqa: PLC0415

    major, minor = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return f"{name}, compute capability {major}.{minor}, {memory}"


def _driver() -> str:
    """Version of the driver, as nvidia-smi has it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    lines = run.stdout.split()
    return lines[0] if run.returncode == 0 and lines else "none"


def _host_memory(meminfo: Path = Path("/proc/meminfo")) -> str:
    """Memory of the host that programs can have."""
    if not meminfo.is_file():
        return "unknown"
    lines = meminfo.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(":") for line in lines)
    sizes = {name: int(text.split()[0]) / 2**20 for name, _, text in pairs if text.split()}
    if not {"MemAvailable", "MemTotal"} <= sizes.keys():
        return "unknown"
    return f"{sizes['MemAvailable']:.1f} of {sizes['MemTotal']:.1f} GiB"


def _check_kernels(device: str, archs: tuple[str, ...]) -> str:
    """Whether the build has kernels for the device; which ones it takes."""
    import torch  # noqa: PLC0415

    from diffulex.ops.device import has_hopper_kernels  # noqa: PLC0415
    from diffulex.profiling.platform import runs_on  # noqa: PLC0415

    capability = torch.cuda.get_device_capability(device)
    if not runs_on(archs, capability):
        raise RuntimeError(
            f"expected a build for compute capability {capability[0]}.{capability[1]}, got one for"
            f" {', '.join(archs) or 'no device'}"
        )
    kernels = "Hopper" if has_hopper_kernels(torch.device(device)) else "portable"
    return f"{kernels}, built for {', '.join(archs)}"


def _check_memory(device: str) -> str:
    """Whether a small model fits beside what fills the device."""
    import torch  # noqa: PLC0415

    free, total = torch.cuda.mem_get_info(device)
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB"
    if free < _NEEDED_BYTES:
        raise RuntimeError(f"expected at least 1 GiB, got {text}")
    return text


def _version(package: str) -> str:
    """Version of an installed package, which is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _ABSENT


def _image_engine() -> str:
    """Whether image pipelines can run; a package that is missing is no fault."""
    from diffulex.omni._diffusers_compat import check_installation  # noqa: PLC0415 (slow with diffusers)

    return check_installation()


def _edge_backends() -> dict[str, str]:
    """What each backend of `diffulex edge` can do here."""
    from diffulex_edge.backends import BACKENDS  # noqa: PLC0415 (failing to import it is a finding)

    return {name: str(backend.availability()) for name, backend in sorted(BACKENDS.items())}


def _check_edge() -> str:
    """Whether the runtime of exported programs runs one; the backends that it has."""
    from diffulex_edge.runtime_check import check_runtime  # noqa: PLC0415 (failing is a finding)

    return check_runtime()
