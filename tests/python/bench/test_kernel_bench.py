# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmark says of its figures: agreement, floors, statistics, targets, tables."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffulex import ops

SCRIPTS = Path(__file__).resolve().parents[3] / "benchmarks" / "python"


@pytest.fixture
def bench(monkeypatch):
    """The modules of the benchmark by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = (
        "agreement", "attention", "ceilings", "linear", "moe", "peers", "report", "sampler", "small_ops",
        "summary", "table", "timing",
    )  # fmt: skip
    return SimpleNamespace(**{name: import_module(f"kernel_bench.{name}") for name in names})


@pytest.fixture
def ceilings(bench):
    """Round figures: a copy of 4, a read of 5 TB/s, 800 TFLOP/s, twice that of e4m3, 50 MB of L2."""
    products = {"bfloat16": 8e14, "e4m3": 16e14, "int8": "no"}
    return bench.ceilings.Ceilings(4e12, {"a": 3e12, "b": 5e12, "c": "no"}, products, 50_000_000)


def compared(bench, out, reference, tolerance=None):
    agreement = bench.agreement.Agreement(reference.numel())
    agreement.add(out, reference, tolerance)
    return agreement


def test_rounded_outputs_agree(bench):
    exact = torch.randn(2048, 128, dtype=torch.float64)
    agreement = compared(bench, exact.bfloat16(), exact)
    assert agreement.is_right
    assert 1e-3 < agreement.error < 2e-3
    assert agreement.worst < 0.5


def test_one_wrong_tile_does_not_pass(bench):
    """Its error disappears in the norm of the whole output, and in rows that are not sampled."""
    exact = torch.randn(4096, 512, dtype=torch.float64)
    out = exact.clone()
    out[-24:-8, -8:] *= 1.1  # 128 of two million elements, a tenth off
    agreement = compared(bench, out, exact)
    assert agreement.error < 1e-2
    assert agreement.worst > 1
    assert not agreement.is_right
    assert compared(bench, exact, exact).is_right


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_was_not_written_does_not_pass(bench, value):
    exact = torch.randn(8, 16, dtype=torch.float64)
    out = exact.clone()
    out[5, 3] = value
    assert compared(bench, out, exact).worst == float("inf")


def test_a_part_that_was_not_compared_does_not_pass(bench):
    exact = torch.randn(8, 16, dtype=torch.float64)
    agreement = bench.agreement.Agreement(exact.numel())
    agreement.add(exact[:7], exact[:7])
    assert agreement.worst <= 1
    assert not agreement.is_right
    agreement.add(exact[7:], exact[7:])
    assert agreement.is_right


def test_claims_hold_everywhere(bench):
    agreement = bench.agreement.Agreement(3)
    agreement.claim(torch.tensor([True, True]))
    agreement.claim(torch.tensor(False))
    assert agreement.compared == 3
    assert not agreement.is_right


def test_a_zero_must_be_a_zero(bench):
    tolerance = bench.agreement.Tolerance(1e-3)
    zero = torch.zeros(2, 2)
    assert compared(bench, zero, zero, tolerance).is_right
    assert not compared(bench, zero + 1e-9, zero, tolerance).is_right


def wrong_tile(op, name):
    """The op, with a few elements near the end of its output a twentieth off."""

    def call(*args, **kwargs):
        result = op(*args, **kwargs)
        out = kwargs.get("out") if kwargs.get("out") is not None else result
        out.view(len(out), -1)[-2, -8:] *= 1.05
        return result

    call.__name__ = name
    return call


@pytest.mark.parametrize(
    ("section", "op"),
    [("attention", "block_attention"), ("moe", "fused_moe"), ("small_ops", "act_and_mul")],
)
def test_case_with_a_wrong_tile_is_wrong_and_not_timed(bench, ceilings, monkeypatch, section, op):
    """A row that is neither the first, the middle nor the last, and not all of it."""
    monkeypatch.setattr(ops, op, wrong_tile(getattr(ops, op), op))
    cases = getattr(bench, section).cases("cpu", True)
    case = next(case for case in cases if case.op.startswith(op))
    monkeypatch.setattr(case, "calls", [lambda: pytest.fail("timed")])
    result = case.run(True, ceilings)
    assert not result.is_correct
    assert result.time is None
    assert "WRONG" in bench.table.row(result)
    assert result.record()["worst"] > 1


@pytest.mark.parametrize("column", [0, 3, 4])
def test_wrong_statistic_of_one_row_is_found(bench, ceilings, monkeypatch, column):
    """Confidence, entropy and log-sum-exp of any row, by 1e-4 of the RMS of all rows."""
    real = ops.token_stats

    def call(*args, **kwargs):
        result = real(*args, **kwargs)
        # Not of the row itself: the entropy of a row with one large logit may be almost 0.
        result.stats[1, column] += 1e-4 * result.stats[:, column].square().mean().sqrt()
        return result

    monkeypatch.setattr(ops, "token_stats", call)
    case = next(bench.sampler.cases("cpu", True))
    assert not case.run(False, ceilings).is_correct


def test_wrong_draws_are_found(bench):
    """An id is right where its interval of the cumulative mass has the number."""
    mass = torch.tensor([[0.2, 0.0, 0.5, 0.3]], dtype=torch.float64)
    for uniform, right in ((0.1, 0), (0.3, 2), (0.69, 2), (0.71, 3), (0.999, 3)):
        for token in range(4):
            number = torch.tensor([uniform], dtype=torch.float64)
            drawn = bench.sampler._is_drawn(mass, torch.tensor([token]), number)
            assert bool(drawn) == (token == right), (uniform, token)


def test_floors_use_what_was_measured(bench, ceilings):
    """What only reads is held against the fastest read, what writes against a copy."""
    assert ceilings.read == 5e12
    assert ceilings.floor_us(5e9, 0) == pytest.approx(1000)
    assert ceilings.floor_us(2e9, 2e9) == pytest.approx(1000)
    assert ceilings.floor_us(0, 4e9) == pytest.approx(1000)
    assert ceilings.floor_us(6e9, 1e9) == pytest.approx(500 + 1000)
    assert ceilings.floor_us(1.0, 0, 8e11) == pytest.approx(1000)
    assert ceilings.floor_us(1.0, 0, 8e11, "e4m3") == pytest.approx(500)
    assert ceilings.floor_us(1.0, 0, 8e11, "int8") == pytest.approx(1000)
    # A copy reads: no read ceiling is below it.
    assert bench.ceilings.Ceilings(4e12, {"a": 3e12, "b": "no"}, {}, 0).read == 4e12


def test_buffers_that_stay_in_the_cache_are_named(ceilings):
    labels = [ceilings.cache(size) for size in (50e6, 50.1e6, 149e6, 150e6, 1e9)]
    assert labels == ["warm", "partly", "partly", "cold", "cold"]


def test_small_ops_do_not_claim_cold_caches(bench):
    """64 sets of a small op do not cover three times the L2, whatever the aim is."""
    rotated = {}
    for case in bench.small_ops.cases("cpu", True):
        rotated[case.op] = case.rotated_bytes
        assert 0 < case.rotated_bytes < 50e6
    one_set = 4.0 * 3 * 64  # x and the residual of 3 rows of 64, bfloat16
    assert rotated["add_rms_norm"] == 64 * one_set


def test_quantiles_are_samples(bench):
    timing = bench.timing.quantiles([float(value) for value in range(50, -1, -1)])
    assert (timing.p10, timing.median, timing.p90) == (5.0, 25.0, 45.0)
    assert bench.timing.quantiles([7.0]) == bench.timing.Timing(7.0, 7.0, 7.0)
    assert timing.minus(2.5) == bench.timing.Timing(22.5, 2.5, 42.5)


class FakeDevice:
    """A device on which an op takes 10 us, overlaps 2 us of an op in front, and a barrier 1.5 us."""

    def __init__(self):
        self.now, self.tape, self.launches = 0.0, None, 0
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            synchronize=lambda: None,
            clock_rate=lambda: 1700,
            power_draw=lambda: 650_000,
            current_stream=lambda: SimpleNamespace(wait_stream=lambda _: None),
            Stream=lambda: SimpleNamespace(wait_stream=lambda _: None),
            stream=lambda _: nullcontext(),
            Event=lambda **_: FakeEvent(self),
            CUDAGraph=lambda: FakeGraph(self),
            graph=self.capture,
        )

    @contextmanager
    def capture(self, graph):
        self.tape = graph.tape
        yield
        self.tape = None

    def launch(self, kind):
        if self.tape is None:
            self.run([kind])
        else:
            self.tape.append(kind)

    def run(self, kinds):
        self.launches += len(kinds)
        for before, kind in zip(["", *kinds], kinds):
            overlap = 2.0 if before == kind == "op" else 0.0
            self.now += (10.0 if kind == "op" else 1.5) - overlap

    def zeros(self, *_, **__):
        return SimpleNamespace(add_=lambda _: self.launch("barrier"))


class FakeEvent:
    def __init__(self, device):
        self.device, self.time = device, 0.0

    def record(self):
        self.time = self.device.now

    def synchronize(self):
        pass

    def elapsed_time(self, stop):
        return (stop.time - self.time) / 1e3


class FakeGraph:
    def __init__(self, device):
        self.device, self.tape = device, []

    def replay(self):
        self.device.run(self.tape)


def test_alone_is_without_overlap(bench, monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(bench.timing, "torch", device)
    bench.timing._barrier_us.cache_clear()
    calls = [lambda: device.launch("op")] * 3
    timing, clocks = bench.timing.time_and_watch(calls)
    # Replays last 200 us at least: 24 or 25 of these, of which the first overlaps nothing.
    assert timing.median == pytest.approx(8.0, abs=0.1)
    assert clocks == bench.timing.Clocks(1700.0, 650.0)
    before = device.launches
    assert bench.timing.time_alone(calls).median == pytest.approx(10.0)
    assert device.launches > before
    bench.timing._barrier_us.cache_clear()


def test_clocks_that_cannot_be_read_are_missing(bench, monkeypatch):
    device = FakeDevice()
    device.cuda.clock_rate = lambda: 1 / 0
    monkeypatch.setattr(bench.timing, "torch", device)
    timing, clocks = bench.timing.time_and_watch([lambda: device.launch("op")])
    assert clocks is None
    assert timing.median > 0


def brute_visible(shape):
    """Pairs under the block-causal mask of every request, one by one."""
    return sum(
        key < (position // 32 + 1) * 32 and (not shape.window or key > position - shape.window)
        for context, query in shape.parts
        for position in range(context, context + query)
        for key in range(context + query)
    )


@pytest.mark.parametrize(
    "settings", [{}, {"window": 40}, {"chunk": 70}, {"query": 8}, {"context": 50, "query": 40}]
)
def test_attention_counts_visible_pairs_and_bytes(bench, settings):
    shape = bench.attention.Shape(**{"requests": 3, "context": 64, "query": 32} | settings)
    assert shape.flops == 4.0 * 32 * 128 * brute_visible(shape)
    parts = [(shape.context, shape.query)] * 3 + ([(0, shape.chunk)] if shape.chunk else [])
    assert shape.parts == parts
    rows = sum(query for _, query in parts)
    assert shape.written_bytes == 2.0 * rows * 32 * 128
    if not shape.window:
        keys = sum(context + query for context, query in parts)
        assert shape.read_bytes == 2.0 * (rows * 32 + 2 * keys * 8) * 128


def test_attention_rows_cover_what_engines_meet(bench):
    shapes = list(bench.attention.decode_shapes())
    assert {16, 32, 64, 256} <= {shape.page for shape in shapes}
    assert {1, 2, 4, 7, 8, 16} <= {shape.q_heads // shape.kv_heads for shape in shapes}
    assert any(shape.chunk for shape in shapes)
    assert len({shape.text for shape in shapes}) == len(shapes)
    # The formula at 1 x 8k: 34.2 MB at 80 % of 4.3 TB/s and a launch of 6 us.
    one = bench.attention.Shape(1, 8192, 32)
    assert bench.attention.formula_us(one) == pytest.approx(15.95, abs=0.02)
    assert one.is_one_block
    assert not one.is_causal
    assert not bench.attention.Shape(1, 8192, 128).is_one_block
    assert bench.attention.Shape(1, 4096, 4096).is_causal


def test_routes_are_skewed_and_distinct(bench):
    model = bench.moe.Experts("m", 64, 4, 8, 8)
    torch.manual_seed(3)
    shares = {}
    for name, make in bench.moe.ROUTINGS.items():
        ids = make(2048, model, "cpu")
        assert ids.shape == (2048, 4)
        assert ids.dtype == torch.int32
        assert all(len(set(row)) == 4 for row in ids[:100].tolist())
        shares[name] = float(torch.bincount(ids.flatten(), minlength=64).max()) / 2048
    # The first of 64 ranks has 1 / 4.74 of the weight, and four draws a token.
    assert shares["zipf"] > 0.5
    assert shares["uniform"] < 0.1


def result_of(bench, **settings):
    """A result with a time of 10 us, its target times and whatever is given."""
    timing = bench.timing.Timing
    base = {
        "section": "attention", "op": "block_attention", "shape": "1 x 1", "error": 1e-3,
        "worst": 0.3, "compared": 8, "is_correct": True, "floor_us": 4.0, "read_bytes": 1e6,
        "written_bytes": 0.0, "flops": 0.0, "cache": "cold", "time": timing(10.0, 9.0, 11.0),
        "alone": timing(12.5, 12.0, 13.0), "clocks": bench.timing.Clocks(1785.0, 512.0),
        "peers": {"FA3": timing(9.9, 9.8, 10.0)}, "peers_alone": {"FA3": timing(9.95, 9.9, 10.0)},
    }  # fmt: skip
    return bench.report.Result(**base | settings)


@pytest.mark.slow
def test_case_that_raises_is_reported_and_the_others_run(bench, monkeypatch, tmp_path, capsys):
    real, path = ops.act_and_mul, tmp_path / "kernels.json"

    def refuse(*args, **kwargs):
        raise ValueError("out of luck")

    monkeypatch.setattr(ops, "act_and_mul", refuse)
    program = import_module("bench_kernels")
    arguments = ["--device", "cpu", "--only", "small", "--check", "only", "--json", str(path)]
    assert program.main(arguments) == 1
    content = json.loads(path.read_text())
    assert content["machine"]["errors"] == ["small: act_and_mul, 3 x 96: ValueError: out of luck"]
    found = {result["op"] for result in content["results"]}
    assert {"add_rms_norm", "store_kv_cache", "moe_permute"} <= found
    assert "out of luck" in capsys.readouterr().err
    monkeypatch.setattr(ops, "act_and_mul", real)
    assert program.main(arguments) == 0
    assert json.loads(path.read_text())["machine"]["errors"] == []


@pytest.fixture
def fake_fa3(bench, monkeypatch):
    """A package in the place of FA3's: attention to all keys, and counts of its calls."""
    counts = SimpleNamespace(metadata=0, with_metadata=0, calls=0, factor=1.0)

    def get_scheduler_metadata(*, batch_size, cache_seqlens, cu_seqlens_q, **_):
        assert len(cache_seqlens) == batch_size == len(cu_seqlens_q) - 1
        counts.metadata += 1
        return torch.zeros(4)

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, seqused_k, block_table, out, scheduler_metadata, fa_version, **_
    ):
        assert fa_version == 3
        counts.calls += 1
        counts.with_metadata += scheduler_metadata is not None
        group = q.size(1) // k.size(2)
        for index, keys in enumerate(seqused_k.tolist()):
            rows = slice(*cu_seqlens_q[index : index + 2].tolist())
            pages = block_table[index].long()
            part = [x[pages].flatten(0, 1)[:keys].float() for x in (k, v)]
            k_part, v_part = (x.repeat_interleave(group, 1).transpose(0, 1) for x in part)
            weights = q[rows].float().transpose(0, 1) @ k_part.mT / q.size(2) ** 0.5
            out[rows] = counts.factor * (weights.softmax(-1) @ v_part).transpose(0, 1)

    package = SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func,
        get_scheduler_metadata=get_scheduler_metadata,
    )
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", package)
    bench.peers._attribute.cache_clear()
    yield counts
    bench.peers._attribute.cache_clear()


