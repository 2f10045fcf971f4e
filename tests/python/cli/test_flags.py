# SPDX-License-Identifier: Apache-2.0
"""Flags made from the configuration table."""

from __future__ import annotations

import pytest

from diffulex.config.flags import Parser, UsageError, add_engine_flags, engine_kwargs
from diffulex.config.table import CONFIG_TABLE, Support


def parse(*arguments: str) -> dict:
    parser = Parser(allow_abbrev=False)
    add_engine_flags(parser)
    return engine_kwargs(parser.parse_checked(list(arguments)))


def test_nothing_given_means_nothing_passed():
    assert parse() == {}


def test_values_of_every_kind():
    assert parse(
        *(
            "--model",
            "x",
            "--block-size",
            "8",
            "--temperature",
            "0.5",
            "--suppress-token-ids",
            "1,2",
        ),
        *("--enforce-eager", "--enable-prefix-caching=false", "--no-auto-max-nfe"),
    ) == {
        "model": "x",
        "block_size": 8,
        "temperature": 0.5,
        "suppress_token_ids": (1, 2),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "auto_max_nfe": False,
    }


def test_switches_take_nothing_from_behind_them():
    """The text behind a switch is the prompt of `generate`."""
    parser = Parser(allow_abbrev=False)
    parser.add_argument("prompt")
    add_engine_flags(parser)
    for flag, value in (("--enforce-eager", True), ("--no-enforce-eager", False)):
        options = parser.parse_checked([flag, "Ben has 8 coins"])
        assert (options.prompt, options.enforce_eager) == ("Ben has 8 coins", value)
    assert parse("--enforce-eager=on", "--no-skip-warmup") == {
        "enforce_eager": True,
        "skip_warmup": False,
    }
    assert parser.parse_checked(["--", "--enforce-eager=x"]).prompt == "--enforce-eager=x"


def test_thresholds_are_passed_as_a_mapping():
    assert parse("--accept-threshold", "0.8", "--add-block-threshold", "0.2") == {
        "decoding_thresholds": {"accept_threshold": 0.8, "add_block_threshold": 0.2}
    }


def test_every_key_but_mappings_has_a_flag():
    parser = Parser()
    add_engine_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for key in CONFIG_TABLE.values():
        is_mapping = key.kind.startswith("mapping")
        assert (f"--{key.name.replace('_', '-')}" in flags) is not is_mapping, key.name


def test_help_lists_the_supported_keys_only():
    parser = Parser()
    add_engine_flags(parser)
    text = parser.format_help()
    for key in CONFIG_TABLE.values():
        flag = f"--{key.name.replace('_', '-')}" + ("," if key.kind == "bool" else " ")
        is_typed = not key.kind.startswith("mapping")  # these are for Python callers only
        assert (flag in text) is (key.support is Support.FULL and is_typed), key.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "x"], "--block-size: expected an integer, got 'x'"),
        (["--temperature", "hot"], "expected a number, got 'hot'"),
        (["--enforce-eager=maybe"], "--enforce-eager: expected true or false, got 'maybe'"),
        (
            ["--enforce-eager", "false"],
            r"--enforce-eager: expected no value after it \(--enforce-eager or --no-enforce-eager\)",
        ),
        (["--eos", "1,b"], "expected an integer, got 'b'"),
        (["--block-size"], "--block-size"),
        (["--blok-size", "8"], "nearest is --block-size, got '--blok-size'"),
        (["--model-nam", "8"], "nearest is --model-name, got '--model-nam'"),
        (["stray"], "got 'stray'"),
    ],
)
def test_bad_flags(arguments, message):
    with pytest.raises(UsageError, match=message):
        parse(*arguments)
