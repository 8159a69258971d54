"""XLA's HloModuleProto, declared at run time with only the fields that the hook reads or writes.

protobuf keeps fields that it does not know, so a module passes through here whole: kernels, constants, schedules of
buffers. (HLO's text form does not: it elides large constants and breaks binary strings.) Field numbers are those of
`xla/service/hlo.proto` and `xla/xla_data.proto`; numbers of a protobuf never change their meaning.
"""

from __future__ import annotations

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, unknown_fields

PACKAGE = "taco_jax.hlo"

# Message: {field: (number, type)}. "*" before a type: repeated. Types in capitals are messages of this table.
FIELDS = {
    "Module": {
        "name": (1, "string"), "computations": (3, "*Computation"), "entry_computation_id": (6, "int64"),
        "input_output_alias": (8, "bytes"), "device_assignment": (15, "DeviceAssignment"),
        "buffer_donor": (18, "bytes"),
    },
    "Name": {"name": (1, "string")},
    "DeviceAssignment": {"replica_count": (1, "int32"), "devices": (3, "*ReplicaGroup")},
    "FrontendAttributes": {"map": (1, "*Attribute")},
    "Attribute": {"key": (1, "string"), "value": (2, "string")},
    "Computation": {
        "name": (1, "string"), "instructions": (2, "*Instruction"), "id": (5, "int64"), "root_id": (6, "int64"),
        "is_fusion_computation": (7, "bool"),
    },
    "Instruction": {
        "name": (1, "string"), "opcode": (2, "string"), "shape": (3, "Shape"), "metadata": (7, "Metadata"),
        "literal": (8, "Literal"), "parameter_number": (9, "int64"), "fusion_kind": (11, "string"),
        "tuple_index": (13, "int64"), "dimensions": (14, "*int64"), "dynamic_slice_sizes": (20, "*int64"),
        "channel_id": (26, "int64"), "id": (35, "int64"), "operand_ids": (36, "*int64"),
        "control_predecessor_ids": (37, "*int64"), "called_computation_ids": (38, "*int64"),
        "backend_config": (43, "bytes"), "replica_groups": (49, "*ReplicaGroup"),
        "source_target_pairs": (52, "*SourceTarget"), "comparison_direction": (63, "string"),
        "frontend_attributes": (68, "FrontendAttributes"), "use_global_device_ids": (71, "bool"),
        "device_list": (87, "DeviceList"), "iota_groups": (92, "IotaGroups"),
        "mesh_groups": (93, "MeshGroups"),
    },
    "Shape": {
        "element_type": (2, "int32"), "dimensions": (3, "*int64"), "tuple_shapes": (4, "*Shape"),
        "layout": (5, "Layout"), "is_dynamic_dimension": (6, "*bool"),
    },
    "Layout": {"minor_to_major": (1, "*int64")},
    "Metadata": {"op_name": (2, "string"), "stack_frame_id": (15, "int32")},
    "Literal": {
        "shape": (1, "Shape"), "preds": (2, "*bool"), "s32s": (4, "*int32"), "s64s": (5, "*int64"),
        "u32s": (6, "*uint32"), "u64s": (7, "*uint64"),
    },
    "SourceTarget": {"source": (1, "int64"), "target": (2, "int64")},
    "ReplicaGroup": {"ids": (1, "*int64")},
    "DeviceList": {"replica_groups": (1, "*ReplicaGroup"), "iota_groups": (2, "IotaGroups"),
                   "mesh_groups": (3, "MeshGroups")},
    "IotaGroups": {"groups": (1, "int64"), "size": (2, "int64"), "dims": (3, "*int64"), "order": (4, "*int32")},
    "MeshGroups": {"mesh": (1, "Mesh"), "axes": (2, "*AxisRef")},
    "Mesh": {"axes": (1, "*Axis"), "device_ids": (2, "*int64"), "iota_ids": (3, "IotaIds")},
    "IotaIds": {"dims": (1, "*int64"), "order": (2, "*int32")},
    "Axis": {"name": (1, "string"), "size": (2, "int64")},
    "AxisRef": {"axis": (1, "int64"), "part": (2, "AxisPart")},
    "AxisPart": {"before": (1, "int64"), "size": (2, "int64")},
}  # fmt: skip

# XLA's element types by number.
PRED, TUPLE = 1, 13
FLOATS = {10: "float16", 11: "float32", 16: "bfloat16"}
NAMES = FLOATS | {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
    12: "float64", 15: "complex64", 18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn",
}  # fmt: skip
SIZES = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e5m2": 1, "float8_e4m3fn": 1,
}  # fmt: skip


def _declare() -> dict[str, type]:
    """The message classes of `FIELDS`, in a pool of their own."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="taco_jax/hlo.proto", package=PACKAGE, syntax="proto3")
    for message, fields in FIELDS.items():
        declared = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            repeated, kind = kind.startswith("*"), kind.lstrip("*")
            field = declared.field.add(name=name, number=number)
            field.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind in FIELDS:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in FIELDS}


MESSAGES = _declare()
ModuleProto, NameProto = MESSAGES["Module"], MESSAGES["Name"]


def is_known(message) -> bool:
    """Returns whether every field of a message, and of those within, is one of `FIELDS`."""
    if len(unknown_fields.UnknownFieldSet(message)):
        return False
    inner = (value for field, value in message.ListFields() if field.type == field.TYPE_MESSAGE)
    return all(is_known(m) for value in inner for m in ([value] if hasattr(value, "ListFields") else value))


def dtype_name(shape) -> str:
    """The dtype of an array's shape, such as "bfloat16"; "" of tuples, tokens and what has no name here."""
    return NAMES.get(shape.element_type, "")


def nbytes(shape) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    if shape.tuple_shapes:
        return sum(nbytes(part) for part in shape.tuple_shapes)
    size = SIZES.get(dtype_name(shape), 0)
    for dim in shape.dimensions:
        size *= dim
    return size
