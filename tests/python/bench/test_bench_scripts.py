# SPDX-License-Identifier: Apache-2.0
"""The benchmark programs run on tiny shapes and print what they promise."""

from __future__ import annotations

import json
import platform
import re
import sys
from importlib import import_module

import pytest
import torch

from diffulex.quantization.weights import QuantizedWeight
from fixtures.bench_scripts import SCRIPTS, run

# Some start several processes that import torch, and the host may do other work.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
@pytest.mark.parametrize(
    "which", [["--model", "demo", "--block-size", 8], ["--shape", "tiny", "--block-size", 4]]
)
def test_profile_of_two_ranks(tmp_path, which):
    """Both ranks exchange a sum twice a layer and the records once, and wait for each other."""
    num_layers, steps, output = (6 if "demo" in which else 2), 8, tmp_path / "profile.jsonl"
    text = run(
        "profile_decode.py",
        *which,
        *("--device", "cpu", "--dtype", "float32", "--tp", 2, "--batch", 2, "--prompt-len", 16),
        *("--warmup", 2, "--steps", steps, "--run-ahead", "off", "--output", output),
    )
    line, *table = text.splitlines()
    found = json.loads(line)
    assert json.loads(output.read_text()) == found
    assert (found["tp"], found["batch"], found["device"]) == (2, 2, platform.machine())
    assert (found["strategy"], found["block"], found["buffer"]) == ("multi_bd", which[-1], 1)
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    for each in found["ranks"]:
        # What comes before the first step that samples, and after the last begins, is left out.
        assert found["ranks"][0]["steps"] == each["steps"]
        assert 1 <= each["steps"] <= steps - 2
        # Some steps store a block and sample nothing.
        assert 2 * num_layers <= each["exchanges"] <= 2 * num_layers + 1
        assert 0 < each["exchange_us"] < 1e3 * each["step_ms"]
        assert 0 < each["exchange_percent"] < 100
        assert each["busy_percent"] is None
    late = [each["late_us"] for each in found["ranks"]]
    assert min(late) >= 0
    assert 0 < found["first_exchange_skew_us"] < 1e6
    names = [row.split("|")[-2].strip() for row in table if row.count("|") == 6]
    assert {"name", "gloo:all_reduce", "diffulex::add_rms_norm"} <= set(names)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--device", "cpu"], "--tp: expected several ranks with --device cpu or --model, got 1"),
        (["--model", "demo"], "--tp: expected several ranks with --device cpu or --model, got 1"),
        (["--tp", "2", "--target", "97"], "--target: expected --tp 1"),
        (
            ["--model", "demo", "--tp", "2", "--strategy", "default"],
            "--strategy: expected multi_bd with --model, got default",
        ),
        (
            ["--strategy", "default", "--block-size", "8"],
            "--block-size: expected it unset with --strategy default, got 8",
        ),
        (
            ["--strategy", "default", "--buffer-size", "2"],
            "--buffer-size: expected it unset with --strategy default, got 2",
        ),
    ],
)
def test_profiles_that_are_refused(monkeypatch, capsys, flags, text):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    with pytest.raises(SystemExit):
        import_module("profile_decode").parse(flags)
    assert capsys.readouterr().err.strip().endswith(text)


@pytest.mark.slow
def test_cpu_decode(tmp_path):
    """The program itself fails when the tokens of both decoders differ."""
    output = tmp_path / "cpu.json"
    text = run(
        "bench_cpu_decode.py",
        *("--model", "tiny", "--prompt-len", 18, "--block-size", 4, "--max-tokens", 11),
        *("--random-prompts", 3, "--threads", 1, "--buffer-size", "1,3", "--output", output),
        *("--quantization", "none,fp8"),
    )
    content = json.loads(output.read_text())
    assert json.loads(text) == content
    found = [(result["buffer_size"], result["quantization"]) for result in content["results"]]
    assert found == [(1, "none"), (1, "fp8"), (3, "none"), (3, "fp8")]
    for result in content["results"]:
        assert result["tokens"] == 3 * 11
        assert ("speedup" in result) == (result["quantization"] == "none")
        assert (result["weight_bytes_of_first"] == 1) == (result["quantization"] == "none")
    assert content["threads"] == 1


