# SPDX-License-Identifier: Apache-2.0
"""The one module that uses names of diffusers which its versions may change.

Nothing here is imported before an image model is loaded.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.errors import ConfigError
from diffulex.omni.errors import ModelLoadError, UnsupportedFeatureError
from diffulex.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "SUPPORTED_DIFFUSERS",
    "BlockLayout",
    "active_attention",
    "block_layout",
    "capturable_text_length",
    "check_installation",
    "context_name",
    "forget_child_hooks",
    "import_diffusers",
    "make_context_state",
    "model_hook",
    "register_hook",
    "remove_hook",
    "set_handle",
]

SUPPORTED_DIFFUSERS = "0.42.1"
_INSTALL = "pip install '.[omni]' in the source directory"
_QWEN = "diffusers.models.transformers.transformer_qwenimage"
_TEXT_LENGTH = "compute_text_seq_len_from_mask"


def import_diffusers() -> Any:
    """The module, with its bars and warnings turned off.

    Raises:
        ConfigError: diffusers or accelerate is missing, or diffusers has another version.
    """
    for package in ("diffusers", "accelerate"):
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ConfigError(
                f"omni: expected the package {package} ({_INSTALL}), got none"
            ) from None
        if package == "diffusers" and found != SUPPORTED_DIFFUSERS:
            raise ConfigError(
                f"omni: expected diffusers {SUPPORTED_DIFFUSERS} ({_INSTALL}), got {found}"
            )
    import accelerate  # noqa: F401, PLC0415 (diffusers does without it, but cannot load Wan)
    import diffusers  # noqa: PLC0415

    for package in ("diffusers", "transformers"):
        library = importlib.import_module(f"{package}.utils.logging")
        library.set_verbosity_error()
        library.disable_progress_bar()
    # Pipelines import it, and it what is installed of torchao, whose libraries report on each other.
    with quiet():
        importlib.import_module("diffusers.quantizers")
    return diffusers


def check_installation() -> str:
    """Whether image pipelines can run here, in words; imports diffusers.

    Raises:
        ModelLoadError, AttributeError, ImportError: the installed diffusers is not what it says.
    """
    try:
        import_diffusers()
    except ConfigError as error:
        return str(error)
    hooks = importlib.import_module("diffusers.hooks.hooks")
    helpers = importlib.import_module("diffusers.hooks._helpers")
    attention = importlib.import_module("diffusers.models.attention_dispatch")
    for module, names in (
        (hooks, ("ModelHook", "HookRegistry", "StateManager", "BaseState")),
        (helpers, ("TransformerBlockRegistry",)),
        (attention, ("_AttentionBackendRegistry", "dispatch_attention_fn")),
    ):
        for name in names:
            getattr(module, name)
    with capturable_text_length():
        pass
    return f"works with diffusers {SUPPORTED_DIFFUSERS}"


def model_hook() -> Any:
    """The base class of hooks on modules."""
    return importlib.import_module("diffusers.hooks.hooks").ModelHook


def register_hook(module: Any, hook: Any, name: str, *, below: str | None = None) -> None:
    """Puts a hook around the forward of a module, outside of its hooks so far.

    Args:
        module: of the pipeline.
        hook: for it.
        name: of the hook.
        below: how names of hooks begin that stay outside of it.
    """
    hooks = importlib.import_module("diffusers.hooks.hooks")
    registry = hooks.HookRegistry.check_if_exists_or_initialize(module)
    above = [item for item in registry.hooks if below is not None and item.startswith(below)]
    lifted = {item: registry.hooks[item] for item in above}
    for item in reversed(above):
        registry.remove_hook(item, recurse=False)
    registry.register_hook(hook, name)
    for item, other in lifted.items():
        registry.register_hook(other, item)
    # Its parents keep lists of the registries below them.
    registry.invalidate_child_registries_cache()


def remove_hook(module: Any, name: str) -> None:
    """Takes a hook of the module away, if it is there."""
    hooks = importlib.import_module("diffusers.hooks.hooks")
    hooks.HookRegistry.check_if_exists_or_initialize(module).remove_hook(name, recurse=False)


def forget_child_hooks(module: Any) -> None:
    """Makes a model look again for the hooks of its parts, which get the name of the running branch."""
    hooks = importlib.import_module("diffusers.hooks.hooks")
    hooks.HookRegistry.check_if_exists_or_initialize(module).invalidate_child_registries_cache()


class BlockLayout(NamedTuple):
    """Where the streams are among the arguments and outputs of a block.

    Attributes:
        parameters: names of its arguments.
        image, text: names of the streams; the text is an argument of blocks that do not change it, too.
        image_index, text_index: of a tuple of outputs; without a text index the output is the image.
    """

    parameters: tuple[str, ...]
    image: str
    text: str
    image_index: int
    text_index: int | None

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        return {**dict(zip(self.parameters, args)), **kwargs}

    def read(self, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        """Image and text before the block."""
        text = None if self.text_index is None else arguments.get(self.text)
        return arguments[self.image], text

    def split(self, output: Any) -> tuple[Any, Any]:
        """Image and text after the block."""
        if not isinstance(output, tuple):
            return output, None
        text = None if self.text_index is None else output[self.text_index]
        return output[self.image_index], text

    def write(self, image: Any, text: Any) -> Any:
        """What a block with these outputs would return."""
        if self.text_index is None:
            return image
        return (image, text) if self.image_index < self.text_index else (text, image)


#: Blocks whose stream has another name than diffusers says.
_IMAGE_NAMES = {"ZImageTransformerBlock": "x"}


def block_layout(block: Any) -> BlockLayout:
    """What diffusers knows of the class of a block.

    Raises:
        UnsupportedFeatureError: nothing.
    """
    registry = importlib.import_module("diffusers.hooks._helpers").TransformerBlockRegistry
    cls = type(block)
    try:
        known = registry.get(cls)
    except ValueError:
        raise UnsupportedFeatureError(
            f"cache_backend: expected blocks that diffusers describes, got {cls.__name__}"
        ) from None
    return BlockLayout(
        tuple(inspect.signature(cls.forward).parameters)[1:],
        _IMAGE_NAMES.get(cls.__name__, known.hidden_states_argument_name),
        known.encoder_hidden_states_argument_name,
        known.return_hidden_states_index,
        known.return_encoder_hidden_states_index,
    )


@contextlib.contextmanager
def active_attention(attend: Callable[..., Any] | None) -> Iterator[None]:
    """Makes `attend` the attention of this process; None: what it is by default.

    It is called as `attend(query, key, value, mask, is_causal, scale, enable_gqa, handle)` with
    tensors [B, S, H, D]; the handle is what `set_handle` has given to the processor, where the
    attention is over the tokens of the transformer.
    """
    if attend is None:
        yield
        return
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    registry = dispatch._AttentionBackendRegistry

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        del dropout_p  # zero in evaluation
        return attend(query, key, value, attn_mask, is_causal, scale, enable_gqa, _parallel_config)

    before = registry._active_backend
    registry.register(_AttentionName.DIFFULEX)(attention)
    registry.set_active_backend(_AttentionName.DIFFULEX)
    try:
        yield
    finally:
        registry.set_active_backend(before)


class _AttentionName(str, enum.Enum):
    DIFFULEX = "_diffulex"


def set_handle(transformer: Any, handle: Any) -> int:
    """Gives a handle to the processors of a transformer whose attention can be replaced; how many.

    They pass it where the attention is over the tokens of the transformer.
    """
    processors: list[Any] = [getattr(module, "processor", None) for module in transformer.modules()]
    found = [item for item in processors if hasattr(item, "_parallel_config")]
    for processor in found:
        processor._parallel_config = handle
    return len(found)


def make_context_state() -> Any:
    """An attribute of a stateful hook by which diffusers tells it the name of the running branch."""
    hooks = importlib.import_module("diffusers.hooks.hooks")
    return hooks.StateManager(hooks.BaseState)


def context_name(state: Any) -> str:
    """The name of the branch; `default` where the pipeline gives none."""
    context = state._context
    return "default" if context is None else str(context.name)


def _text_length(states: Any, mask: Any) -> tuple[int, Any, Any]:
    """As the function of diffusers, but without a scalar that is copied from the host."""
    import torch  # noqa: PLC0415 (slow; only training, compiled blocks and capture need it)

    length = states.shape[1]
    if mask is None:
        return length, None, None
    mask = mask.to(torch.bool)
    last = (torch.arange(1, length + 1, device=states.device) * mask).max(dim=1).values
    return length, last + (last == 0) * length, mask


@contextlib.contextmanager
def capturable_text_length() -> Iterator[None]:
    """Lets CUDA graphs capture the Qwen-Image transformer; also on while its blocks are compiled.

    diffusers copies a scalar from pageable host memory in every forward, which no capture allows.

    Raises:
        ModelLoadError: the replacement answers differently from the installed diffusers.
    """
    import torch  # noqa: PLC0415

    module = importlib.import_module(_QWEN)
    original = getattr(module, _TEXT_LENGTH)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    states = torch.zeros(2, 4, 1)
    wanted, got = original(states, mask), _text_length(states, mask)
    if wanted[0] != got[0] or not all(torch.equal(a, b) for a, b in zip(wanted[1:], got[1:])):
        raise ModelLoadError(f"{_QWEN}: expected {_TEXT_LENGTH} to give {got}, got {wanted}")
    setattr(module, _TEXT_LENGTH, _text_length)
    try:
        yield
    finally:
        setattr(module, _TEXT_LENGTH, original)
