# SPDX-License-Identifier: Apache-2.0
"""The image engine as a program uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.omni.config import OmniDiffusionConfig
from diffulex.omni.diffusion_engine import DiffusionEngine
from diffulex.omni.errors import RequestError
from diffulex.omni.pictures import read_picture
from diffulex.omni.request import make_request

if TYPE_CHECKING:
    from types import TracebackType

    from diffulex.omni.outputs import OmniRequestOutput
    from diffulex.omni.request import OmniDiffusionRequest
    from diffulex.omni.worker import OnStep

__all__ = ["Omni", "OmniDiffusion"]


class OmniDiffusion:
    """Draws images and videos; one call at a time.

    Args:
        od_config: a finished configuration, or its keyword arguments as a mapping.
        kwargs: keyword arguments, see docs/omni_configuration.md.

    Raises:
        ConfigError: unknown key, unsupported value, or the extra `omni` is not installed.
        ModelLoadError: the model cannot be loaded.
    """

    def __init__(
        self, od_config: OmniDiffusionConfig | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if isinstance(od_config, OmniDiffusionConfig):
            if kwargs:
                names = ", ".join(kwargs)
                raise ConfigError(f"od_config: expected no keywords beside it, got {names}")
            config = od_config
        else:
            config = OmniDiffusionConfig.from_kwargs(**{**(od_config or {}), **kwargs})
        self.config = config
        self.engine = DiffusionEngine(config)

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        on_step: OnStep | None = None,
        **kwargs: Any,
    ) -> list[OmniRequestOutput]:
        """Draws the images of one prompt or of several; one result per prompt, in order.

        Args:
            prompt: a text or a list of texts; None with `prompt_embeds`.
            on_step: called after every denoising step; returning False stops all of it.
            kwargs: fields of `OmniDiffusionRequest`, for every prompt. `negative_prompt` may be a
                list as long as the prompts; `image_path`, a file or a list of them, stands for
                `pil_image`.

        Raises:
            RequestError: a prompt or a field is not legal for this model.
            RequestAborted: the callback returned False.
        """
        if prompt is None or isinstance(prompt, str):
            prompts: list[Any] = [prompt]
        elif isinstance(prompt, Sequence):
            prompts = list(prompt)
        else:
            raise RequestError(f"prompt: expected a text or a list of texts, got {prompt!r}")
        if "request_id" in kwargs and len(prompts) != 1:
            raise RequestError("request_id: expected one prompt with it, got several")
        if "image_path" in kwargs:
            if kwargs.get("pil_image") is not None:
                raise RequestError("image_path: expected no pil_image beside it, got both")
            kwargs["pil_image"] = self.read_pictures(kwargs.pop("image_path"))
        negatives = kwargs.pop("negative_prompt", None)
        if not isinstance(negatives, (list, tuple)):
            negatives = [negatives] * len(prompts)
        if len(negatives) != len(prompts):
            raise RequestError(
                f"negative_prompt: expected {len(prompts)} texts, got {len(negatives)}"
            )
        requests = [
            make_request(text, {**kwargs, "negative_prompt": negative})
            for text, negative in zip(prompts, negatives)
        ]
        return self.generate_requests(requests, on_step=on_step)

    def read_pictures(self, paths: str | Path | Sequence[str | Path]) -> list[Any]:
        """Files as `pil_image` of a request.

        Raises:
            RequestError: one of them is no picture, or is larger than `max_pixels`.
        """
        given = [paths] if isinstance(paths, (str, Path)) else paths
        most = self.config.engine.max_pixels
        takes = self.engine.spec.image_input
        mode = "RGB" if takes is None else takes.mode
        return [read_picture(path, f"image {path}", most, mode) for path in given]

    def generate_requests(
        self, requests: Sequence[OmniDiffusionRequest], *, on_step: OnStep | None = None
    ) -> list[OmniRequestOutput]:
        """As `generate`, for requests that differ in more than their prompt."""
        return self.engine.step(requests, on_step)

    def close(self) -> None:
        """Gives the model's memory back. May be called again."""
        self.engine.close()

    def __enter__(self) -> OmniDiffusion:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


Omni = OmniDiffusion
