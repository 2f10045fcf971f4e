# SPDX-License-Identifier: Apache-2.0
"""The rules between configuration keys, in the order in which they depend on each other."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from diffulex.config.parse import dtype_name
from diffulex.config.table import (
    BLOCK_SIZES,
    CANVAS_PAGE_SIZES,
    CONFIG_TABLE,
    PAGE_SIZES,
    SECTIONS,
    ConfigKey,
    Support,
)
from diffulex.distributed import layout
from diffulex.distributed.legality import check_groups, check_model
from diffulex.errors import ConfigError
from diffulex.families.listing import kept_modules
from diffulex.log import get_logger, warn_once
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan
from diffulex.strategies.listing import STRATEGIES, owner_of

if TYPE_CHECKING:
    from diffulex.config.types import PartialConfig
    from diffulex.quantization.stored import StoredQuantization
    from diffulex.strategies.base import Strategy

__all__ = ["Resolver"]

logger = get_logger(__name__)

# Ops take eight forbidden ids; one is the mask token.
_MAX_SUPPRESSED = 7
# Stands for the mask id of a model without one; nothing is decided by it.
_MASK_FILLER = 4


class Resolver:
    """Applies the rules to a partial configuration."""

    def __init__(self, partial: PartialConfig, strategy: Strategy, sampler: Any) -> None:
        self._partial = partial
        self._strategy, self._traits = strategy, strategy.traits
        self._sampler = sampler

    def sections(self) -> dict[str, Any]:
        """The section objects by name."""
        partial = self._partial
        self._check_unread_keys()
        partial.change(
            "multi_block_prefix_full",
            self._traits.has_prefix_full,
            "the decoding strategy decides",
        )
        self._strategy.resolve(partial)
        self._notice_forced_keys()
        self._check_shape()
        self._resolve_program()
        self._check_adapter()
        self._resolve_device()
        self._check_ranks()
        self._resolve_ids()
        self._resolve_lengths()
        self._resolve_cache()
        self._resolve_invariance()
        self._resolve_sampler()
        sections = {
            section: cls(**{k.name: partial[k.name] for k in _keys_of(section)})
            for section, cls in SECTIONS.items()
        }
        sections["model"] = dataclasses.replace(
            sections["model"],
            model_dir=partial.facts.model_dir,
            spec=partial.facts.spec,
            program=partial.facts.program,
        )
        sections["decoding"] = dataclasses.replace(sections["decoding"], traits=self._traits)
        return sections

    def _check_unread_keys(self) -> None:
        """Explicit keys that nothing reads: a notice where harmless, else an error."""
        partial, strategy = self._partial, self._partial["decoding_strategy"]
        unused: frozenset[str] = getattr(self._sampler, "unused_keys", frozenset())
        ignored: frozenset[str] = getattr(self._sampler, "ignored_keys", frozenset())
        for name, value in partial.explicit.items():
            key = CONFIG_TABLE[name]
            if key.support is Support.IGNORED:
                text = "%s: accepted and ignored (%s), got %r"
                warn_once(logger, f"inert {name}", text, name, key.help, value)
            elif owner_of(name) not in (None, strategy) or name in ignored:
                self._notice_foreign(name, value)
            elif name in unused and value != key.default:
                raise ConfigError(
                    f"{name}: expected it unset under decoding_strategy {strategy} with"
                    f" sampling_mode {partial['sampling_mode']}, which does not read it,"
                    f" got {value!r}"
                )
            elif name in self._strategy.unread_params and value != key.default:
                self._notice_foreign(name, value)

    def _notice_foreign(self, name: str, value: Any) -> None:
        strategy = self._partial["decoding_strategy"]
        text = "%s: without effect under decoding_strategy %s, got %r"
        warn_once(logger, f"foreign {name} {strategy}", text, name, strategy, value)

    def _notice_forced_keys(self) -> None:
        """A warning of every explicit key for which the strategy sets the value."""
        partial, strategy = self._partial, self._partial["decoding_strategy"]
        for name in self._strategy.unread_keys:
            forced = partial[name]
            value = partial.explicit.get(name, forced)
            if value != forced:
                text = "%s: expected %r, which decoding_strategy %s sets, got %r"
                warn_once(logger, f"forced {name} {strategy}", text, name, forced, strategy, value)

    def _check_adapter(self) -> None:
        values = self._partial.values
        if not values["use_lora"]:
            if values["lora_path"] and "use_lora" not in self._partial.explicit:
                raise ConfigError(
                    f"lora_path: expected use_lora with it, got {values['lora_path']!r} alone"
                )
        elif not values["lora_path"]:
            raise ConfigError("lora_path: expected the adapter's directory with use_lora, got ''")
        elif values["load_format"] != "auto":
            got = values["load_format"]
            raise ConfigError(f"load_format: expected auto with use_lora, got {got!r}")

    def _check_shape(self) -> None:
        partial = self._partial
        if self._traits.has_canvas:
            if partial["allow_mask_in_prompt"]:
                raise ConfigError(
                    "allow_mask_in_prompt: expected False under decoding_strategy"
                    f" {partial['decoding_strategy']}, whose canvas has no masks, got True"
                )
            return
        # A checkpoint may be trained with a block size the engine lacks; its use is an error.
        for name, sizes in (("block_size", BLOCK_SIZES), ("page_size", PAGE_SIZES)):
            if partial[name] not in sizes:
                names = " or ".join(n for n, s in STRATEGIES.items() if s.traits.has_canvas)
                also = f" (or {', '.join(map(str, CANVAS_PAGE_SIZES))} under {names})"
                hint = also if partial[name] in CANVAS_PAGE_SIZES and name == "page_size" else ""
                raise ConfigError(
                    f"{name}: expected one of {', '.join(map(str, sizes))}{hint}, got {partial[name]}"
                )

    def _resolve_program(self) -> None:
        """What an exported program decides: it is one sequence on the CPU with its cache inside."""
        partial, program = self._partial, self._partial.facts.program
        if program is None:
            return
        from diffulex_edge.families import check_strategy  # noqa: PLC0415 (exported programs only)

        check_strategy(partial["decoding_strategy"])
        is_dual = self._traits.has_dual_cache
        block = partial["block_size"] * (partial["buffer_size"] if is_dual else 1)
        if block > program.max_rows:
            raise ConfigError(
                f"block_size: expected at most {program.max_rows} rows that see each other, those of"
                f" the exported program (diffulex edge export --max-rows), got {block}"
            )
        length = min(partial["max_model_len"], program.max_model_len)
        if is_dual and -(-length // block) * block > program.cache_rows:
            raise ConfigError(
                f"block_size: expected whole blocks in the {program.cache_rows} cache rows of the"
                f" exported program, got blocks of {block} for max_model_len {length}"
            )
        for name, value, reason in (
            ("load_format", "pte", "the directory holds an exported program and no weights"),
            ("max_num_reqs", 1, "an exported program holds one sequence"),
            ("device", "cpu", "an exported program runs on the CPU"),
            ("dtype", program.dtype, "dtype of the exported program"),
            ("enable_prefix_caching", False, "an exported program keeps its own cache"),
            ("max_model_len", length, "length of the exported program"),
            ("run_ahead", "off", "an exported program is called by the host"),
        ):
            partial.change(name, value, reason)

    def _resolve_device(self) -> None:
        values = self._partial.values
        if values["attn_impl"] in ("triton", "triton_grouped"):
            self._partial.change("attn_impl", "auto", "name of an older kernel family")
        self._pick_device()
        is_cuda = values["device"].startswith("cuda")
        if values["attn_impl"] not in ("auto", "cuda" if is_cuda else "cpu"):
            raise ConfigError(
                f"attn_impl: expected auto or the device of the model ({values['device']}),"
                f" got {values['attn_impl']!r}"
            )
        if values["dtype"] == "auto":
            values["dtype"] = dtype_name(self._partial.facts.spec.dtype) if is_cuda else "float32"
        self._check_quantization(is_cuda)

    def _check_ranks(self) -> None:
        """What several ranks cannot do."""
        partial = self._partial
        sizes = layout.Sizes.of(partial.values)._replace(data=1)
        if sizes.world == 1:
            return
        if partial.facts.program is not None:
            raise ConfigError(
                f"{sizes.limiting_key}: expected 1 for an exported program, got {sizes.world}"
            )
        scheme = partial["quantization"]
        # Groups of stored codes are those of the files, and looked at with them.
        stored = partial.facts.stored
        if scheme in SCHEMES and not (scheme == "int4" and stored is not None):
            ignore = partial["quantization_ignore"]
            plan = QuantizationPlan(scheme, partial["quantization_group_size"], ignore)
            alone = stored is not None and stored.has_experts_alone
            mode = partial["moe_parallel_mode"]
            check_groups(partial.facts.spec, sizes, mode, plan, of_experts_alone=alone)

    def _check_quantization(self, is_cuda: bool) -> None:
        values, facts = self._partial.values, self._partial.facts
        # A program has the values that its checkpoint stood for.
        stored = facts.stored if facts.program is None else None
        if stored is not None:
            self._check_stored(stored)
        scheme = values["quantization"]
        self._check_choices(None if stored is not None else scheme)
        if stored is None and not self._partial.is_given("quantization_ignore"):
            family = facts.spec.family
            kept, reason = kept_modules(family, scheme), f"what {scheme} does not suit in {family}"
            self._partial.change("quantization_ignore", kept, reason)
        if scheme in ("auto", "none"):
            return
        if is_cuda and values["dtype"] == "float32":
            raise ConfigError(
                f"dtype: expected bfloat16 or float16 with weights in low precision on"
                f" {values['device']}, got float32"
            )
        if facts.program is not None:
            raise ConfigError(
                f"quantization: expected auto or none with an exported program, got {scheme!r}"
            )

    def _check_stored(self, stored: StoredQuantization) -> None:
        """What goes with a checkpoint in low precision; `auto` becomes its scheme."""
        values = self._partial.values
        if values["quantization"] not in ("auto", "none", stored.scheme):
            raise ConfigError(
                f"quantization: expected auto, none or {stored.scheme}, the scheme of the checkpoint,"
                f" got {values['quantization']!r}"
            )
        if values["use_lora"] and values["pre_merge_lora"]:
            raise ConfigError(
                "pre_merge_lora: expected False with a quantised checkpoint, got True"
            )
        if values["quantization"] == "auto":
            self._partial.change("quantization", stored.scheme, f"as {stored.where} says")

    def _check_choices(self, scheme: str | None) -> None:
        """Keys that only quantising while loading reads; `scheme` None: the weights are stored so."""
        for name in ("quantization_group_size", "quantization_ignore", "quantize_head"):
            value, default = self._partial[name], CONFIG_TABLE[name].default
            if value == default:
                continue
            of_group = name == "quantization_group_size"
            if scheme is None:
                raise ConfigError(
                    f"{name}: expected {default!r} with a quantised checkpoint, got {value!r}"
                )
            if scheme in ("auto", "none") or (of_group and scheme != "int4"):
                legal = "int4" if of_group else ", ".join(SCHEMES)
                raise ConfigError(
                    f"{name}: expected {default!r} unless quantization is one of {legal}, got"
                    f" {value!r} with {scheme!r}"
                )

    def _pick_device(self) -> None:
        values = self._partial.values
        num_devices = self._partial.facts.num_devices
        wanted = values["device"]
        if wanted == "auto":
            wanted = "cuda" if num_devices else "cpu"
        sizes = layout.Sizes.of(values)
        check_model(self._partial.facts.spec, sizes, values["moe_parallel_mode"])
        self._check_coupled(sizes, wanted)
        is_of_cluster = values["distributed_executor"] == "ray"
        if is_of_cluster:
            self._check_cluster()
            if not num_devices:  # nothing of the engine is in this process
                wanted = "cpu"
        if sizes.world > 1:
            layout.check_device_name(values["device"], sizes)
        if wanted == "cpu":
            self._pick_cpu(sizes)
            return
        if num_devices and sizes.world > 1 and not is_of_cluster:
            listed, start = values["device_ids"], values["device_start"]
            layout.rank_devices(sizes, listed, start, num_devices)
        used = values["device_ids"][: sizes.world]
        self._partial.change("device_ids", used, "each rank has one device, the rest is not used")
        listed = values["device_ids"]
        index = listed[0] if listed else values["device_start"]
        if ":" in wanted:
            given = int(wanted.partition(":")[2])
            is_listed = (
                "device_ids" in self._partial.explicit or "device_start" in self._partial.explicit
            )
            if is_listed and given != index:
                raise ConfigError(f"device: expected cuda:{index} as listed, got {wanted!r}")
            index = given
        if num_devices == 0:
            raise ConfigError(f"device: no CUDA device is visible, got {values['device']!r}")
        if index >= num_devices:
            raise ConfigError(
                f"device: expected a CUDA device below {num_devices} (the number of visible"
                f" devices), got cuda:{index}"
            )
        values["device"] = f"cuda:{index}"

    def _pick_cpu(self, sizes: layout.Sizes) -> None:
        values = self._partial.values
        if values["device_ids"]:
            raise ConfigError(
                f"device_ids: expected an empty list on cpu, got {list(values['device_ids'])}"
            )
        if max(sizes.tensor, sizes.expert) > 1 and values["custom_all_reduce"] == "on":
            raise ConfigError(
                "custom_all_reduce: expected auto or off on cpu, where ranks have no peer access,"
                " got on"
            )
        values["device"] = "cpu"
        if sizes.world > 1 and values["distributed_backend"] == "nccl":
            self._partial.change("distributed_backend", "gloo", "the ranks are on the CPU")

    def _check_coupled(self, sizes: layout.Sizes, device: str) -> None:
        """What replicas that share the experts cannot do, and how rows reach these."""
        values, name = self._partial.values, "moe_dispatcher_backend"
        backend = values[name]
        if backend == "deepep":
            raise ConfigError(
                f"{name}: deepep is not supported: expert groups of at most 8 ranks of one host use"
                " allgather"
            )
        layout.check_port(values["master_port"], sizes)
        if not sizes.is_coupled:
            if backend != "standard":
                raise ConfigError(
                    f"{name}: expected standard unless replicas share the experts"
                    f" (expert_parallel_size), got {backend}"
                )
            return
        for key, expected, is_refused in (
            ("distributed_executor", "mp", values["distributed_executor"] == "ray"),
            ("run_ahead", "auto or off", values["run_ahead"] == "on"),
        ):
            if is_refused:
                raise ConfigError(
                    f"{key}: expected {expected} with experts over data-parallel shards, got"
                    f" {values[key]!r}"
                )
        reason = "replicas share the experts"
        if backend == "standard":
            self._partial.change(name, "allgather", reason)
        self._partial.change("run_ahead", "off", reason)
        if device != "cpu":
            self._partial.change(
                "enforce_eager", True, f"{reason}, whose rows change with each step"
            )

    def _check_cluster(self) -> None:
        """The cluster chooses the devices."""
        values, given = self._partial.values, ", with distributed_executor ray, which chooses them"
        for name, expected, is_refused in (
            ("device_ids", "an empty list", bool(values["device_ids"])),
            ("device_start", "0", values["device_start"] != 0),
            ("device", "auto, cpu or cuda", ":" in values["device"]),
        ):
            if is_refused:
                value = values[name]
                shown = list(value) if isinstance(value, tuple) else value
                raise ConfigError(f"{name}: expected {expected}{given}, got {shown!r}")

    def _resolve_ids(self) -> None:
        values, facts, spec = self._partial.values, self._partial.facts, self._partial.facts.spec
        # The checkpoint reader has resolved its own sources; an explicit value went into it.
        if values["mask_token_id"] is None:
            values["mask_token_id"] = spec.mask_token_id
        explicit_stops = [i for i in values["eos"] or () if i >= 0]
        values["eos"] = tuple(dict.fromkeys([*explicit_stops, *spec.stop_token_ids]))
        if self._traits.has_canvas:
            # Nothing is decided by it, but it must not end a request.
            candidates = itertools.chain((_MASK_FILLER,), range(spec.vocab_size))
            values["mask_token_id"] = next(i for i in candidates if i not in values["eos"])
        if values["mask_token_id"] is None:
            raise ConfigError(
                f"mask_token_id: expected it in the files of {facts.model_dir}, got none;"
                " pass mask_token_id"
            )
        mask = values["mask_token_id"]
        if not 0 <= mask < spec.vocab_size:
            raise ConfigError(f"mask_token_id: expected [0, {spec.vocab_size}), got {mask}")
        for stop in values["eos"]:
            if stop >= spec.vocab_size or stop == mask:
                raise ConfigError(
                    f"eos: expected ids below {spec.vocab_size} other than the mask id {mask},"
                    f" got {stop}"
                )
        if values["tokenizer_vocab_size"] is None:
            size = facts.tokenizer_vocab_size or spec.vocab_size
            values["tokenizer_vocab_size"] = min(size, spec.vocab_size)
        elif values["tokenizer_vocab_size"] > spec.vocab_size:
            self._partial.change("tokenizer_vocab_size", spec.vocab_size, "rows of the LM head")

    def _resolve_lengths(self) -> None:
        partial = self._partial
        limit = partial.facts.spec.max_positions
        if partial["max_model_len"] > limit:
            partial.change("max_model_len", limit, "positions of the model")
        block, rows = partial["block_size"], partial["block_size"] * partial["buffer_size"]
        if self._traits.has_dual_cache:
            block = rows
        need = -(-partial["max_model_len"] // block) * block + block
        rule = "a whole prompt of max_model_len plus one block"
        if partial["enable_chunked_prefill"]:
            need, rule = rows, "the rows of one decoding request"
        need = max(need, rows)
        budget = partial["max_num_batched_tokens"]
        if budget < need:
            if partial.is_given("max_num_batched_tokens"):
                raise ConfigError(
                    f"max_num_batched_tokens: expected >= {need} ({rule}), got {budget}"
                )
            partial.change("max_num_batched_tokens", need, rule)
        budget, mixed = partial["max_num_batched_tokens"], partial["mixed_step_rows"]
        if mixed > budget:
            raise ConfigError(
                f"mixed_step_rows: expected at most max_num_batched_tokens {budget}, got {mixed}"
            )

    def _resolve_cache(self) -> None:
        partial = self._partial
        block, page = partial["block_size"], partial["page_size"]
        if page % block and block % page and not self._traits.has_canvas:
            raise ConfigError(
                f"page_size: expected a multiple or divisor of block_size {block}, got {page}"
            )
        head_dim, split = partial.facts.spec.head_dim, partial["k_cache_hdim_split_factor_x"]
        if partial["kv_cache_layout"] == "distinct" and head_dim % split:
            raise ConfigError(
                f"k_cache_hdim_split_factor_x: expected a divisor of head size {head_dim},"
                f" got {split}"
            )
        is_cuda = partial["device"].startswith("cuda")
        self._check_kv_dtype()
        if partial["skip_warmup"] and is_cuda and partial["num_pages"] == -1:
            raise ConfigError("skip_warmup: expected num_pages to be given, got num_pages -1")

    def _check_kv_dtype(self) -> None:
        """Where a cache cannot hold codes."""
        partial = self._partial
        if partial["kv_cache_dtype"] == "auto":
            return
        for is_refused, where in (
            (partial.facts.program is not None, "with an exported program"),
            (partial["kv_cache_layout"] == "distinct", "with kv_cache_layout distinct"),
        ):
            if is_refused:
                got = partial["kv_cache_dtype"]
                raise ConfigError(f"kv_cache_dtype: expected auto {where}, got {got}")

    def _resolve_invariance(self) -> None:
        """What would let other requests, or when they came, into the sums of a request."""
        partial = self._partial
        if not partial["batch_invariant"]:
            return
        if not partial.is_given("enable_prefix_caching"):
            reason = "cached and fresh keys are added up in another order (batch_invariant)"
            partial.change("enable_prefix_caching", False, reason)
        for name in ("enable_prefix_caching", "enable_chunked_prefill"):
            if partial[name]:
                raise ConfigError(f"{name}: expected False with batch_invariant, got True")
        if partial["use_lora"] and not partial["pre_merge_lora"]:
            raise ConfigError("pre_merge_lora: expected True with batch_invariant, got False")
        is_rounding = self._traits.feeds_back or self._traits.has_dual_cache
        if partial["run_ahead"] == "on" and is_rounding:
            raise ConfigError(
                "run_ahead: expected auto or off with batch_invariant under decoding_strategy"
                f" {partial['decoding_strategy']}, got 'on'"
            )

    def _resolve_sampler(self) -> None:
        partial, values = self._partial, self._partial.values
        if values["confidence_type"] == "default":
            values["confidence_type"] = "max_prob"
        vocab_size = partial.facts.spec.vocab_size
        for name in ("suppress_token_ids", "demote_token_ids"):
            for token in values[name]:
                if token >= vocab_size:
                    raise ConfigError(f"{name}: expected ids below {vocab_size}, got {token}")
        suppressed = len(set(values["suppress_token_ids"]))
        if suppressed > _MAX_SUPPRESSED:
            raise ConfigError(
                f"suppress_token_ids: expected at most {_MAX_SUPPRESSED} ids, got {suppressed}"
            )
        steps = values["denoising_steps"]
        if steps is not None and steps > values["block_size"]:
            raise ConfigError(
                f"denoising_steps: expected [1, block_size {values['block_size']}], got {steps}"
            )
        # Some families accept by threshold only when one is given.
        with_threshold = getattr(self._sampler, "rule_with_threshold", None)
        if (
            with_threshold is not None
            and partial.is_given("accept_threshold")
            and not partial.is_given("acceptance_rule")
        ):
            partial.change("acceptance_rule", with_threshold, "an accept_threshold was given")
        for name, default in (("acceptance_rule", "threshold"), ("confidence_space", "processed")):
            if values[name] is None:
                values[name] = default
        if values["temperature"] is None:
            values["temperature"] = 0.0


def _keys_of(section: str) -> list[ConfigKey]:
    return [key for key in CONFIG_TABLE.values() if key.section == section]
