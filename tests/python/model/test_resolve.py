# SPDX-License-Identifier: Apache-2.0
"""The ``model`` option: bundled model, directories, hub ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffulex.checkpoint.resolve import demo_dir, resolve_model
from diffulex.errors import CheckpointError, ConfigError
from fixtures.checkpoints import CheckpointBuilder


def test_directory(tmp_path):
    CheckpointBuilder(tokenizer=None).write(tmp_path / "model")
    assert resolve_model(str(tmp_path / "model")) == tmp_path / "model"


def test_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    CheckpointBuilder(tokenizer=None).write(tmp_path / "model")
    assert resolve_model("~/model") == tmp_path / "model"


def test_demo_is_the_bundled_one_whatever_lies_nearby(tmp_path, monkeypatch):
    if not (demo_dir() / "config.json").is_file():
        pytest.skip("the bundled model is not in this tree")
    CheckpointBuilder(tokenizer=None).write(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("demo") == demo_dir()
    assert resolve_model("./demo") == Path("demo")


def test_directory_without_configuration(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected a config\.json"):
        resolve_model(str(tmp_path))


def test_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(CheckpointError, match="expected a directory, got the file"):
        resolve_model(str(path))


@pytest.mark.parametrize("name", ["nosuch", "/no/such/dir", "./no/such", "a/b/c", "~/nosuch", ""])
def test_unknown_name(name):
    with pytest.raises(CheckpointError, match="expected 'demo', a directory or a hub id"):
        resolve_model(name)


class TestHub:
    @pytest.fixture
    def hub(self, tmp_path, monkeypatch) -> Path:
        """An empty hub cache without network; returns the cache folder of org/tiny."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return tmp_path / "hub" / "models--org--tiny"

    def snapshot(self, hub: Path) -> Path:
        commit = "0123456789abcdef0123456789abcdef01234567"
        (hub / "refs").mkdir(parents=True)
        (hub / "refs" / "main").write_text(commit)
        return hub / "snapshots" / commit

    def test_cached_snapshot(self, hub):
        snapshot = self.snapshot(hub)
        CheckpointBuilder(num_shards=2, tokenizer=None).write(snapshot)
        assert resolve_model("org/tiny").samefile(snapshot)

    def test_not_cached_and_no_network(self, hub):
        with pytest.raises(
            CheckpointError, match="'org/tiny' is no directory and cannot be fetched"
        ):
            resolve_model("org/tiny")

    def test_snapshot_of_the_configuration_only_is_not_enough(self, hub):
        snapshot = self.snapshot(hub)
        CheckpointBuilder(tokenizer=None).write(snapshot)
        (snapshot / "model.safetensors").unlink()
        with pytest.raises(CheckpointError):
            resolve_model("org/tiny")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("GatedRepoError", r"accept its terms on https://huggingface.co/org/name.*HF_TOKEN"),
        ("RevisionNotFoundError", "it has no revision 'v2'"),
        ("RepositoryNotFoundError", "check its name; a private one needs"),
        ("LocalEntryNotFoundError", "no network, or HF_HUB_OFFLINE is set"),
    ],
)
def test_answers_of_the_hub_come_with_advice(monkeypatch, name, advice):
    kind = type(name, (Exception,), {})
    seen = []

    def snapshot_download(model, **options):
        seen.append((model, options["revision"]))
        raise kind("403 Client Error\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=rf"403 Client Error \(.*{advice}"):
        resolve_model("org/name", "v2")
    assert seen == [("org/name", "v2")] * 2


def test_directories_have_no_revisions(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for model in (tmp_path, "demo"):
        with pytest.raises(ConfigError, match="revision: expected a hub id with it, got 'v2' for"):
            resolve_model(model, "v2")
