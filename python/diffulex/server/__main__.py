# SPDX-License-Identifier: Apache-2.0
"""`python -m diffulex.server`, and what `diffulex serve` runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from diffulex.errors import ConfigError
from diffulex.server.requirements import check_packages

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Looks for the packages of the extra, then serves; returns the exit code.

    The help needs none of them.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help", "--help-all"} & set(arguments):
        from diffulex.server.args import build_arg_parser  # noqa: PLC0415

        parser = build_arg_parser()
        text = parser.format_help_all() if "--help-all" in arguments else parser.format_help()
        print(text, end="", flush=True)
        return 0
    try:
        check_packages()
    except ConfigError as error:
        print(f"diffulex serve: error: {error}", file=sys.stderr)
        return 2
    from diffulex.server.launch import main as launch  # noqa: PLC0415 (needs the packages)

    return launch(argv)


# The backend process imports this module too.
if __name__ == "__main__":
    sys.exit(main())
