# SPDX-License-Identifier: Apache-2.0
"""Values as a tree for msgpack and raw buffers: numbers, texts, lists, maps, arrays, tensors, pictures.

Nothing in a message names code, so that reading one runs none.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Buffer", "decode", "encode"]

Buffer = bytes | bytearray | memoryview

#: Key of the maps that stand for something else than a map.
_MARK = "$"
_PLAIN = (type(None), bool, int, float, str, bytes)


def encode(value: Any) -> tuple[Any, list[memoryview]]:
    """The value without the data of its arrays, and these, one buffer each.

    Raises:
        TypeError: it holds something that is not data.
    """
    buffers: list[memoryview] = []
    return _encode(value, buffers), buffers


def decode(tree: Any, buffers: Sequence[Buffer]) -> Any:
    """The value again; arrays own their memory.

    Raises:
        ValueError, TypeError, KeyError, IndexError: the tree is not one of `encode`.
    """
    if isinstance(tree, list):
        return [decode(item, buffers) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _MARK not in tree:
        return {name: decode(item, buffers) for name, item in tree.items()}
    kind = tree[_MARK]
    if kind == "tuple":
        return tuple(decode(item, buffers) for item in tree["items"])
    return _decode_array(kind, tree, buffers[tree["buffer"]])


def _decode_array(kind: str, tree: Mapping[str, Any], data: Buffer) -> Any:
    if kind == "picture":
        pictures = importlib.import_module("PIL.Image")
        picture = pictures.frombytes(tree["mode"], tuple(tree["shape"]), bytes(data))
        if tree["palette"] is not None:
            mode, colors = tree["palette"]
            picture.putpalette(colors, mode)
        if tree["transparency"] is not None:
            picture.info["transparency"] = tree["transparency"]
        return picture
    numpy = importlib.import_module("numpy")
    raw = numpy.frombuffer(data, numpy.uint8).copy()
    if kind == "array":
        return raw.view(tree["dtype"]).reshape(tree["shape"])
    if kind == "tensor":
        torch = importlib.import_module("torch")
        dtype = getattr(torch, tree["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"message: expected a dtype of torch, got {tree['dtype']!r}")
        return torch.from_numpy(raw).view(dtype).reshape(tree["shape"])
    raise ValueError(f"message: expected an array, a tensor or a picture, got {kind!r}")


def _encode(value: Any, buffers: list[memoryview]) -> Any:
    if isinstance(value, _PLAIN):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise TypeError(f"message: expected integers of at most 64 bits, got {value:#x}")
        return value
    if isinstance(value, tuple):
        return {_MARK: "tuple", "items": [_encode(item, buffers) for item in value]}
    if isinstance(value, list):
        return [_encode(item, buffers) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) and name != _MARK for name in value):
            raise TypeError(f"message: expected names as keys of a map, got {list(value)!r}")
        return {name: _encode(item, buffers) for name, item in value.items()}
    found = _encode_array(value)
    if found is None:
        kind = type(value).__name__
        raise TypeError(f"message: expected numbers, texts, lists, maps or arrays, got a {kind}")
    tree, data = found
    buffers.append(data)
    return {**tree, "buffer": len(buffers) - 1}


def _encode_array(value: Any) -> tuple[dict[str, Any], memoryview] | None:
    """Only what is imported can be the type of a value."""
    torch, numpy, pictures = (sys.modules.get(name) for name in ("torch", "numpy", "PIL.Image"))
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        name = str(value.dtype).removeprefix("torch.")
        return {_MARK: "tensor", "dtype": name, "shape": list(value.shape)}, flat.data
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(value)
        if array.dtype.hasobject:
            raise TypeError(f"message: expected an array of numbers, got {array.dtype}")
        flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        return {_MARK: "array", "dtype": array.dtype.str, "shape": list(array.shape)}, flat.data
    if pictures is not None and isinstance(value, pictures.Image):
        data = memoryview(value.tobytes())  # first: it loads what else the picture has
        palette = value.palette and value.palette.mode
        return {
            _MARK: "picture",
            "mode": value.mode,
            "shape": list(value.size),
            "palette": palette and [palette, bytes(value.getpalette(palette))],
            "transparency": value.info.get("transparency"),
        }, data
    return None
