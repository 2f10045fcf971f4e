# SPDX-License-Identifier: Apache-2.0
"""Looking into the steps of an engine: recordings, scopes, stage times, step records, memory."""

from diffulex.profiling.config import ProfilerConfig as ProfilerConfig
from diffulex.profiling.perfetto import write_perfetto as write_perfetto
from diffulex.profiling.ring import STEP_DTYPE as STEP_DTYPE
from diffulex.profiling.scopes import profile_scope as profile_scope
from diffulex.profiling.scopes import profile_scopes_enabled as profile_scopes_enabled
from diffulex.profiling.scopes import record_function as record_function
from diffulex.profiling.session import TorchProfileSession as TorchProfileSession
