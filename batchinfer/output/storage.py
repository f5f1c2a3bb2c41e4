"""The form in which a column is handed to the Parquet writer.

pyarrow can neither repeat rows of string views nor write slices of lists of structs of them
("Slicing not implemented for StringView"). In the file they are the same bytes as large strings,
so they are handed over as those, and the schema stored in the file keeps the input's own type.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt


def storage_schema(schema: pa.Schema) -> pa.Schema:
    """`schema` with storage types. Equal to it unless there are views."""
    fields = [field.with_type(storage_type(field.type)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def storage_type(type_: pa.DataType) -> pa.DataType:
    """`type_` with large strings (binaries) for string (binary) views at any depth.

    Raises pa.ArrowNotImplementedError for list views of views, which nothing can cast.
    """
    if pt.is_string_view(type_):
        return pa.large_string()
    if pt.is_binary_view(type_):
        return pa.large_binary()
    if pt.is_list(type_):
        return pa.list_(_storage_field(type_.value_field))
    if pt.is_large_list(type_):
        return pa.large_list(_storage_field(type_.value_field))
    if pt.is_fixed_size_list(type_):
        return pa.list_(_storage_field(type_.value_field), type_.list_size)
    if pt.is_struct(type_):
        return pa.struct([_storage_field(field) for field in type_])
    if pt.is_map(type_):
        return pa.map_(_storage_field(type_.key_field), _storage_field(type_.item_field), type_.keys_sorted)
    if pt.is_dictionary(type_):
        return pa.dictionary(type_.index_type, storage_type(type_.value_type), type_.ordered)
    if (pt.is_list_view(type_) or pt.is_large_list_view(type_)) and storage_type(type_.value_type) != type_.value_type:
        raise pa.ArrowNotImplementedError("a list view of views cannot be written")
    return type_


def _storage_field(field: pa.Field) -> pa.Field:
    return field.with_type(storage_type(field.type))
