# SPDX-License-Identifier: Apache-2.0
"""Family detection and the rules for reading ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex import families
from diffulex.checkpoint.auto_model import detect
from diffulex.errors import CheckpointError, ConfigError
from diffulex.families.base import Family
from diffulex.families.detection import detect_family, nearest_family
from diffulex.families.listing import FAMILIES
from diffulex.families.spec import ModelSpec
from diffulex.quantization.stored import read_stored
from diffulex.registry import AutoModelForDiffusionLM, AutoSampler
from diffulex.samplers import mask_fill
from diffulex.samplers.base import MaskFillSampler
from fixtures.checkpoints import EOS_ID, MASK_ID, TURN_END_ID, CheckpointBuilder, tiny_config

PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "data" / "hf"


def write_config(directory: Path, **overrides) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny_config(**overrides)))
    return directory


def read(directory: Path, **overrides) -> ModelSpec:
    return detect(write_config(directory, **overrides))[1]


def test_tiny_checkpoint(tmp_path):
    CheckpointBuilder().write(tmp_path)
    name, spec, info = detect(tmp_path)
    assert name == "sdar"
    assert spec == ModelSpec(
        family="sdar",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=112,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=512,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rotary_dim=32,
        dtype="float32",
        block_size=4,
        mask_token_id=MASK_ID,
        stop_token_ids=(EOS_ID, TURN_END_ID),
    )
    assert info.architecture == "SDARForCausalLM"
    assert info.engine_defaults == {}


class TestFamilies:
    def test_by_model_type_alone(self, tmp_path):
        write_config(tmp_path, architectures=...)
        assert detect(tmp_path)[0] == "sdar"

    @pytest.mark.parametrize(
        ("config", "family"),
        [
            ({"architectures": ["DreamModel"], "model_type": "Dream"}, "dream"),
            ({"architectures": ["DreamForCausalLM"], "model_type": "Dream"}, "dream_reasoner"),
            ({"architectures": ["LLaDAModelLM"], "model_type": "llada"}, "llada"),
            ({"architectures": ["Fast_dLLM_QwenForCausalLM"]}, "fast_dllm_v2"),
            ({"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe"}, "sdar_moe"),
            ({"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe"}, "llada2"),
            ({"model_type": "llada2_moe_veomni"}, "llada2"),
            ({"architectures": ["DiffusionGemmaForBlockDiffusion"]}, "diffusion_gemma"),
            (
                {"architectures": ["StableDiffcoderForCausalLM"], "model_type": "llama"},
                "stable_diffcoder",
            ),
            (
                {
                    "architectures": ["LlamaForCausalLM"],
                    "model_type": "llama",
                    "auto_map": {"AutoModel": "modeling_seed_diffcoder.SeedDiffcoderModel"},
                },
                "stable_diffcoder",
            ),
        ],
    )
    def test_by_architecture_or_model_type(self, config, family):
        assert detect_family(config, list) == family

    @pytest.mark.parametrize("module", ["modeling_seed_diffcoder", "modeling_stable_diffcoder"])
    def test_stable_diffcoder_by_the_name_of_its_module(self, module):
        """Revisions differ in the module; the class may be called like Llama's."""
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        assert detect_family(config, list) is None
        config["auto_map"] = {"AutoModelForCausalLM": f"{module}.LlamaForCausalLM"}
        assert detect_family(config, list) == "stable_diffcoder"

    def test_dream_with_head_norms_is_the_reasoner(self):
        config = {"architectures": ["DreamModel"], "model_type": "Dream"}
        names = ["model.layers.0.self_attn.q_norm.weight"]
        assert detect_family(config, lambda: names) == "dream_reasoner"
        names = ["model.layers.0.self_attn.q_proj.bias"]
        assert detect_family(config, lambda: names) == "dream"
        assert detect_family({"model_type": "Dream"}, lambda: names) == "dream"
        assert detect_family(config, list) == "dream"
        with pytest.raises(CheckpointError, match=r"expected tensors .*q_proj\.bias.*got neither"):
            detect_family(config, lambda: ["model.layers.0.self_attn.q_proj.weight"])

    def test_unknown_architecture_lists_the_supported(self, tmp_path):
        write_config(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama", auto_map=...)
        with pytest.raises(
            CheckpointError, match=r"supported architectures .*sdar.*LlamaForCausal"
        ):
            detect(tmp_path)

    @pytest.mark.parametrize("key", ["expert_intermediate_size", "num_experts"])
    def test_mixture_layout_of_llada_is_rejected(self, tmp_path, key):
        write_config(tmp_path, architectures=["LLaDAModel"], model_type="llada", **{key: 8})
        with pytest.raises(CheckpointError, match="mixture of experts"):
            detect(tmp_path)

    def test_model_name_must_match(self, tmp_path):
        write_config(tmp_path)
        assert detect(tmp_path, "sdar")[0] == "sdar"
        for name in ("dream", "llada2_mini"):
            with pytest.raises(ConfigError, match=rf"\(sdar\), got '{name}'"):
                detect(tmp_path, name)
        with pytest.raises(ConfigError, match=r"expected one of .*sdar.*got 'nonsense'"):
            detect(tmp_path, "nonsense")

    @pytest.mark.parametrize(
        ("config", "nearest"),
        [
            ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "sdar"),
            ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "dream"),
            ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "stable_diffcoder"),
            ({"architectures": ["DreamV2Model"], "model_type": "dreamv2"}, "dream"),
            ({"architectures": ["LLaDA3Model"], "model_type": "llada3"}, "llada"),
            ({"architectures": ["SDARv2ForCausalLM"], "model_type": "x"}, "sdar"),
            ({"architectures": ["LLaDA2MoeV2ModelLM"], "model_type": "x"}, "llada2"),
        ],
    )
    def test_unknown_layout_names_the_nearest_family(self, tmp_path, config, nearest):
        write_config(tmp_path, auto_map=..., **config)
        with pytest.raises(
            CheckpointError,
            match=rf"nearest to {nearest}: pass model_name='{nearest}' \(--model-name {nearest}\)",
        ):
            detect(tmp_path)

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("model.layers.0.attention.query_key_value.weight", "llada2"),
            ("model.transformer.blocks.0.ff_out.weight", "llada"),
            ("model.layers.0.self_attn.q_norm.weight", "sdar"),
            ("model.layers.0.self_attn.q_proj.bias", "dream"),
            ("model.layers.0.self_attn.q_proj.weight", "stable_diffcoder"),
            ("encoder.weight", None),
        ],
    )
    def test_nearest_by_tensor_names(self, name, nearest):
        config = {"architectures": ["XyzForCausalLM"], "model_type": "xyz"}
        assert nearest_family(config, lambda: [name]) == nearest

    def test_unknown_layout_is_loaded_as_the_user_says(self, tmp_path):
        write_config(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3", auto_map=...)
        name, spec, info = detect(tmp_path, "sdar")
        assert (name, spec.family, info.architecture) == ("sdar", "sdar", "Qwen3ForCausalLM")

    def test_remote_code_is_never_run(self, tmp_path):
        """Not even imported: the module named by auto_map would leave a mark."""
        mark = tmp_path / "executed"
        code = f"open({str(mark)!r}, 'w').close()\n"
        for name in ("modeling_sdar", "configuration_sdar", "modeling_x"):
            (tmp_path / f"{name}.py").write_text(code)
        auto_map = {"AutoConfig": "configuration_sdar.C", "AutoModel": "modeling_x.M"}
        CheckpointBuilder(tiny_config(auto_map=auto_map)).write(tmp_path)
        detect(tmp_path)
        write_config(tmp_path, architectures=["XForCausalLM"], model_type="x", auto_map=auto_map)
        with pytest.raises(CheckpointError, match="supported architectures"):
            detect(tmp_path)
        assert not mark.exists()

    def test_registered_model_from_outside(self, tmp_path):
        class ToyModel:
            @staticmethod
            def read_spec(config, model_dir, *, mask_token_id=None):
                return ModelSpec("toy", 8, 4, 4, 1, 1, 1, 4, 16, 1e-6, 1e4, 4)

        write_config(tmp_path, architectures=["ToyForCausalLM"], model_type="toy")
        with pytest.raises(CheckpointError, match="ToyForCausalLM"):
            detect(tmp_path)
        AutoModelForDiffusionLM.register("toy", ToyModel, aliases=("ToyForCausalLM",))
        try:
            assert detect(tmp_path)[0] == "toy"
            assert detect(tmp_path)[1].family == "toy"
        finally:
            AutoModelForDiffusionLM.unregister("toy")

    @pytest.mark.parametrize(
        ("name", "num_parameters"),
        [("LLaDA2-mini", 16_255_643_392), ("LLaDA2-flash", 102_889_705_216)],
    )
    def test_published_llada2(self, name, num_parameters):
        if not (PUBLISHED / name).is_dir():
            pytest.skip(f"published configuration of {name} is not in {PUBLISHED}")
        family, spec, _ = detect(PUBLISHED / name)
        assert family == spec.family == "llada2"
        assert spec.mask_token_id == 156895
        assert spec.stop_token_ids == (156892,)
        assert (spec.block_size, spec.rotary_dim, spec.rope_theta) == (32, 64, 6e5)
        assert spec.num_parameters == num_parameters

    @pytest.mark.parametrize(
        ("name", "hidden", "inner", "total_size"),
        [
            ("SDAR-4B-Chat", 2560, 9728, 8_822_848_512),
            ("SDAR-8B-Chat", 4096, 12288, 16_381_470_720),
        ],
    )
    def test_published_sdar(self, name, hidden, inner, total_size):
        if not (PUBLISHED / name).is_dir():
            pytest.skip(f"published configuration of {name} is not in {PUBLISHED}")
        _, spec, _ = detect(PUBLISHED / name)
        assert spec == ModelSpec(
            family="sdar",
            vocab_size=151936,
            hidden_size=hidden,
            intermediate_size=inner,
            num_layers=36,
            num_q_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_positions=32768,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            rotary_dim=128,
            dtype="bfloat16",
            block_size=4,
            mask_token_id=151669,
            stop_token_ids=(151643, 151645),
        )
        assert 2 * spec.num_parameters == total_size

    @pytest.mark.parametrize("name", ["SDAR-4B-Chat", "SDAR-8B-Chat"])
    def test_published_tensor_names(self, name):
        from diffulex.nn.decoder import DecoderForDiffusionLM

        if not (PUBLISHED / name).is_dir():
            pytest.skip(f"published tensor index of {name} is not in {PUBLISHED}")
        index = json.loads((PUBLISHED / name / "model.safetensors.index.json").read_text())
        _, spec, _ = detect(PUBLISHED / name)
        model = DecoderForDiffusionLM(spec, torch.bfloat16, "meta")
        assert model.weight_table().keys() == index["weight_map"].keys()


class TestReadingRules:
    def test_rope_theta_nested_only(self, tmp_path):
        nested = {"rope_type": "default", "rope_theta": 5e5}
        assert read(tmp_path, rope_theta=..., rope_parameters=nested).rope_theta == 5e5

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("attn_logit_softcapping", 50.0),
            ("final_logit_softcapping", 30.0),
            ("logit_scale", 0.5),
            ("logits_scaling", 8.0),
            ("embedding_multiplier", 12.0),
            ("residual_multiplier", 0.22),
            ("attention_multiplier", 0.0078125),
            ("no_rope_layers", [1, 1, 1, 0]),
            ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ],
    )
    def test_keys_of_other_decoders_are_refused(self, tmp_path, key, value):
        with pytest.raises(
            CheckpointError, match=rf"config\.json: {key}: expected .* not supported"
        ):
            read(tmp_path, **{key: value})
        read(tmp_path, **{key: None})

    def test_mask_token_that_disagrees(self, tmp_path):
        """A declared mask token may be an ordinary token of the vocabulary."""
        CheckpointBuilder().write(tmp_path)
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "mask_token": "a"}))
        with pytest.raises(
            CheckpointError, match=r"mask token: expected one id, got 259 .* 97 from"
        ):
            detect(tmp_path)
        assert detect(tmp_path, mask_token_id=MASK_ID)[1].mask_token_id == MASK_ID

    def test_rope_theta_disagreement(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"rope_theta: expected .*30000.*got 1000000"):
            read(tmp_path, rope_parameters={"rope_theta": 30000})

    @pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
    @pytest.mark.parametrize("type_key", ["rope_type", "type"])
    def test_scaled_rope_is_rejected(self, tmp_path, key, type_key):
        with pytest.raises(CheckpointError, match=rf"{key}.*got 'yarn'"):
            read(tmp_path, **{key: {type_key: "yarn", "factor": 4.0}})

    def test_head_dim_null_is_derived(self, tmp_path):
        assert read(tmp_path, head_dim=None).head_dim == 16
        assert read(tmp_path, head_dim=...).head_dim == 16
        with pytest.raises(CheckpointError, match="multiple of 5 heads"):
            read(tmp_path, head_dim=None, num_attention_heads=5, num_key_value_heads=5)

    @pytest.mark.parametrize("value", [None, 0, ...])
    def test_kv_heads_default_to_query_heads(self, tmp_path, value):
        assert read(tmp_path, num_key_value_heads=value).num_kv_heads == 4

    def test_kv_heads_must_divide(self, tmp_path):
        with pytest.raises(CheckpointError, match="num_key_value_heads: expected a divisor of 4"):
            read(tmp_path, num_key_value_heads=3)

    @pytest.mark.parametrize(
        ("keys", "dtype"),
        [
            ({"torch_dtype": "float16"}, "float16"),
            ({"torch_dtype": ..., "dtype": "float32"}, "float32"),
            ({"torch_dtype": ...}, "bfloat16"),
        ],
    )
    def test_dtype(self, tmp_path, keys, dtype):
        assert read(tmp_path, **keys).dtype == dtype

    def test_unknown_dtype(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"dtype: expected one of .*got 'int4'"):
            read(tmp_path, torch_dtype="int4")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("use_sliding_window", True),
            ("use_mrope", True),
            ("mlp_bias", True),
            ("use_regular_causal", True),
            ("block_causal_prompt", False),
            ("hidden_act", "gelu"),
            ("num_experts", 128),
        ],
    )
    def test_active_keys_that_change_the_math(self, tmp_path, key, value):
        with pytest.raises(CheckpointError, match=rf"config\.json: {key}: expected .*{value!r}"):
            read(tmp_path, **{key: value})

    def test_harmless_keys_are_ignored(self, tmp_path):
        assert read(tmp_path, ep_size=8, fuse_cross_entropy=True, max_window_layers=3, foo="bar")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("hidden_size", ...),
            ("hidden_size", 0),
            ("hidden_size", "64"),
            ("num_hidden_layers", -1),
            ("vocab_size", 1.5),
            ("num_attention_heads", True),
            ("rms_norm_eps", 0),
            ("attention_bias", "yes"),
        ],
    )
    def test_malformed_values(self, tmp_path, key, value):
        with pytest.raises(CheckpointError, match=rf"config\.json: {key}: expected"):
            read(tmp_path, **{key: value})

    @pytest.mark.parametrize("text", ["", "{", "[1]", '"x"'])
    def test_malformed_file(self, tmp_path, text):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            detect(tmp_path)

    def test_no_file(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"expected a config\.json"):
            detect(tmp_path)

    def test_checkpoint_in_low_precision(self, tmp_path):
        found = read_stored(write_config(tmp_path, quantization_config={"quant_method": "fp8"}))
        assert (found.scheme, found.where) == ("fp8", "config.json: quantization_config")
        assert detect(tmp_path)[2].stored == found

    def test_language_model_in_low_precision(self, tmp_path):
        nested = {"quantization_config": {"quant_method": "quark"}}
        with pytest.raises(CheckpointError, match=r"text_config\.quantization_config.*'quark'"):
            read(tmp_path, text_config=nested)

    @pytest.mark.parametrize("value", [False, None, {"enabled": False}])
    def test_experts_that_are_not_quantised(self, tmp_path, value):
        read(tmp_path, use_fp8_experts=False, llada_fp8_experts=value)
        assert detect(tmp_path)[2].stored is None

    def test_file_that_says_quantised(self, tmp_path):
        path = write_config(tmp_path) / "hf_quant_config.json"
        path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
        with pytest.raises(
            CheckpointError, match=r"hf_quant_config\.json: quantization\.quant_algo: .*'NVFP4'"
        ):
            detect(tmp_path)
        for weights in ({}, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}):
            path.write_text(json.dumps({"quantization": weights}))
            assert detect(tmp_path)[2].stored is None

    @pytest.mark.parametrize("key", ["block_size", "bd_size"])
    def test_block_size_names(self, tmp_path, key):
        assert read(tmp_path, **{"block_size": ..., key: 16}).block_size == 16

    def test_directory_suffix_is_only_a_hint(self, tmp_path, caplog):
        with caplog.at_level("WARNING", logger="diffulex"):
            assert read(tmp_path / "SDAR-b32", block_size=...).block_size == 4
        assert "suggests block size 32" in caplog.text

    def test_engine_defaults(self, tmp_path):
        write_config(tmp_path)
        path = tmp_path / "generation_config.json"
        path.write_text(json.dumps({"diffulex": {"buffer_size": 2, "accept_threshold": 0.8}}))
        assert detect(tmp_path)[2].engine_defaults == {"buffer_size": 2, "accept_threshold": 0.8}
        path.write_text(json.dumps({"diffulex": [1]}))
        with pytest.raises(CheckpointError, match=r"generation_config\.json: diffulex"):
            detect(tmp_path)


