"""The protobuf messages of the A2A protocol, with the fields for generations.

The descriptors are those of the official SDK; five fields are added to them here, in a pool of our own, so that the
SDK's classes in the same process stay as they are. Who does not know these fields passes over them.
"""

from __future__ import annotations

from typing import Any, Final

from a2a.types import a2a_pb2
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2, timestamp_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

_GENERATIONS: Final = {
    "Task": ("generation", 7),
    "TaskStatusUpdateEvent": ("generation", 5),
    "TaskArtifactUpdateEvent": ("generation", 7),
}
_GENERATIONS_OPTIONAL: Final = {
    "GetTaskRequest": ("current_generation", 4),
    "SendMessageConfiguration": ("if_generation_match", 5),
}
_INT64: Final = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_OPTIONAL: Final = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL


def _make_pool() -> Any:
    """With health and reflection, so that reflection can describe all that is served."""
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    for file in (a2a_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        _add(pool, file, added)
    return pool


def _add(pool: Any, file: Any, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for needed in file.dependencies:
        _add(pool, needed, added)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    if file.name == a2a_pb2.DESCRIPTOR.name:
        _add_generations(proto)
    pool.AddSerializedFile(proto.SerializeToString())


def _add_generations(file: Any) -> None:
    """An SDK that has a field of its own keeps it."""
    for message in file.message_type:
        is_optional = message.name in _GENERATIONS_OPTIONAL
        wanted = (_GENERATIONS_OPTIONAL if is_optional else _GENERATIONS).get(message.name)
        if wanted is None or any(field.name == wanted[0] for field in message.field):
            continue
        name, number = wanted
        field = message.field.add(name=name, number=number, type=_INT64, label=_OPTIONAL)
        if is_optional:  # the way in which proto3 notes that a field has a presence
            field.proto3_optional = True
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{name}")


POOL: Final = _make_pool()
SERVICE: Final = POOL.FindFileByName(a2a_pb2.DESCRIPTOR.name).services_by_name["A2AService"]


def class_of(descriptor: Any) -> Any:
    return message_factory.GetMessageClass(descriptor)


def _shared(descriptor: Any) -> Any:
    """Our pool's class for a message of the standard library."""
    return class_of(POOL.FindMessageTypeByName(descriptor.full_name))


Object: Final = _shared(struct_pb2.Struct.DESCRIPTOR)
Value: Final = _shared(struct_pb2.Value.DESCRIPTOR)
Values: Final = _shared(struct_pb2.ListValue.DESCRIPTOR)
Timestamp: Final = _shared(timestamp_pb2.Timestamp.DESCRIPTOR)
AgentCard: Final = _shared(a2a_pb2.AgentCard.DESCRIPTOR)
