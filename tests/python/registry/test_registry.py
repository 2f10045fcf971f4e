# SPDX-License-Identifier: Apache-2.0
"""The registry class and the built-in tables."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from diffulex import registry as registry_module
from diffulex.checkpoint.auto_model import spec_reader
from diffulex.errors import ConfigError
from diffulex.registry import (
    AutoKVCacheManager,
    AutoModelForDiffusionLM,
    AutoModelRunner,
    AutoReq,
    AutoSampler,
    AutoScheduler,
    Registry,
)

ALL = (
    AutoReq,
    AutoScheduler,
    AutoKVCacheManager,
    AutoModelRunner,
    AutoModelForDiffusionLM,
    AutoSampler,
)


def make(built_in: dict[str, str] | None = None, **options: Any) -> Registry[Any]:
    return Registry("AutoThing", built_in or {}, lambda config: config.name, **options)


def test_register_as_call_and_decorator_returns_the_object() -> None:
    things = make()

    def one() -> int:
        return 1

    assert things.register("one", one) is one

    @things.register("two", aliases=("zwei",))
    def two() -> int:
        return 2

    assert two() == 2
    assert things.get("zwei") is two
    assert things.create("one") == 1
    assert things.available() == ("one", "two", "zwei")
    assert things.canonical("zwei") == "two"


def test_duplicate_is_an_error_unless_same_or_allowed() -> None:
    things = make({"lazy": "json:loads"})
    first, second = object(), object()
    things.register("a", first)
    things.register("a", first)
    with pytest.raises(ValueError, match="AutoThing: expected a new name, got 'a'"):
        things.register("a", second)
    assert things.get("a") is first
    things.register("a", second, exist_ok=True)
    assert things.get("a") is second
    with pytest.raises(ValueError, match="got 'lazy'"):
        things.register("lazy", second)
    with pytest.raises(ValueError, match="got 'a'"):
        things.register("b", first, aliases=("a",))
    assert "b" not in things.available()


def test_registration_before_first_use_keeps_the_built_ins() -> None:
    things = make({"lazy": "json:loads"})
    things.register("mine", 3)
    assert things.available() == ("lazy", "mine")
    import json

    assert things.get("lazy") is json.loads


def test_listing_imports_nothing_and_a_broken_entry_hides_no_other() -> None:
    things = make(
        {"broken": "diffulex.no_such_module:x", "gone": "json:nothing", "ok": "json:dumps"}
    )
    assert things.available() == ("broken", "gone", "ok")
    assert things.get("ok")
    for name in ("broken", "gone"):
        with pytest.raises(ImportError, match=f"AutoThing: entry '{name}' cannot be imported"):
            things.get(name)


def test_unknown_name_lists_the_available_ones() -> None:
    things = make({"b": "json:dumps", "a": "json:loads"})
    with pytest.raises(ValueError, match="AutoThing: expected one of a, b, got 'c'"):
        things.get("c")
    with pytest.raises(ValueError, match="got 'c'"):
        things.unregister("c")
    with pytest.raises(ValueError, match="there is no default"):
        things.get()


def test_unregister_and_default() -> None:
    things = make()
    things.register("a", 1, aliases=("x",), is_default=True)
    assert things.get() == 1
    things.unregister("x")
    assert things.available() == ("a",)
    things.register("a", 1, aliases=("y",), exist_ok=True)
    things.unregister("a")
    assert things.available() == ()
    with pytest.raises(ValueError, match="no default"):
        things.get(None)


def test_from_config_uses_the_key() -> None:
    things = make()
    things.register("n", lambda config: config.name + "!")

    class Named:
        name = "n"

    assert things.from_config(Named()) == "n!"  # type: ignore[arg-type]


def test_entry_points_are_listed_and_loaded_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = [
        EntryPoint("AutoThing.plug.v2", "json:dumps", "diffulex.plugins"),
        EntryPoint("AutoThing.bad", "diffulex.no_such_module:x", "diffulex.plugins"),
        EntryPoint("AutoOther.plug", "json:loads", "diffulex.plugins"),
    ]
    monkeypatch.setattr(registry_module, "entry_points", lambda group: points)
    import json

    things = make({"ok": "json:loads"})
    assert things.available() == ("bad", "ok", "plug.v2")
    assert things.get("plug.v2") is json.dumps
    with pytest.raises(ImportError, match="entry 'bad'"):
        things.get("bad")
    things.unregister("plug.v2")
    assert things.available() == ("bad", "ok")


def test_built_in_tables() -> None:
    for strategies in (AutoReq, AutoScheduler, AutoKVCacheManager, AutoModelRunner):
        assert "multi_bd" in strategies.available()
        assert strategies.canonical("multi_block_diffusion") == "multi_bd"
    assert "sdar" in AutoModelForDiffusionLM.available()
    assert AutoModelForDiffusionLM.canonical("SDARForCausalLM") == "sdar"
    assert "sdar" in AutoSampler.available()
    assert [item.name for item in ALL] == [
        "AutoReq",
        "AutoScheduler",
        "AutoKVCacheManager",
        "AutoModelRunner",
        "AutoModelForDiffusionLM",
        "AutoSampler",
    ]


def test_built_in_entries_resolve() -> None:
    for item in ALL:
        for name in ("multi_bd", "sdar"):
            if name in item.available():
                assert callable(item.get(name))


def test_core_and_python_list_the_same_strategies() -> None:
    import diffulex_ext

    own = {AutoScheduler.canonical(name) for name in AutoScheduler._lazy}
    assert own == set(diffulex_ext.strategy_names())


def test_a_model_class_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForDiffusionLM, "get", lambda name: int)
    with pytest.raises(ConfigError, match="expected a class with read_spec for 'mine', got int"):
        spec_reader("mine")
