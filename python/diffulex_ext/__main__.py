# SPDX-License-Identifier: Apache-2.0
"""`python -m diffulex_ext`: facts about the compiled package, for build scripts."""

from __future__ import annotations

import argparse

import diffulex_ext


def main() -> None:
    """Prints what the options ask for, one value per line."""
    parser = argparse.ArgumentParser(prog="python -m diffulex_ext", description=main.__doc__)
    parser.add_argument(
        "--cmake-prefix-path",
        action="store_true",
        help="directory for CMAKE_PREFIX_PATH, so that find_package(diffulex) succeeds",
    )
    parser.add_argument(
        "--build-info", action="store_true", help="how the compiled parts were built"
    )
    arguments = parser.parse_args()
    if not (arguments.cmake_prefix_path or arguments.build_info):
        parser.error("expected --cmake-prefix-path or --build-info, got nothing")
    if arguments.cmake_prefix_path:
        print(diffulex_ext.cmake_prefix_path)
    if arguments.build_info:
        for key, value in diffulex_ext.build_info().items():
            print(f"{key}: {value}")


if __name__ == "__main__":
    main()
