# SPDX-License-Identifier: Apache-2.0
"""What exports of block-diffusion models are known to get wrong, each by a case that shows it.

What the tests of a part show already is not repeated: shifted rows, blocks on the absolute grid, signs and
ranks of confidences and seeds stand in test_runtime.py, strict loading, the layouts of checkpoints and the
masks of transformers in test_model.py.
"""

from __future__ import annotations

import json

import pytest
import torch

from diffulex import Diffulex, PromptError
from diffulex.checkpoint.auto_model import detect
from diffulex.errors import ConfigError
from diffulex.tools.cli import main
from diffulex_edge import exporter
from diffulex_edge.backends import BACKENDS
from diffulex_edge.bundle import read_bundle
from diffulex_edge.decoders import MODEL_REGISTRY, FastDLLMv2Edge, FastdLLMV2Edge, SDAREdge
from diffulex_edge.exporter import ExportConfig, export_model, load_decoder
from diffulex_edge.lowering import ProgramShape, example_inputs
from diffulex_edge.model import EdgeDecoder, EdgeProgram
from diffulex_edge.presets import PRESETS, preset_spec
from diffulex_edge.program import PteProgram
from diffulex_edge.quant import quantize_model
from fixtures.edge import DEMO, eager_engine, questions
from fixtures.extras import need_extra
from fixtures.families import DENSE_FAMILIES, SHIFTED

need_extra("edge", "executorch", "torchao")

ROWS = 64


@pytest.fixture
def decoder(checkpoint):
    path = checkpoint("sdar")
    return load_decoder(path, detect(path)[1], ROWS, BACKENDS["xnnpack"])


def run(program, tokens, first, ends):
    count = len(tokens)
    positions = torch.arange(first, first + count)
    ids = torch.tensor(tokens)[None]
    with torch.inference_mode():
        return program(ids, positions, torch.as_tensor(ends), torch.arange(count))[0]


class TestCache:
    @pytest.mark.parametrize("left", [0.0, 1000.0])
    def test_rows_that_nobody_may_see_take_no_weight(self, decoder, left):
        """Neither the zeros of an empty cache nor what another request left."""
        program = EdgeProgram(decoder)
        for pair in program.caches:
            for cache in pair:
                cache.fill_(left)
        found = run(program, [5, 6, 7, 8], 0, [4] * 4)
        expected, _ = decoder(torch.tensor([[5, 6, 7, 8]]), attention_mode="full")
        torch.testing.assert_close(found, expected[0], atol=2e-5, rtol=1e-4)

    def test_rows_past_a_short_block_are_not_seen(self, decoder):
        short = run(EdgeProgram(decoder), [5, 6], 0, [2, 2])
        padded = run(EdgeProgram(decoder), [5, 6, 0, 0], 0, [2, 2, 4, 4])[:2]
        torch.testing.assert_close(padded, short, atol=2e-5, rtol=1e-4)

    def test_a_block_is_stored_with_its_last_tokens(self):
        """What later blocks see of it was computed without masks."""
        last: dict[int, int] = {}

        def record(tokens, positions, *_):
            last.update(zip(positions.tolist(), tokens.tolist(), strict=True))

        with eager_engine(DEMO, buffer_size=1, on_call=record) as engine:
            mask = engine.config.model.mask_token_id
            chat = [{"role": "user", "content": questions(DEMO, 1)[0]}]
            prompt = engine.tokenizer.apply_chat_template(chat)
            (answer,) = engine.generate([prompt], max_tokens=40, ignore_eos=True, summary=False)
        size = engine.config.decoding.block_size
        begun = (len(prompt) + 39) // size * size
        whole = [*prompt, *answer.token_ids]
        assert begun > len(prompt)
        assert [last[place] for place in range(begun)] == whole[:begun]
        assert mask not in whole

    def test_inputs_do_not_grow_with_the_cache(self):
        """No mask per layer and no cache goes in or out."""
        sizes = [
            sum(item.nbytes for item in example_inputs(ProgramShape(256, 64, rows)))
            for rows in (512, 1 << 20)
        ]
        assert sizes[0] == sizes[1] < 10_000

    def test_one_table_of_rotations_as_long_as_the_cache(self, decoder):
        tables = {name: tuple(item.shape) for name, item in decoder.named_buffers()}
        tables = {name: shape for name, shape in tables.items() if "mean_row" not in name}
        assert tables.pop("turn") == (32, 32)
        assert tables == {"cos": (ROWS, 32), "sin": (ROWS, 32)}