def test_fa3_gets_its_metadata_once(bench, ceilings, fake_fa3):
    shape = bench.attention.Shape(2, 64, 32, 4, 2, 64, page=16)
    case = bench.attention._case("attention", shape, "cpu")
    assert set(case.peers) == {"FA3", "FA3 without metadata"}
    assert case.judges == {"FA3": bench.report.Limit()}
    result = case.run(True, ceilings)
    assert result.is_correct
    assert set(result.peers) == set(case.peers)
    assert fake_fa3.metadata == 1
    assert 3 < fake_fa3.with_metadata < fake_fa3.calls


def test_a_peer_that_computes_something_else_is_not_timed(bench, fake_fa3):
    fake_fa3.factor = 1.05
    shape = bench.attention.Shape(2, 64, 32, 4, 2, 64)
    case = bench.attention._case("attention", shape, "cpu")
    assert not case.peers
    assert "differs from ours" in case.absent["FA3"]


def test_every_target_has_its_own_verdict(bench):
    result = result_of(bench, targets={"peer": 9.9, "formula": 10.0, "goal": 9.0})
    assert result.verdicts() == {"peer": "FAIL", "formula": "pass", "goal": "FAIL"}
    line = bench.table.row(result)
    assert "| 9.90 FAIL | 10.00 pass | 9.00 FAIL |" in line
    assert "| 10.00 | 9.00 | 12.50 | 4.00 | cold | 1785 | 512 | FA3 9.90 (9.95) |" in line
    assert "below the floor" not in line
    assert bench.table.counts([result, result_of(bench)]).startswith(
        "2 rows; peer: 0 pass, 1 fail; formula: 1 pass, 0 fail; goal: 0 pass, 1 fail; 0 wrong"
    )


