# SPDX-License-Identifier: Apache-2.0
"""Backends and export configurations as values: what they say, what they refuse, how they are named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from diffulex.errors import ConfigError
from diffulex_edge.backends import BACKENDS, Availability, BackendRegistry, EdgeBackend, backend_of
from diffulex_edge.bundle import read_bundle
from diffulex_edge.errors import ProgramError
from diffulex_edge.exporter import ExportConfig
from diffulex_edge.recipes import parse_recipe
from fixtures.extras import need_extra

need_extra("edge", "executorch", "torchao")


class TestBackends:
    def test_registry(self):
        backend = EdgeBackend("test", "nothing", ("none",))
        BackendRegistry.register(backend)
        try:
            assert BackendRegistry.get("TEST") is backend
            with pytest.raises(ConfigError, match="expected a new name, got 'test'"):
                BackendRegistry.register(backend)
            BackendRegistry.register(backend, replace=True)
            assert "test" in BackendRegistry.list_backends()
        finally:
            del BACKENDS["test"]

    @pytest.mark.parametrize(("name", "part"), [("mps", "coreml"), ("vulkan", "not run")])
    def test_targets_of_other_machines_are_named(self, name, part):
        with pytest.raises(ConfigError, match=f"got '{name}': .*{part}"):
            backend_of(name)

    def test_the_reference_backend_is_the_portable_one(self):
        assert backend_of("Reference") is BACKENDS["portable"]

    @pytest.mark.parametrize("name", sorted(BACKENDS))
    def test_metadata_says_what_it_can_do(self, name):
        backend = backend_of(name)
        found = backend.get_metadata()
        assert json.loads(json.dumps(found)) == found
        assert (found["name"], tuple(found["recipes"])) == (name, backend.recipes)
        assert backend.is_available() == (found["can_export"] or found["can_run"])

    def test_a_backend_loads_its_own_programs(self, bundle):
        path = bundle("shallow-fp16") / "model.pte"
        assert backend_of("xnnpack").load(path, threads=1).constants["dlx_backend"] == "xnnpack"
        with pytest.raises(ProgramError, match="expected one of the backend portable, got xnnpack"):
            backend_of("portable").load(path)
        with pytest.raises(ConfigError, match="expected one that runs here, got qnn"):
            backend_of("qnn").load(path)

    def test_a_backend_exports_for_itself(self, checkpoint, tmp_path):
        config = ExportConfig(str(checkpoint("shallow")), tmp_path / "out", backend="coreml")
        config = replace(config, max_rows=16, max_model_len=32)
        result = backend_of("portable").export(config)
        assert (result.backend, result.self_check.argmax) == ("portable", 1.0)
        assert read_bundle(tmp_path / "out").backend == "portable"

    def test_missing_package(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        state = backend_of("xnnpack").availability()
        assert state == Availability(
            False, False, "needs executorch (pip install '.[edge]' in the source directory)"
        )

    def test_weight_only_recipes_are_for_coreml(self):
        backend_of("coreml").check_recipe(parse_recipe("8w"))
        with pytest.raises(ConfigError, match="expected a float embedding"):
            backend_of("coreml").check_recipe(parse_recipe("8w,emb=8"))


class TestExportConfig:
    def test_json_and_back(self, tmp_path):
        config = ExportConfig(
            "demo", tmp_path / "out", backend="qnn", backend_options={"soc": "SM8650"}
        )
        text = json.dumps(config.to_json())
        assert ExportConfig.from_json(json.loads(text)) == config
        assert ExportConfig.from_json({"model": "demo", "output": "x"}).quant == "none"

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ({"model": "demo"}, "got no output"),
            ({"model": "demo", "output": "x", "quantt": "none"}, "got the unknown quantt"),
            ({"model": "demo", "output": "x", "quant": "int3"}, "quant: expected one of"),
            ({"model": "demo", "output": "x", "max_rows": 1}, "max_rows: expected >= 8"),
            ({"model": "demo", "output": 5}, "output: expected str, got 5"),
            (
                {
                    "model": "demo",
                    "output": "x",
                    "backend": "coreml",
                    "backend_options": {"compute_unit": "ane"},
                },
                "compute_unit: expected one of all, cpu_only, cpu_and_gpu, cpu_and_ne, got 'ane'",
            ),
            (
                {"model": "demo", "output": "x", "max_rows": "16"},
                "max_rows: expected int, got '16'",
            ),
            (
                {"model": "demo", "output": "x", "max_rows": True},
                "max_rows: expected int, got True",
            ),
            ({"model": "demo", "output": "x", "lora": 5}, "lora: expected str or None, got 5"),
            ({"model": "demo", "output": "x", "backend_options": {"soc": 5}}, "backend_options: "),
        ],
    )
    def test_refuses(self, content, text):
        with pytest.raises(ConfigError, match=text):
            ExportConfig.from_json(content)
