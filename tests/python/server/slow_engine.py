# SPDX-License-Identifier: Apache-2.0
"""Engines for backend processes of tests, importable by name in a child process.

Answers are letters; a step takes a moment. A prompt that begins with a word of `_DEEDS` makes the
engine do that.
"""

from __future__ import annotations

import os
import signal
import time

from block_engine import BlockEngine

STEP_S = 0.01


def _log(text: str) -> None:
    path = os.environ.get("DIFFULEX_TEST_LOG")
    if path:
        with open(path, "a") as file:
            file.write(text + "\n")


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    raise RuntimeError("device lost")


def _hang() -> None:
    time.sleep(3600)


_DEEDS = {"crash": _crash, "fail": _fail, "hang": _hang}


class SlowEngine(BlockEngine):
    """Logs what it is told, so that tests can read it from another process."""

    def __init__(self) -> None:
        super().__init__(0)
        self.deed = None
        _log(f"start {os.getpid()}")

    def add_request(self, prompt, sampling_params, **options):
        text = bytes(token for token in prompt if token < 256).decode(errors="replace")
        self.deed = next((deed for word, deed in _DEEDS.items() if text.startswith(word)), None)
        req_id = super().add_request([65, 66], sampling_params, **options)
        self.live[req_id].target = [65 + i % 26 for i in range(len(self.live[req_id].target))]
        _log(f"add {req_id}")
        return req_id

    def step(self):
        time.sleep(STEP_S)
        if self.deed is not None:
            self.deed()
        return super().step()

    def abort_request(self, req_id):
        _log(f"abort {req_id}")
        return super().abort_request(req_id)

    def exit(self):
        _log("exit")
        super().exit()

    def serving_info(self):
        return {"max_num_reqs": 8, "decoding_strategy": "fake", "max_model_len": 100_000}

    def serving_stats(self):
        return {"gauges": {"requests_running": len(self.live)}}


class PagedEngine(SlowEngine):
    """Has a prefix cache, and logs where prompts arrive."""

    def add_request(self, prompt, sampling_params, **options):
        _log(f"prompt {os.getpid()} {prompt[0]}")
        return super().add_request(prompt, sampling_params, **options)

    def serving_info(self):
        return {**super().serving_info(), "num_pages": 1000, "page_size": 32}


def make_paged(model, **kwargs):
    """An engine whose cache counts."""
    return PagedEngine()


def make_slow(model, **kwargs):
    """The usual engine of a test."""
    return SlowEngine()


def make_second_broken(model, **kwargs):
    """The usual engine, but for the second one that is started."""
    engine = SlowEngine()
    with open(os.environ["DIFFULEX_TEST_LOG"]) as log:
        if log.read().count("start") == 2:
            raise ValueError("device: expected free memory, got none")
    return engine


def make_broken(model, **kwargs):
    """An engine whose checkpoint is bad."""
    raise ValueError("checkpoint: expected weights,\n got none")


def make_killed(model, **kwargs):
    """An engine that takes all memory."""
    _crash()


def make_never(model, **kwargs):
    """An engine that does not get ready."""
    _log(f"start {os.getpid()}")
    time.sleep(3600)
