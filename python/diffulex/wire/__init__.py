# SPDX-License-Identifier: Apache-2.0
"""What the HTTP process and the engine process say to each other."""