def test_rows_below_their_floor_say_so(bench):
    result = result_of(bench, floor_us=10.1)
    assert result.record()["is_below_floor"]
    assert "below the floor" in bench.table.row(result)


@pytest.mark.parametrize(
    ("gpu", "targets"),
    [
        ("NVIDIA H200", {"peer": 9.9, "formula": 8.0, "goal": 7.0}),
        # Formulas and goals are times of an H200; a peer was timed in the same run.
        ("NVIDIA H100 80GB HBM3", {"peer": 9.9}),
    ],
)
def test_formulas_are_judged_on_their_gpu(bench, gpu, targets):
    case = bench.report.Case(
        "attention", "op", "shape", [], list, 1.0, judges={"FA3": bench.report.Limit()},
        formula_us=8.0, goal_us=7.0,
    )  # fmt: skip
    timing = bench.timing.Timing
    peers = {"FA3": timing(9.9, 9.8, 10.0), "FA3 without metadata": timing(9.0, 9.0, 9.0)}
    result = result_of(bench, peers=peers)
    case._set_targets(result, gpu)
    assert result.targets == targets


def test_report_and_summary_say_the_same(bench, ceilings, tmp_path):
    results = [
        result_of(bench, targets={"peer": 9.9}, absent={"FlashInfer": "no"}),
        result_of(bench, section="moe", op="fused_moe zipf", targets={"goal": 11.0}, cache="warm"),
        result_of(bench, section="sampler", op="token_stats greedy", is_correct=False, time=None,
                  error=float("nan"), worst=float("inf")),
    ]  # fmt: skip
    facts = {**bench.report.fingerprint(ceilings), "errors": [], "command": "python bench.py"}
    text = bench.table.document(facts, results)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## attention", "## moe", "## sampler",
    ]  # fmt: skip
    assert "* FlashInfer: no" in text
    assert "    python bench.py\n" in text
    assert all(bench.table.row(result) in text for result in results)
    path = tmp_path / "results.json"
    bench.report.write_json(path, facts, results)
    content = json.loads(path.read_text())
    assert content["results"][2]["worst"] is None
    assert content["machine"]["read_gb_per_s"] == {"a": 3000.0, "b": 5000.0, "c": "no"}
    tables = bench.summary.tables(content)
    assert "0 of 1 rows meet their peer target, 0 of 0" in tables
    assert "1 rows are warm" in tables
    assert "| block_attention, 1 x 1 | 10.0 | 9.0 | peer | 9.9 | 1.01 |" in tables
    assert "goal | 11.0" not in tables
    assert "| 1 x 1 | 10.0 | 9.9 | 12.5 | 9.9 |" in tables
    assert "| 1 x 1 | zipf | 10.0 | 4.0 |  |  | 11.0 | goal pass |" in tables
    assert "token_stats" not in tables