@pytest.mark.slow
def test_cpu_products():
    """A row for each shape and number of rows; every format has a time and its ratio."""
    head, _, *lines = run("bench_cpu_products.py", "--seconds", "0").splitlines()
    names = [cell.strip() for cell in head.strip("|").split("|")]
    assert names[2:] == ["bfloat16", "float32", "fp8", "fp8_block", "int8", "int4"]
    assert len(lines) == 6
    for line in lines:
        assert len(re.findall(r"\d \(\d+\.\d\dx\)", line)) == 6


DENSE_AND_CODES = ("float32", "bfloat16", "bfloat16 rows", "int8", "int8+head")
#: Answers for the peer of the CPU steps: half a second a row of the head and sequence.
PEER = """#!{python}
import json, sys
assert sys.argv[1].endswith("llama_cpp_peer.py") and json.loads(sys.argv[2])["layers"] == 2
assert sys.argv[3:] == ["--weights", "q8_0", "--threads", "1"]
print('{{"llama_cpp_python": "0", "system": "none", "weight_bytes": 5000000}}', flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    assert (asked["rows"], asked["context"]) == (8, 16)
    print(json.dumps({{"ms": 500 * asked["batch"] * asked["logits"]}}), flush=True)
"""


@pytest.mark.slow
def test_cpu_steps(tmp_path):
    """Engines and the peer take turns, with as many rows of the head."""
    peer, output = tmp_path / "peer", tmp_path / "steps.json"
    peer.write_text(PEER.format(python=sys.executable))
    peer.chmod(0o755)
    text = run(
        "bench_cpu_steps.py",
        *("--shape", "tiny", "--block-size", 8, "--prompt-len", 16, "--rounds", 3),
        *("--batch", 1, 2, "--weights", *DENSE_AND_CODES, "--threads", 1, "--output", output),
        *("--llama-cpp", peer, "--llama-weights", "q8_0"),
    )
    content = json.loads(output.read_text())
    names = [*DENSE_AND_CODES, "llama.cpp q8_0"]
    rows = content["results"]
    assert [(row["batch"], row["weights"]) for row in rows] == [
        (batch, name) for batch in (1, 2) for name in names
    ]
    assert content["llama_cpp_python"] == "0"
    for row in rows:
        assert row["rows"] == 8 * row["batch"]
        assert len(row["all_ms"]) == 3
        assert row["rows_per_s"] == pytest.approx(1e3 * row["rows"] / row["step_ms"], abs=0.1)
        if row["weights"] == "float32":
            assert row["of_first"] == 1
        if "llama" in row["weights"]:
            # Of eight positions the steps before the first have accepted three.
            assert row["all_ms"] == [500 * row["batch"] * n for n in (5, 4, 3)]
            assert row["head_rows"] == 4 * row["batch"]
    bytes_of = {row["weights"]: row["weight_bytes"] for row in rows}
    sizes = [bytes_of[name] for name in ("float32", "bfloat16", "int8", "int8+head")]
    assert sizes == sorted(set(sizes), reverse=True)
    assert bytes_of["llama.cpp q8_0"] == 5_000_000
    assert all(name in text for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(("prompt_len", "rounds"), [(16, 6), (17, 5)])
def test_cpu_steps_stay_within_a_block(prompt_len, rounds):
    sizes = ("--block-size", 8, "--prompt-len", prompt_len, "--rounds", rounds)
    run("bench_cpu_steps.py", "--shape", "tiny", "--weights", "float32", *sizes, status=2)


@pytest.mark.slow
def test_mixed_steps(tmp_path):
    output = tmp_path / "mixed.json"
    text = run(
        "bench_mixed_steps.py",
        *("--tiny", "--device", "cpu", "--dtype", "float32", "--requests", 2, "--prompt-len", 16),
        *("--output-len", 8, "--long-len", 100, "--every", 0.5, "--seconds", 2, "--chunk", 32),
        *("--block-size", 4, "--mixed", 48, "--json", output),
    )
    rows = json.loads(output.read_text())["results"]
    assert [row["steps"] for row in rows] == ["whole", "chunks", "48"]
    assert text.count("\n|") == len(rows) + 1
    for row in rows:
        assert row["long_prompts"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["most_ms"]
        assert row["alone_ms"] > 0
        assert row["tok_s"] > 0


@pytest.mark.slow
def test_replicas(tmp_path):
    output = tmp_path / "replicas.json"
    run(
        "bench_replicas.py",
        *("--replicas", 2, "--prompts", 12, "--concurrency", 4, "--waves", 1, "--repeat", 1),
        *("--output-len", 16, "--output", output),
    )
    (row,) = json.loads(output.read_text())["rows"]
    assert row["replicas"] == 2
    assert row["failed"] == 0
    assert row["offline_tokens"] > 12
    assert row["server_tokens"] > 8
    assert row["offline_tok_s"] == pytest.approx(row["offline_tokens"] / row["offline_s"], rel=1e-2)


#: Name of a shape -> strategy and number of parameters of the published model.
PUBLISHED = {
    "llada2-mini": ("multi_bd", 16_255_643_392),
    "sdar-8b": ("multi_bd", 8_190_735_360),
    "sdar-30b-a3b": ("multi_bd", 30_532_122_624),
    "llada-8b": ("d2f", 8_015_581_184),
    "dream-7b": ("d2f", 7_615_616_512),
    "fast-dllm-v2-7b": ("fast_dllm_v2", 7_615_616_512),
    # 25,250,986,782 and the encoder's scalar of each layer.
    "diffusion-gemma-26b-a4b": ("diffusion_gemma", 25_250_986_812),
    "llada2-flash": ("multi_bd", 102_889_705_216),
    "llada2.1-mini": ("multi_bd", 16_255_643_392),
    "dmax-mini": ("dmax", 16_255_643_392),
    "diffucoder-7b": ("d2f", 7_615_616_512),
    "dream-reasoner-8b": ("multi_bd", 8_190_735_360),
    "stable-diffcoder-8b": ("multi_bd", 8_250_462_208),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from published_shapes import SHAPES
    from random_engine import resolve_config

    strategy, parameters = PUBLISHED[name]
    shape = SHAPES[name]
    assert shape.facts().spec.num_parameters == parameters
    assert resolve_config(shape, device="cpu").decoding.decoding_strategy == strategy


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_random_model_keeps_what_its_family_keeps(monkeypatch, scheme):
    """As an engine that is asked for nothing else does."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from published_shapes import SHAPES
    from random_engine import build_model, resolve_config

    shape = SHAPES["diffusion-gemma-26b-a4b"].tiny()
    kept = resolve_config(shape, device="cpu", quantization=scheme).model.quantization_ignore
    assert bool(kept) == (scheme == "int4")
    model = build_model(shape, torch.float32, "cpu", quantization=scheme)
    for layer in model.decoder_layers:
        assert isinstance(layer.mlp.down.format, QuantizedWeight)
        for projection in (layer.attention.qkv, layer.attention.o):
            assert isinstance(projection.format, QuantizedWeight) == (not kept)


@pytest.mark.slow
def test_families(tmp_path):
    output = tmp_path / "families.json"
    text = run(
        "bench_families.py",
        *("--tiny", "--families", ",".join(PUBLISHED), "--batch", "1,3"),
        *("--warmup", 2, "--steps", 4, "--output", output),
    )
    content = json.loads(output.read_text())
    assert content["errors"] == {}
    assert content["is_tiny"]
    assert {"command", "copy_gb_per_s", "date", "device", "torch"} <= content.keys()
    lines = content["results"]
    expected = [
        (name, strategy, batch) for name, (strategy, _) in PUBLISHED.items() for batch in (1, 3)
    ]
    assert [(x["model"], x["strategy"], x["batch"]) for x in lines] == expected
    assert text.count("\n|") == len(lines) + 2
    for line in lines:
        reads = line["read_bytes"]
        assert line["steps"] == 4
        assert 0 < line["p10_ms"] <= line["step_ms"] <= line["p90_ms"]
        assert 0 < line["rows"] <= line["rows_run"]
        assert all(reads[part] > 0 for part in ("dense", "head", "kv"))
        assert line["read_gb"] == pytest.approx(sum(reads.values()) / 1e9, abs=1e-6)
        seconds = sum(reads.values()) / (1e9 * content["copy_gb_per_s"])
        assert line["fraction"] == pytest.approx(1e3 * seconds / line["step_ms"], rel=0.02)
        assert line["floor_ms"] == pytest.approx(1e3 * seconds, rel=0.02, abs=1e-4)


@pytest.mark.slow
def test_families_bytes(tmp_path):
    """Bytes against sums by hand: float32, prompt 64, first block still open."""
    output = tmp_path / "families.json"
    run(
        "bench_families.py",
        *("--tiny", "--families", "sdar-8b-b32,sdar-30b-a3b-b32,diffusion-gemma-26b-a4b"),
        *("--batch", 2, "--warmup", 1, "--steps", 3, "--prompt-len", 64, "--output", output),
    )
    dense, routed, canvas = json.loads(output.read_text())["results"]
    # Two requests, K and V, two layers, two heads of 32.
    assert dense["context"] == routed["context"] == 64
    assert dense["read_bytes"]["kv"] == routed["read_bytes"]["kv"] == 2 * 64 * 2 * 2 * 2 * 32 * 4
    assert dense["rows"] == routed["rows"] == 64
    # Attention, its head norms, layer norms, dense block; at the end one norm.
    layer = 64 * 32 * (4 + 2 * 2 + 4) + 2 * 32 + 2 * 64 + 3 * 64 * 112
    # Panels of the CPU may be padded.
    assert 4 * (2 * layer + 64) <= dense["read_bytes"]["dense"] < 1.1 * 4 * (2 * layer + 64)
    assert 4 * 300 * 64 <= dense["read_bytes"]["head"] < 1.1 * 4 * 300 * 64
    assert "experts" not in dense
    # Two layers of experts with three matrices 64 x 32.
    assert 2 < routed["experts"] <= 8
    one_expert = 2 * 3 * 64 * 32 * 4
    assert routed["read_bytes"]["experts"] == pytest.approx(
        routed["experts"] * one_expert, rel=0.01
    )
    assert routed["experts_if_uniform"] == pytest.approx(8 * (1 - 0.75**64), abs=0.01)
    # Sliding layers see 23 of 64 positions; the full one has one head of 128.
    elements = 2 * 23 * 2 * 64 * 2 + 64 * 2 * 128
    assert canvas["read_bytes"]["kv"] == 2 * elements * 4
    assert canvas["read_bytes"]["soft_embedding"] == 300 * 64 * 4


@pytest.mark.slow
def test_families_keep_going(tmp_path):
    """A model that fails is reported, and the others are measured all the same."""
    output = tmp_path / "families.json"
    # More positions than the tiny canvas model has.
    run(
        "bench_families.py",
        *("--tiny", "--families", "diffusion-gemma-26b-a4b,sdar-8b", "--batch", 1),
        *("--warmup", 0, "--steps", 2, "--prompt-len", 600, "--output", output),
        *("--quantization", "int8"),
        status=1,
    )
    content = json.loads(output.read_text())
    assert list(content["errors"]) == ["diffusion-gemma-26b-a4b"]
    assert "max_model_len" in content["errors"]["diffusion-gemma-26b-a4b"]
    (line,) = content["results"]
    assert (line["model"], content["quantization"]) == ("sdar-8b", "int8")
    # A byte for every weight of the projections of two layers, and little beside them.
    codes = 2 * (64 * 32 * (4 + 2 * 2 + 4) + 3 * 64 * 112)
    assert codes <= line["read_bytes"]["dense"] < 1.1 * codes


@pytest.mark.slow
def test_kernels(tmp_path):
    output, document = tmp_path / "kernels.json", tmp_path / "kernels.md"
    text = run("bench_kernels.py", "--device", "cpu", "--json", output, "--markdown", document)
    data = json.loads(output.read_text())
    results = data["results"]
    sections = {"attention", "coded", "prefill", "moe", "sampler", "acceptance", "small", "linear"}
    sections.add("quant")
    assert {x["section"] for x in results} == sections
    for result in results:
        assert result["is_correct"], result
        # A code has three bits behind the point.
        assert 0 <= result["error"] <= (4e-2 if "with codes" in result["op"] else 1e-2)
        assert 0 <= result["worst"] <= 1
        assert result["compared"] > 0
        assert 0 < result["time"]["p10"] <= result["time"]["median"] <= result["time"]["p90"]
        assert result["floor_us"] > 0
        assert result["op"] in text
    facts = {"date", "torch", "commit", "copy_gb_per_s", "read_gb_per_s", "product_tflop_per_s"}
    assert facts <= data["machine"].keys()
    # Peers are named with the reason why they were not timed.
    assert all("FA3" in x["absent"] | x["peers"] for x in results if x["section"] == "attention")
    report = document.read_text()
    assert report.count("\n| ") == len(results) + len(sections)
    assert "bench_kernels.py --device cpu" in report
    assert all(line in report for line in text.splitlines() if line.startswith("| "))


@pytest.mark.slow
def test_kernels_checks_only(tmp_path):
    output = tmp_path / "kernels.json"
    run(
        "bench_kernels.py",
        "--device",
        "cpu",
        "--check",
        "only",
        "--only",
        "small",
        "--json",
        output,
    )
    results = json.loads(output.read_text())["results"]
    assert {x["section"] for x in results} == {"small"}
    assert all(x["time"] is None and x["is_correct"] for x in results)


def test_counters_are_given_to_the_shape_that_launched_the_kernel(monkeypatch):
    """Output of ncu: other lines, names of shapes, then one row a kernel behind a row of units."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    profile = import_module("profile_kernels")
    metrics = [name for name, _ in profile.METRICS.values()]
    stalls = [profile._STALL.format(name) for name in ("wait", "barrier")]
    header = ["ID", "Kernel Name", "Push/Pop_Range", *metrics, *stalls]

    def row(*cells):
        return ",".join(f'"{cell}"' for cell in cells)

    def kernel(index, name, case):
        counters = ["2000", *["3"] * (len(metrics) - 1), "1", "3"]
        return row(index, name, f"1:{profile.RANGE}{case}:none", *counters)

    lines = [
        *("==PROF== Connected", "case 0: small:a: 1", "==PROF== a", "case 1: moe:b: 2 x 3"),
        *(row(*header), row(*[""] * len(header))),
        kernel(0, "void n::<unnamed>::first<int>(A)", 1),
        kernel(1, "void (anonymous namespace)::second<1>(B)", 0),
    ]
    first, second = (
        f"| {name} {profile.table_line(counters)}" for name, counters in profile.read_output(lines)
    )
    assert first.startswith("| moe:b: 2 x 3 | first | 2 | 3 |")
    assert first.endswith("| barrier 75 % |")
    assert second.startswith("| small:a: 1 | second | 2 | 3 |")


@pytest.mark.slow
def test_failures(tmp_path):
    """A failure that the program makes itself, and one that a worker makes which imports it."""
    path = tmp_path / "failures.jsonl"
    text = run("bench_failures.py", "--rows", "F1,F10", "--repeats", 1, "--json", path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["row"] for line in lines] == ["F1", "F10"]
    assert all(0 < line["times_s"][0] < 240 for line in lines)
    assert text.count("worker killed, idle") == 2


def test_failures_that_are_not_known():
    run("bench_failures.py", "--rows", "F1,F99", status=2)


def test_a_kernel_counts_from_the_end_of_the_one_before(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    work_type = import_module("rank_traces").Work
    work = [work_type(*each) for each in (("a", 0, 10), ("b", 4, 16), ("c", 12, 15), ("a", 20, 24))]
    rows = import_module("profile_decode").kernel_rows(work, 2, 3)
    found = [(row["name"], row["us_per_step"], row["us_alone"], row["us"]) for row in rows]
    assert found == [("a", 7, 7, 7), ("b", 3, 6, 12), ("c", 0, 0, 3)]
    whole = import_module("profile_decode").kernel_rows(work, 2, 2, has_threads=True)
    assert [(row["name"], row["us_per_step"]) for row in whole] == [("a", 7), ("b", 6)]
