"""Texts that PostgreSQL cannot hold are found in every type that Spark has for texts."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from semel.sinks.postgres.staging import REASON
from semel.spark.encoding import BadRowError
from semel.spark.postgres_tasks import checked_texts


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.list_(pa.string()), pa.list_(pa.large_string())])
def test_a_text_with_nul_is_set_aside_or_named(kind: Any) -> None:
    """Large types come with spark.sql.execution.arrow.useLargeVarTypes."""
    texts: list[Any] = ["a\0b", "c"]
    values = [[text] for text in texts] if pa.types.is_list(kind) else texts
    batch = pa.RecordBatch.from_arrays([pa.array(values, kind)], names=["x"])
    assert checked_texts(batch, True).column(REASON).to_pylist() == ["column 'x' holds the character NUL", None]
    with pytest.raises(BadRowError, match="column 'x' of a row holds the character NUL"):
        checked_texts(batch, False)
