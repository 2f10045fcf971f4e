# SPDX-License-Identifier: Apache-2.0
"""What lies between the step loop of an engine and the workers of its ranks."""
