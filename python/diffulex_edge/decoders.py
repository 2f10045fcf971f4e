# SPDX-License-Identifier: Apache-2.0
"""The decoder under the documented name of each family, which checks that it gets one of its models."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from diffulex.errors import ConfigError
from diffulex_edge.model import EdgeDecoder

if TYPE_CHECKING:
    from diffulex.families.spec import ModelSpec
    from diffulex_edge.model import EdgeForm

__all__ = [
    "MODEL_REGISTRY",
    "DreamEdge",
    "FastDLLMv2Edge",
    "FastdLLMV2Edge",
    "LLaDAEdge",
    "SDAREdge",
]


class _NamedDecoder(EdgeDecoder):
    """An `EdgeDecoder` of one family; ConfigError for a model of another."""

    FAMILY: ClassVar[str]

    def __init__(
        self, spec: ModelSpec, max_seq_len: int | None = None, form: EdgeForm | None = None
    ) -> None:
        if spec.family != self.FAMILY:
            raise ConfigError(
                f"{type(self).__name__}: expected a model of the family {self.FAMILY},"
                f" got {spec.family}"
            )
        super().__init__(spec, max_seq_len, form)


class FastDLLMv2Edge(_NamedDecoder):
    """Fast-dLLM v2."""

    FAMILY = "fast_dllm_v2"


class DreamEdge(_NamedDecoder):
    """Dream."""

    FAMILY = "dream"


class LLaDAEdge(_NamedDecoder):
    """LLaDA."""

    FAMILY = "llada"


class SDAREdge(_NamedDecoder):
    """SDAR."""

    FAMILY = "sdar"


FastdLLMV2Edge = FastDLLMv2Edge
#: Family -> class.
MODEL_REGISTRY = {item.FAMILY: item for item in (FastDLLMv2Edge, DreamEdge, LLaDAEdge, SDAREdge)}
