#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Walks the path of README.md from a wheel to the first answer, in a bare environment, and times it.

    python scripts/first_answer.py FILE.whl [--limit SECONDS]

Runs the commands of README.md as they are printed (its only `shell` block), in a new environment and a
folder that has the wheel and nothing else. torch is not downloaded: the one of the interpreter that runs
this script is linked into the environment, and what torch needs is installed, before the clock starts.
Everything else comes from the index that pip is configured for. Ends with 1 where the answer is wrong or
came later than the limit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ANSWER = "#### 31"


def commands() -> str:
    """What README.md tells to type."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```shell\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return str(block)


def link_torch(environment: Path) -> None:
    """Gives an environment this interpreter's torch, without a copy and without what torch needs."""
    torch = importlib.metadata.distribution("torch")
    (site,) = environment.glob("lib/python*/site-packages")
    for name in {file.parts[0] for file in torch.files or ()} - {"..", "__pycache__"}:
        (site / name).symlink_to(Path(str(torch.locate_file(name))).resolve())


def processor_seconds() -> float:
    """Of the programs that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def walk(wheel: Path, folder: Path) -> tuple[float, float, str]:
    """Seconds from the first command to the end of the last, of them the processor's, and what they printed."""
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    link_torch(environment)
    work = folder / "work"
    work.mkdir()
    (work / wheel.name).symlink_to(wheel.resolve())
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DIFFULEX_", "PYTHON", "VIRTUAL_ENV"))
    }
    installer = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "torch"]
    subprocess.run(installer, env=variables, check=True)
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    start, used = time.monotonic(), processor_seconds()
    result = subprocess.run(
        ["bash", "-ec", commands()],
        cwd=work,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, used = time.monotonic() - start, processor_seconds() - used
    if result.returncode != 0:
        sys.exit(f"first_answer: expected commands that work, got\n{result.stdout}{result.stderr}")
    return seconds, used, result.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="of this interpreter's version and platform")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds [60]")
    options = parser.parse_args()
    if not options.wheel.is_file():
        parser.error(f"expected a file, got {options.wheel}")
    with tempfile.TemporaryDirectory() as folder:
        seconds, used, printed = walk(options.wheel, Path(folder))
    print(printed.strip())
    print(
        f"wheel to first answer: {seconds:.1f} s, {used:.1f} s of a processor, without torch's download"
    )
    if ANSWER not in printed:
        print(f"first_answer: expected {ANSWER}, got another answer", file=sys.stderr)
        return 1
    if seconds > options.limit:
        print(f"first_answer: expected at most {options.limit:g} s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
