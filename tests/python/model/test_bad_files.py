# SPDX-License-Identifier: Apache-2.0
"""Malformed checkpoint files: one error that names the file and the key."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time

import pytest
import torch

from diffulex.checkpoint import memory, template_bound
from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.checkpoint.tensor_files import read_header
from diffulex.checkpoint.tokenizer import Tokenizer
from diffulex.errors import CheckpointError, PromptError
from fixtures.checkpoints import CheckpointBuilder, tiny_config


def load(directory):
    name, spec, _ = detect(directory)
    return load_model(name, spec, directory, torch.float32, "cpu")


def edit(path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"rope_parameters": {"rope_theta": [1]}}, "rope_parameters.rope_theta"),
        ("config.json", {"rope_theta": "big"}, "rope_theta: expected a positive number"),
        ("config.json", {"rms_norm_eps": 10**400}, "rms_norm_eps: expected a positive number"),
        ("config.json", {"hidden_size": 10**12}, "hidden_size: expected an integer of at most"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder: expected"),
        ("tokenizer.json", {"added_tokens": 7}, "added_tokens: expected a list, got 7"),
    ],
)
def test_values_of_the_wrong_kind(tmp_path, name, changes, message):
    CheckpointBuilder().write(tmp_path)
    edit(tmp_path / name, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        detect(tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_deep_nesting(tmp_path, name):
    CheckpointBuilder().write(tmp_path)
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply") as caught:
        detect(tmp_path)
    assert name in str(caught.value)


def test_weights_that_are_a_directory(tmp_path):
    CheckpointBuilder().write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a file, got a dir"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 60_000}, "num_hidden_layers: expected at most 25"),
        ({"hidden_size": 2_000_000_000}, r"expected shape \[300, 2000000000\], got \[300, 64\]"),
        ({"intermediate_size": 2_000_000_000}, "gate_proj.weight: expected shape"),
        ({"max_position_embeddings": 2_000_000_000}, r"needs \d+\.\d GiB, \d+\.\d GiB available"),
    ],
)
def test_sizes_beyond_the_files_are_answered_at_once(tmp_path, changes, message):
    CheckpointBuilder().write(tmp_path)
    edit(tmp_path / "config.json", **changes)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
    assert time.perf_counter() - start < 10


def test_failed_allocation(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 3 << 29)
    with (
        pytest.raises(CheckpointError, match=r"needs 2\.0 GiB, 1\.5 GiB available"),
        memory.reporting_memory(2 << 30, "cpu"),
    ):
        torch.empty(1 << 50)
    with (
        pytest.raises(RuntimeError, match="other"),
        memory.reporting_memory(2 << 30, "cpu"),
    ):
        raise RuntimeError("other")


def test_weights_that_are_no_file(tmp_path):
    CheckpointBuilder().write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected a file, got a pipe, socket or device"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "git lfs pull",
        ),
        (lambda data: b"<!doctype html><html></html>", "it is a page of a web site"),
        (lambda data: data[:-100], r"it has \d+ bytes and should have at least \d+: .* cut short"),
        (lambda data: data[:200], r"it has 200 bytes and should have at least \d+"),
        (lambda data: b"", "it has 0 bytes and should have at least 8"),
        (
            lambda data: (2).to_bytes(8, "little") + b"{}",
            "expected tensors, got a file without any",
        ),
    ],
)
def test_likely_reason_of_unreadable_weights(tmp_path, content, message):
    CheckpointBuilder().write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        load(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_weights_that_may_not_be_read(tmp_path):
    CheckpointBuilder().write(tmp_path)
    (tmp_path / "model.safetensors").chmod(0)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: Permission denied"):
        load(tmp_path)


def test_refused_weights_name_the_reason_of_the_system(tmp_path, monkeypatch):
    CheckpointBuilder().write(tmp_path)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(type(tmp_path), "open", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: Permission denied"):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-q4.gguf", "consolidated.pth"])
def test_weights_in_other_formats(tmp_path, name):
    CheckpointBuilder().write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"got {name}: convert the weights to safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(tmp_path, value):
    def spoil(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    CheckpointBuilder(edit=spoil).write(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: expected finite"):
        load(tmp_path)


def test_finite_weights_whose_sum_is_not(tmp_path):
    def enlarge(tensors):
        tensors["model.norm.weight"].fill_(3e38)

    CheckpointBuilder(edit=enlarge).write(tmp_path)
    load(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "", "a\0b"])
def test_shards_without_a_possible_name(tmp_path, name):
    CheckpointBuilder(num_shards=2).write(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected a file name of 1 to 255 bytes") as caught:
        load(tmp_path)
    assert len(str(caught.value)) < 400


HOSTILE_TEMPLATES = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "it takes more than",
    ),
    "recursion": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "it takes more than",
    ),
    "long output": (
        "{% for a in range(99999) %}{{ 'abcdefgh' * 10000 }}{% endfor %}",
        "it writes more than",
    ),
    "long constant": ("{{ 'a' * 1000000000 }}", "it has a value or length above"),
    "power": ("{{ 10 ** 10 ** 10 ** 10 }}", "it has a value or length above"),
}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name == "recursion" else [])
        for name, case in HOSTILE_TEMPLATES.items()
    ],
)
def test_template_without_an_end(tmp_path, template, message):
    CheckpointBuilder().write(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    tokenizer.use_chat_template(template)
    tracer = sys.gettrace()
    with pytest.raises(PromptError, match=f"chat template: it cannot be rendered: {message}"):
        tokenizer.render_chat([{"role": "user", "content": "a"}])
    with pytest.raises(CheckpointError, match=message):
        tokenizer.check_chat_template()
    assert sys.gettrace() is tracer


RUN_TIME_VALUES = {
    "power": "{% for m in messages %}{% set n = m.content|length*2000000 %}{% set k = n ** n %}{% endfor %}",
    "squares": (
        "{% set ns = namespace(n=messages[0].content|length + 9) %}"
        "{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
    ),
    "doubled": (
        "{% set ns = namespace(x=messages[0].content) %}"
        "{% for i in range(27) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "joined": (
        "{% set ns = namespace(x=messages[0].content) %}"
        "{% for i in range(27) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "repeated": "{% for m in messages %}{{ m.content * 100000 * 100000 }}{% endfor %}",
    "repeated list": "{{ [messages] * (100000 * 100000) }}",
    "width": "{% for m in messages %}{{ '%50000000000s' % m.content }}{% endfor %}",
    "width among the values": "{% for m in messages %}{{ '%*s' % (100000 * 100000, m.content) }}{% endfor %}",
    "method": "{% for m in messages %}{{ m.content.center(100000 * 100000) }}{% endfor %}",
}


@pytest.mark.parametrize("template", RUN_TIME_VALUES.values(), ids=RUN_TIME_VALUES.keys())
def test_value_that_a_template_computes_from_messages(tmp_path, template):
    CheckpointBuilder().write(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    tokenizer.use_chat_template(template)
    with pytest.raises(PromptError, match="it cannot be rendered: it has a value or length above"):
        tokenizer.render_chat([{"role": "user", "content": "a"}])


def test_many_long_values_of_a_template(tmp_path, monkeypatch):
    monkeypatch.setattr(template_bound, "_MOST_MADE", 1 << 24)
    CheckpointBuilder().write(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    template = "{% for i in range(99999) %}{% set x = messages[0].content * 1000000 %}{% endfor %}"
    tokenizer.use_chat_template(template)
    with pytest.raises(PromptError, match="it cannot be rendered: it makes more than"):
        tokenizer.render_chat([{"role": "user", "content": "a"}])


def test_operators_of_templates_compute_as_ever(tmp_path):
    CheckpointBuilder().write(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    tokenizer.use_chat_template(
        "{{ 2 ** 10 }} {{ 1 ** 999999 }} {{ 2 ** -1 }} {{ 7 % 4 }} {{ '%s=%03d' % ('n', 5) }}"
        " {{ 'ab' * 2 + 'c' }} {{ [1] + [2] * 2 }} {{ messages[0].content ~ 1 }} {{ 3 * 0.5 }}"
        " {{ '%(a)s' % {'a': 'b'} }} {{ 'x'.center(3) }}"
    )
    text = tokenizer.render_chat([{"role": "user", "content": "a"}])
    assert text == "1024 1 0.5 3 n=005 ababc [1, 2, 2] a1 1.5 b  x "


def test_long_conversations_are_within_the_bound(tmp_path):
    CheckpointBuilder().write(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    messages = [{"role": "user", "content": "word " * 20}] * 5000
    assert tokenizer.render_chat(messages).count("<|im_start|>user") == 5000


def test_template_that_raises(tmp_path, capfd):
    CheckpointBuilder(tiny_config()).write(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    tokenizer.backend.chat_template = "{{ messages + 1 }}"
    with pytest.raises(PromptError, match="chat template: it rejected the messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    tokenizer.encode("x" * 5000)
    assert capfd.readouterr().err == ""
