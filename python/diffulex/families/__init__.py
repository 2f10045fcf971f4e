# SPDX-License-Identifier: Apache-2.0
"""Model families: one record and one file each, and how a checkpoint's family is detected."""
