# SPDX-License-Identifier: Apache-2.0
"""Maps of the wire for jobs of one kind, together with the messages of every kind."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from diffulex.wire import messages
from diffulex.wire.wire_maps import WireMaps, WireTable

__all__ = ["JobCodec"]

# By the type of the map: the class, and the fields that always travel.
_COMMANDS: WireTable = {
    "abort": (messages.ServingAbort, ("rid",)),
    "shutdown": (messages.ServingShutdown, ()),
    "profile_start": (messages.ServingProfileStart, ("profile_prefix",)),
    "profile_stop": (messages.ServingProfileStop, ()),
    "flush_cache": (messages.ServingFlushCache, ("op_id",)),
    "control": (messages.ServingControl, ("action", "op_id")),
}
_EVENTS: WireTable = {"error": (messages.ServingError, ("rid", "message"))}
_REPORTS: WireTable = {
    "batch": (messages.ServingBatch, ("events",)),
    "heartbeat": (messages.ServingHeartbeat, ("ts", "step_seq", "step_running_s", "stats")),
    "ack": (messages.ServingAck, ("op_id", "ok", "message", "data")),
}


class JobCodec:
    """Encodes and decodes commands and events; may be sent to another process.

    Args:
        commands: class and always travelling fields of the commands that start jobs, by `type`.
        events: the same of their events.
    """

    def __init__(self, commands: WireTable, events: WireTable) -> None:
        self._commands = WireMaps({**commands, **_COMMANDS})
        self._events = WireMaps({**events, **_EVENTS, **_REPORTS})
        self._event_names = (*events, *_EVENTS)
        self._types = {cls: _scalar_types(cls) for cls, _ in {**commands, **_COMMANDS}.values()}

    def command_to_dict(self, command: messages.ServingCommand) -> dict[str, Any]:
        """The map of a command; TypeError for anything else."""
        data = self._commands.to_dict(command, self._commands.names, "serving_command")
        if isinstance(command, messages.JobCommand):
            command.pack(data)
        return data

    def command_from_dict(self, data: Mapping[str, Any]) -> messages.ServingCommand:
        """The command of a map.

        Raises:
            ProtocolVersionError: it is of a newer protocol.
            ValueError: its type is unknown or missing, a required key is, or a field is of another
                type: the backend relies on them.
        """
        shape = self._commands.shape_of(data, self._commands.names, "serving_command")
        arguments = shape.arguments(data, "serving_command")
        for name, legal in self._types[shape.cls].items():
            if name in arguments and not _is_legal(arguments[name], legal):
                got = arguments[name]
                raise ValueError(f"serving_command: expected a legal {name}, got {got!r}")
        if issubclass(shape.cls, messages.JobCommand):
            shape.cls.unpack(arguments)
        command: messages.ServingCommand = shape.cls(**arguments)
        return command

    def event_to_dict(self, event: messages.ServingMessage) -> dict[str, Any]:
        """The map of an event, batch, heartbeat or ack; TypeError for anything else."""
        data = self._events.to_dict(event, self._events.names, "serving_event")
        if isinstance(event, messages.ServingBatch):
            encode = self._events.to_dict
            data["events"] = [
                encode(item, self._event_names, "serving_event") for item in event.events
            ]
        return data

    def event_from_dict(self, data: Mapping[str, Any]) -> messages.ServingMessage:
        """The event, batch, heartbeat or ack of a map.

        Raises:
            ProtocolVersionError: it is of a newer protocol.
            ValueError: its type is unknown or missing, or a required key is.
        """
        shape = self._events.shape_of(data, self._events.names, "serving_event")
        arguments = shape.arguments(data, "serving_event")
        if shape.cls is messages.ServingBatch:
            arguments["events"] = [self._event(item) for item in arguments["events"]]
        message: messages.ServingMessage = shape.cls(**arguments)
        return message

    def _event(self, data: Any) -> messages.JobEvent:
        shape = self._events.shape_of(data, self._event_names, "serving_event")
        event: messages.JobEvent = shape.cls(**shape.arguments(data, "serving_event"))
        return event


#: What a field may be: its types, and where they are few its values.
_Legal = tuple[frozenset[type], tuple[object, ...]]


def _scalar_types(cls: type[Any]) -> dict[str, _Legal]:
    """The fields of a dataclass that hold numbers, texts and flags, and what they may be."""
    found = {}
    for name, hint in typing.get_type_hints(cls).items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        parts = typing.get_args(hint) if is_union else (hint,)
        values = [value for part in parts for value in typing.get_args(part)]
        is_choice = any(typing.get_origin(part) is typing.Literal for part in parts)
        kinds = {type(value) for value in values} if is_choice else set(parts)
        if float in kinds:
            kinds.add(int)
        if kinds <= {str, int, float, bool, type(None)}:
            found[name] = (frozenset(kinds), tuple(values) if is_choice else ())
    return found


def _is_legal(value: object, legal: _Legal) -> bool:
    kinds, values = legal
    return type(value) in kinds and (not values or value in values)
