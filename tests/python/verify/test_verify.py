# SPDX-License-Identifier: Apache-2.0
"""`diffulex verify`: sound checkpoints pass, and each planted defect is found by its rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffulex import CheckpointError, ConfigError
from diffulex.tools.cli import main
from diffulex.verify.names import RULES
from diffulex.verify.reference import build_model
from diffulex.verify.report import Report, RuleError
from diffulex.verify.run import verify
from fixtures.adapters import QWEN_TARGETS, AdapterBuilder
from fixtures.families import family_config, family_tensors
from fixtures.moe_families import llada2_tensors, moe_config
from fixtures.quick import quick
from planted import DEFECTS, FAMILIES, model_name, table, write

ROOT = Path(__file__).resolve().parents[3]
QUICK = "sdar"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def place(root: Path, family: str) -> Path:
    directory = root / family
    directory.mkdir()
    write(family, directory)
    return directory


@pytest.mark.parametrize("family", quick(FAMILIES, [QUICK]))
def test_a_sound_checkpoint_passes(family: str, tmp_path: Path) -> None:
    directory, lines = place(tmp_path, family), []
    report = verify(str(directory), device="cpu", show=lines.append, **model_name(directory))
    assert report.failed() == []
    rules = [finding.rule for finding in report.findings]
    assert [rule for rule in rules if rule != "decoding"] == list(RULES[:-1])
    assert [line.partition(":")[0] for line in lines] == [f"pass  {rule}" for rule in rules]
    details = {finding.rule: finding.detail for finding in report.findings}
    assert "largest difference" in details["logits"]
    assert family in details["checkpoint"]


@pytest.mark.parametrize(
    ("name", "family"),
    quick(
        [(name, family) for name, defect in DEFECTS.items() for family in defect.families],
        [(name, QUICK) for name, defect in list(DEFECTS.items())[::3] if QUICK in defect.families],
    ),
)
def test_a_planted_defect_is_found(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect, directory = DEFECTS[name], place(tmp_path, family)
    defect.plant(directory, monkeypatch)
    report = verify(str(directory), rules=(defect.rule,), device="cpu", **model_name(directory))
    assert defect.rule in report.failed(), report.to_json()
    assert {"expected", "missing"} & set(report.findings[-1].detail.replace(":", "").split())


def test_the_table_of_the_document_is_that_of_the_defects() -> None:
    text = (ROOT / "docs/verify.md").read_text(encoding="utf-8")
    assert table() in text, "run: PYTHONPATH=tests/python python tests/python/verify/planted.py"
    for rule in RULES:
        assert f"| `{rule}` |" in text, rule


def test_each_rule_finds_something() -> None:
    assert {defect.rule for defect in DEFECTS.values()} == set(RULES)


def test_recorded_answers_are_compared(tmp_path: Path) -> None:
    directory, file = place(tmp_path, QUICK), tmp_path / "answers.safetensors"
    rules = ("recorded answers",)
    verify(str(directory), rules=rules, record_to=file, device="cpu")
    report = verify(str(directory), rules=rules, fixture=file, device="cpu")
    assert [finding.rule for finding in report.findings] == ["checkpoint", "decoding", *rules]
    assert report.is_passed
    file.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"fixture: .*expected a file of `diffulex verify"):
        verify(str(directory), rules=rules, fixture=file, device="cpu")


def test_a_family_without_reference_needs_recorded_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = place(tmp_path, QUICK)
    monkeypatch.setattr("diffulex.verify.run.has_reference", lambda family: False)
    report = verify(str(directory), rules=("logits", "greedy tokens"), device="cpu")
    assert report.failed() == ["logits"]
    assert "or recorded answers (--fixture), got sdar" in report.findings[-1].detail
    verify(
        str(directory), rules=(), record_to=directory / "diffulex_verify.safetensors", device="cpu"
    )
    report = verify(str(directory), rules=("logits", "recorded answers"), device="cpu")
    assert report.is_passed
    assert report.findings[-1].rule == "recorded answers"


def test_an_adapter_needs_recorded_answers(tmp_path: Path) -> None:
    directory = place(tmp_path, QUICK)
    base = load_file(directory / "model.safetensors")
    AdapterBuilder(QWEN_TARGETS).write(tmp_path / "adapter", base)
    report = verify(
        str(directory),
        rules=("logits", "greedy tokens"),
        device="cpu",
        use_lora=True,
        lora_path=str(tmp_path / "adapter"),
    )
    assert report.failed() == ["logits"]
    assert "or recorded answers (--fixture), got use_lora" in report.findings[-1].detail


def test_weights_in_low_precision_are_refused(tmp_path: Path) -> None:
    directory = place(tmp_path, QUICK)
    report = verify(str(directory), rules=("logits",), device="cpu", quantization="int8")
    assert not report.is_passed
    assert "quantization: expected auto or none" in report.findings[-1].detail


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rules: expected some of .*, got \['spelling'\]"):
        verify("demo", rules=("spelling",))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = place(tmp_path, QUICK)
    command = ["verify", str(directory), "--device", "cpu", "--only", "mask"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["pass  mask: 259 (<|MASK|>)", "every rule holds"]
    (directory / "model.safetensors").unlink()
    assert main(command) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("FAIL  checkpoint: CheckpointError: ")
    assert out[1] == "failed: checkpoint"
    assert main([*command, "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["is_passed"] is False
    assert content["findings"][0]["rule"] == "checkpoint"
    assert main(["verify", "--only", "spelling"]) == 2


def test_a_broken_test_is_a_failure() -> None:
    def broken() -> str:
        raise ZeroDivisionError("by\nzero")

    def refused() -> str:
        raise RuleError("expected one, got two")

    report = Report("m")
    assert not report.check("a", broken)
    assert not report.check("b", refused)
    assert [finding.to_text() for finding in report.findings] == [
        "FAIL  a: ZeroDivisionError: by zero",
        "FAIL  b: expected one, got two",
    ]


def test_llada_may_be_stored_as_a_llama() -> None:
    config = family_config("stable_diffcoder")
    model = build_model("llada", config, family_tensors("stable_diffcoder", config))
    assert model.config.hidden_size == config["hidden_size"]


@pytest.mark.parametrize("family", ["dream", "stable_diffcoder", "llada2"])
def test_a_configuration_may_have_no_number_of_heads_of_keys(family: str) -> None:
    if family == "llada2":
        config = moe_config(family, num_key_value_heads=0)
        tensors = llada2_tensors(config)
    else:
        config = {k: v for k, v in family_config(family).items() if k != "num_key_value_heads"}
        tensors = family_tensors(family, config)
    model = build_model(family, config, tensors)
    assert model.config.num_key_value_heads == config["num_attention_heads"]
