# SPDX-License-Identifier: Apache-2.0
"""`python -m diffulex.server`."""

from __future__ import annotations

import sys

from diffulex.errors import ConfigError
from diffulex.server.requirements import check_packages


def _main() -> int:
    try:
        check_packages()
    except ConfigError as error:
        print(f"diffulex serve: error: {error}", file=sys.stderr)
        return 1
    from diffulex.server.launch import main  # noqa: PLC0415 (needs the packages)

    return main()


# The backend process imports this module too.
if __name__ == "__main__":
    sys.exit(_main())