class TestMaskId:
    def settings(self, directory: Path, added: dict[str, int], **extra) -> None:
        decoder = {str(token_id): {"content": text} for text, token_id in added.items()}
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"added_tokens_decoder": decoder, **extra})
        )

    def test_from_the_configuration(self, tmp_path):
        assert read(tmp_path, mask_token_id=0).mask_token_id == 0

    def test_from_the_declared_mask_token(self, tmp_path):
        self.settings(tmp_path, {"<hole>": 17}, mask_token="<hole>")
        assert read(tmp_path, mask_token_id=...).mask_token_id == 17

    @pytest.mark.parametrize(
        "text", ["<|mask|>", "<MASK>", "<|MASK|>", "|<MASK>|", "<|mdm_mask|>", "<[MASK_TOKEN]>"]
    )
    def test_from_a_known_text(self, tmp_path, text):
        self.settings(tmp_path, {text: 18})
        assert read(tmp_path, mask_token_id=...).mask_token_id == 18

    def test_two_names_of_one_id_agree(self, tmp_path):
        self.settings(tmp_path, {"<|MASK|>": 19}, mask_token="<|MASK|>")
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<MASK>": 19}))
        assert read(tmp_path, mask_token_id=19).mask_token_id == 19

    def test_disagreement(self, tmp_path):
        self.settings(tmp_path, {"<|MASK|>": 19})
        with pytest.raises(CheckpointError, match=r"20 from config\.json, 19 from .*<\|MASK\|>"):
            read(tmp_path, mask_token_id=20)
        assert detect(tmp_path, mask_token_id=21)[1].mask_token_id == 21

    def test_files_disagree_about_one_text(self, tmp_path):
        self.settings(tmp_path, {"<|MASK|>": 19})
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<|MASK|>": 22}))
        with pytest.raises(CheckpointError, match="mask token: expected one id"):
            read(tmp_path, mask_token_id=...)

    def test_family_default_needs_the_token_or_no_tokenizer(self, tmp_path):
        big = {"vocab_size": 151936, "mask_token_id": ..., "eos_token_id": 151643}
        assert read(tmp_path / "bare", **big).mask_token_id == 151669
        self.settings(tmp_path / "with", {"<filler>": 151669})
        assert read(tmp_path / "with", **big).mask_token_id == 151669
        self.settings(tmp_path / "without", {"<filler>": 151666})
        with pytest.raises(CheckpointError, match="pass mask_token_id"):
            read(tmp_path / "without", **big)

    @pytest.mark.parametrize("value", [300, 5000])
    def test_outside_the_vocabulary(self, tmp_path, value):
        with pytest.raises(CheckpointError, match=f"below vocab_size 300, got {value}"):
            read(tmp_path, mask_token_id=value)

    @pytest.mark.parametrize("value", [-1, "x", True, 259.0, [258, 259]])
    def test_malformed(self, tmp_path, value):
        with pytest.raises(CheckpointError, match="mask_token_id"):
            read(tmp_path, mask_token_id=value)


