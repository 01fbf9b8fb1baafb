"""Record batches as Arrow columns: the fast codec. `rows` and `record_sets` are the plain ones that it is held to.

    ColumnEncoder(value, key, headers, timestamp).encode(rows, ...)   columns to batches for a produce request
    decode_record_set(data, ...)                                      a fetch response to columns

This module loads numpy and pyarrow; nothing else in the package does so on import.
"""

from semel.protocol.columns_decode import SCHEMA, SCHEMA_WITH_HEADERS, DecodedRecords, decode_record_set
from semel.protocol.columns_encode import BatchOptions, ColumnEncoder, EncodedBatch

__all__ = [
    "SCHEMA",
    "SCHEMA_WITH_HEADERS",
    "BatchOptions",
    "ColumnEncoder",
    "DecodedRecords",
    "EncodedBatch",
    "decode_record_set",
]
