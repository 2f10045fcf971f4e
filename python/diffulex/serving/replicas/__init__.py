# SPDX-License-Identifier: Apache-2.0
"""Several backends behind one frontend."""