class TestStopIds:
    def test_union_of_all_sources(self, tmp_path):
        decoder = {"5": {"content": "<end>"}, "6": {"content": "<|im_end|>"}}
        settings = {"added_tokens_decoder": decoder, "eos_token": {"content": "<end>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
        assert read(tmp_path, eos_token_id=0).stop_token_ids == (0, 5, 6, 7, 9)

    def test_family_ids_without_a_tokenizer(self, tmp_path):
        spec = read(tmp_path, vocab_size=151936, eos_token_id=...)
        assert spec.stop_token_ids == (151643, 151645)

    def test_outside_the_vocabulary(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"stop token: expected ids below .* got 300"):
            read(tmp_path, eos_token_id=[2, 300])


def test_every_module_of_the_package_that_describes_a_family_is_listed() -> None:
    folder = Path(families.__file__).parent
    stems = {path.stem for path in folder.glob("*.py")}
    stems -= {"__init__", "base", "detection", "listing"}
    assert {family.name for family in FAMILIES} == stems
    ranks = [family.layout.rank for family in FAMILIES if family.layout is not None]
    assert len(set(ranks)) == len(ranks)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_without_a_sampler_fills_masks_as_its_record_says(family: Family) -> None:
    sampler: Any = AutoSampler.get(family.name)
    if family.sampler is not None:
        assert f"{sampler.__module__}:{sampler.__name__}" == family.sampler
        return
    assert issubclass(sampler, MaskFillSampler)
    assert sampler is AutoSampler.get(family.name)
    assert sampler.is_capturable
    assert sampler.family_defaults == family.defaults != {}
    assert sampler.filter_order == family.filter_order
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = mask_fill.unknown
