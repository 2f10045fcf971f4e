# SPDX-License-Identifier: Apache-2.0
"""The bundled tasks: files in the format of lm-eval, which its own command reads too."""