class TestFacts:
    @pytest.mark.parametrize("name", ["demo", "llada", "fast_dllm_v2", "dream"])
    def test_stop_ids_and_mask_are_the_models(self, bundle, name):
        path = bundle(name)
        spec = detect(path)[1]
        constants = PteProgram(path / "model.pte").constants
        assert constants["get_eos_ids"] == list(spec.stop_token_ids)
        assert constants["dlx_mask_id"] == spec.mask_token_id
        assert constants["dlx_layout"] == "inplace"
        assert constants["dlx_shift"] == spec.shift == (spec.family in SHIFTED)

    @pytest.mark.parametrize("name", PRESETS)
    def test_the_mask_is_an_id_of_the_vocabulary(self, name):
        spec = preset_spec(name)
        assert 0 <= spec.mask_token_id < spec.vocab_size <= spec.embedding_rows

    def test_an_unknown_model_is_no_other_one(self, tmp_path, capsys):
        config = {"architectures": ["OtherForCausalLM"], "model_type": "other"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["edge", "export", "--model", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
        assert "OtherForCausalLM" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    def test_ids_outside_the_vocabulary_are_refused(self, bundle):
        with Diffulex(str(bundle("llada"))) as engine:
            for token in (-1, 300):
                with pytest.raises(PromptError, match=str(token)):
                    engine.generate([[1, token]])

    def test_every_weight_stands_once(self, decoder):
        table = decoder.weight_table()
        parameters = dict(decoder.named_parameters(remove_duplicate=False))
        assert len({item.data_ptr() for item in parameters.values()}) == len(parameters)
        assert {item.data_ptr() for item in table.values()} == {
            item.data_ptr() for item in parameters.values()
        }

    @pytest.mark.parametrize("family", DENSE_FAMILIES)
    def test_named_decoders_take_their_family(self, checkpoint, family):
        spec = detect(checkpoint(family), family)[1]
        with torch.device("meta"):
            for name, kind in MODEL_REGISTRY.items():
                if name == family:
                    assert isinstance(kind(spec, 8), EdgeDecoder)
                else:
                    with pytest.raises(ConfigError, match=f"of the family {name}, got {family}"):
                        kind(spec, 8)

    def test_both_spellings_are_one_class(self):
        assert FastdLLMV2Edge is FastDLLMv2Edge
        assert MODEL_REGISTRY["sdar"] is SDAREdge


class TestQuantisation:
    def test_head_and_table_are_quantised_and_norms_never(self, decoder):
        quantised = quantize_model(decoder, "int4")
        before = dict(decoder.named_parameters())
        changed = {
            name
            for name, item in quantised.named_parameters()
            if type(item.data) is not type(before[name].data)
        }
        kinds = {name.removesuffix(".weight").rpartition(".")[2] for name in changed}
        assert kinds == {"q", "k", "v", "o", "gate", "up", "down", "head", "embedding"}
        torch.testing.assert_close(quantised.turn, decoder.turn)
        torch.testing.assert_close(quantised.norm.mean_row, decoder.norm.mean_row)

    @pytest.mark.parametrize("name", ["sdar-8da8w", "sdar-8da4w"])
    def test_no_product_is_left_to_the_runtime(self, bundle, name):
        """Weights that are made float again in every call would be slower than float ones."""
        left = read_bundle(bundle(name)).facts["undelegated_ops"]
        unwanted = ("mm", "linear", "convolution", "dequantize_per")
        assert not [op for op in left if any(word in op for word in unwanted)]
        # That of the embedding, which becomes one operator with it.
        assert left.get("dequantize_affine", 0) == ("emb=8" in read_bundle(bundle(name)).quant)


class TestFailures:
    def test_an_unexpected_one_is_not_swallowed(self, checkpoint, tmp_path, monkeypatch):
        def fail(*_, **__):
            raise ZeroDivisionError("unexpected")

        monkeypatch.setattr(exporter, "run_trace", fail)
        with pytest.raises(ZeroDivisionError, match="unexpected"):
            export_model(ExportConfig(str(checkpoint("shallow")), tmp_path / "out"))
        assert not list(tmp_path.iterdir())

    def test_an_export_leaves_the_gradient_mode(self, bundle):
        bundle("llada")
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
