# SPDX-License-Identifier: Apache-2.0
"""Import paths that were documented before the packages were sorted keep working."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

#: Module as documented, module of today, and the names that plug-ins import.
PATHS = [
    ("diffulex.engine.model_runner", "diffulex.runner.model_runner", "ModelRunner"),
    ("diffulex.layers.attention", "diffulex.nn.attention", "BlockAttention"),
    ("diffulex.layers.feed_forward", "diffulex.nn.feed_forward", "FeedForward"),
    ("diffulex.model.auto_model", "diffulex.checkpoint.auto_model", "detect load_model"),
    ("diffulex.model.config", "diffulex.families.spec", "ModelSpec"),
    (
        "diffulex.model.config.decoder",
        "diffulex.families.spec.decoder",
        "FamilyTokens read_decoder_spec",
    ),
    ("diffulex.model.config.moe", "diffulex.families.spec.moe", "MoeSpec"),
    ("diffulex.model.config.names", "diffulex.families.spec.names", "TensorNames"),
    ("diffulex.model.config.reader", "diffulex.families.spec.reader", "ConfigReader"),
    ("diffulex.model.decoder", "diffulex.nn.decoder", "DecoderForDiffusionLM build_feed_forward"),
    ("diffulex.sampler.base", "diffulex.samplers.base", "MaskFillSampler SamplerInputs"),
    (
        "diffulex.server.api_server",
        "diffulex.server.http.api_server",
        "GenerateRequest ChatMessage ChatCompletionRequest ProfileRequest"
        " sampling_params_from_request sse maybe_await create_app chat_delta_chunk"
        " chat_finish_chunk denoise_chat_event",
    ),
    (
        "diffulex.server.backend_worker",
        "diffulex.serving.backend_worker",
        "default_engine_factory SyncBackendWorker run_sync_backend_worker",
    ),
    (
        "diffulex.server.engine_loop",
        "diffulex.serving.engine_loop",
        "QueuedCommand GenerateResult default_engine_factory EngineLoop",
    ),
    (
        "diffulex.server.frontend",
        "diffulex.serving.frontend",
        "ClientDisconnected FrontendReqState FrontendManager",
    ),
    (
        "diffulex.server.protocol",
        "diffulex.wire.protocol",
        "StreamMode PromptInput ChatInput ServingInput ServingGenerate ServingAbort ServingShutdown"
        " ServingProfileStart ServingProfileStop ServingCommand ServingReply ServingDelta"
        " ServingBufferSnapshot ServingError ServingEvent"
        " sampling_params_to_dict sampling_params_from_dict"
        " serving_input_to_dict serving_input_from_dict"
        " serving_command_to_dict serving_command_from_dict"
        " serving_event_to_dict serving_event_from_dict",
    ),
    (
        "diffulex.server.zmq_queue",
        "diffulex.serving.zmq_queue",
        "ZmqPushQueue ZmqPullQueue ZmqAsyncPushQueue ZmqAsyncPullQueue",
    ),
    ("diffulex.ops.sampling", "diffulex.ops.acceptance", "AcceptResult accept_mask_fill"),
    # These have not moved.
    (
        "diffulex.server.args",
        "diffulex.server.args",
        "parse_device_ids ServerArgs build_arg_parser parse_args",
    ),
    (
        "diffulex.server.launch",
        "diffulex.server.launch",
        "default_ipc_addr resolve_zmq_addrs start_backend main",
    ),
    (
        "diffulex.serving.tick",
        "diffulex.serving.tick",
        "SUPPORTED_STREAM_MODES ServingRequestState ServingState DiffulexAsyncEngineMixin",
    ),
]

#: Public members of classes that programs build and call.
MEMBERS = {
    "diffulex.serving.engine_loop.EngineLoop": (
        "model_id is_running start stop generate generate_stream stream_command operate"
        " render_chat_prompt call_engine has_waiters stats step_seq step_running_s"
    ),
    "diffulex.serving.backend_worker.SyncBackendWorker": (
        "from_zmq init_engine run_forever normal_loop receive_commands process_input_commands"
        " send_result run_when_idle shutdown"
    ),
    "diffulex.serving.tick.DiffulexAsyncEngineMixin": (
        "init_serving_state run_serving_tick render_chat_prompt_for_serving abort_request"
    ),
    "diffulex.server.args.ServerArgs": "engine_kwargs",
}
#: `from diffulex.a import b, c` in a document.
_IMPORT = re.compile(r"^\s*from (diffulex[\w.]*) import ([\w, ]+)", re.MULTILINE)


@pytest.mark.parametrize(("documented", "today", "names"), PATHS, ids=[row[0] for row in PATHS])
def test_path_names_the_same_objects(documented: str, today: str, names: str) -> None:
    for name in names.split():
        assert getattr(importlib.import_module(documented), name) is getattr(
            importlib.import_module(today), name
        )


@pytest.mark.parametrize("path", MEMBERS)
def test_class_has_its_members(path: str) -> None:
    module, _, name = path.rpartition(".")
    members = dir(getattr(importlib.import_module(module), name))
    assert set(MEMBERS[path].split()) <= set(members)


def _imports() -> list[tuple[str, str]]:
    documents = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {
        (module, name.split()[0])
        for document in documents
        for module, names in _IMPORT.findall(document.read_text())
        for name in names.split(",")
        if not module.startswith("diffulex_edge")  # needs packages of its own
    }
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), _imports())
def test_imports_in_documents_work(module: str, name: str) -> None:
    found = importlib.import_module(module)
    if not hasattr(found, name):
        importlib.import_module(f"{module}.{name}")
