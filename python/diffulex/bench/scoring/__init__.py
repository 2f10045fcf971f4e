# SPDX-License-Identifier: Apache-2.0
"""What makes an answer right: boxed results, numbers, and programs that pass their tests."""