def test_parts_of_a_table_are_joined(bench, ceilings, tmp_path):
    """Every row comes back as it was written; facts that differ are all kept."""
    program = import_module("bench_kernels")
    wrong = {"is_correct": False, "time": None, "alone": None, "clocks": None}
    parts = [
        [result_of(bench, targets={"peer": 9.9}, absent={"FlashInfer": "no"})],
        [result_of(bench, shape="2 x 1", error=float("nan"), worst=float("inf"), **wrong)],
    ]
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, results in zip(paths, parts):
        facts = {**bench.report.fingerprint(ceilings), "errors": [path.name], "command": path.stem}
        bench.report.write_json(path, facts, results)
    report, both = tmp_path / "both.md", tmp_path / "both.json"
    arguments = ["--join", *paths, "--json", both, "--markdown", report]
    assert program.main(list(map(str, arguments))) == 1
    content = json.loads(both.read_text())
    assert content["results"] == [json.loads(path.read_text())["results"][0] for path in paths]
    assert content["machine"]["errors"] == ["a.json", "b.json"]
    assert content["machine"]["command"] == ["a", "b"]
    text = report.read_text()
    assert "\n    a\n    b\n" in text
    assert bench.table.row(parts[0][0]) in text
    assert "WRONG" in text


def test_sections_of_one_name_are_run_together(bench, capsys):
    program = import_module("bench_kernels")
    assert program.parse(["--only", "quant,moe"]).only == [
        "quant-rows", "quant-experts", "quant-dense", "quant-layers", "quant-int4", "moe",
    ]  # fmt: skip
    assert program.parse(["--only", "quant-int4"]).only == ["quant-int4"]
    assert program.parse([]).only == list(program.SECTIONS)
    with pytest.raises(SystemExit):
        program.parse(["--only", "qua"])
    assert "got qua" in capsys.readouterr().err


def test_a_limit_is_of_a_peer_and_beyond_it(bench):
    limit, timing = bench.report.Limit, bench.timing.Timing
    case = bench.report.Case(
        "quant", "op", "shape", [], lambda: bench.agreement.Agreement(0), 1.0,
        judges={"a": limit(0.5), "b": limit(plus_us=0.3), "c": limit(0.1), "d": limit()},
    )  # fmt: skip
    peers = {name: timing(time, time, time) for name, time in (("a", 8.0), ("b", 3.5), ("d", 4.0))}
    result = result_of(bench, peers=peers)
    case._set_targets(result, "NVIDIA A100")
    assert result.targets == {"peer": pytest.approx(3.8)}
    assert case._limits() == "target 0.5 of a, 1 of b + 0.3 us, 0.1 of c"
