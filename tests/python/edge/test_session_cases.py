# SPDX-License-Identifier: Apache-2.0
"""What the C++ session is held to is what the engine answers today, and its settings are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from diffulex.config.config import Config, read_model_facts
from diffulex.errors import ConfigError
from diffulex_edge.session_conf import session_conf
from edge.session_cases import CASES, CASES_FILE, Case, run_case

ROOT = Path(__file__).parents[3]
RECORDED = {item["name"]: item for item in json.loads(CASES_FILE.read_text())}


def read_conf(text: str) -> dict[str, str]:
    lines = [line.partition(" = ") for line in text.splitlines() if not line.startswith("#")]
    return {key: value for key, _, value in lines}


def resolved(**settings: object) -> Config:
    return Config.resolve("demo", read_model_facts("demo", {}), {"device": "cpu", **settings})


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_engine_answers_as_recorded(case: Case) -> None:
    assert run_case(case) == RECORDED[case.name]


def test_all_cases_are_recorded() -> None:
    assert list(RECORDED) == [case.name for case in CASES]


def test_keys_are_those_of_the_reader() -> None:
    source = (ROOT / "csrc/edge/options.cpp").read_text()
    assert set(read_conf(session_conf(resolved()))) == set(re.findall(r'visit\("(\w+)"', source))


def test_texts_stand_in_one_line() -> None:
    values = read_conf(session_conf(resolved(), read_model_facts("demo", {}).tokenizer))
    assert values["has_template"] == "1"
    assert values["template_before"] == r'"<|im_start|>user\n"'
    assert values["template_after"].endswith(r'<|im_start|>assistant\n"')


def test_a_template_that_changes_the_message_has_no_pieces() -> None:
    facts = read_model_facts("demo", {})
    facts.tokenizer.backend.chat_template = "{{ messages[0]['content'] | length }}"
    values = read_conf(session_conf(resolved(), facts.tokenizer))
    assert (values["has_template"], values["template_before"]) == ("1", '""')


def test_settings_that_the_session_lacks_are_refused() -> None:
    edit = str(ROOT / "examples/zoo/edit_llada2")
    facts = read_model_facts(edit, {})
    config = Config.resolve(edit, facts, {"device": "cpu", "penalty_lambda": 0.5})
    with pytest.raises(ConfigError, match="penalty_lambda: expected 0 for a session in C"):
        session_conf(config)
