"""What rows become in files, and what is refused: a value that cannot be written as it is makes its row a bad one."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import semel
from semel.client.types import TopicPartition
from semel.sinks.files.errors import FolderError, UnfitRowError
from semel.sinks.files.folder import LoopFolder, Unit
from semel.sinks.files.formats import format_of

PLACE = TopicPartition("orders", 0)


def write(folder: Path, *units: list[dict[str, Any]], **options: Any) -> None:
    """Each as a commit of its own."""
    settings = semel.Files(folder, **options)
    content = format_of(settings)
    loop = LoopFolder(settings.folder, "app", settings.format, "test")
    loop.open()
    ids = {PLACE.topic: uuid4()}
    claims = loop.take_partitions([PLACE], ids)
    for number, rows in enumerate(units, 1):
        loop.commit_unit(claims, {PLACE: number}, ids, Unit(content.of_rows(rows), []), content)
        claims = {PLACE: claims[PLACE]._replace(next_offset=number)}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int64", 19.99),
        ("int8", Decimal("0.5")),
        ("list", [1, 1.5]),
        ("pair", [1, 1.5]),
        ("map", [("cents", 1.5)]),
        ("struct", {"cents": 1.5}),
    ],
)
def test_a_fraction_is_not_cut_off_where_the_column_is_of_integers(tmp_path: Path, kind: str, value: Any) -> None:
    import pyarrow as pa

    kinds = {
        "list": pa.list_(pa.int64()),
        "pair": pa.list_(pa.int64(), 2),
        "map": pa.map_(pa.string(), pa.int64()),
        "struct": pa.struct([("cents", pa.int64())]),
    }
    content = format_of(semel.Files(tmp_path, schema={"amount": kinds.get(kind, kind)}))
    with pytest.raises(UnfitRowError, match="is no integer"):
        content.of_rows([{"amount": None}, {"amount": value}])
    whole = {"list": [1, 2.0], "pair": [1, 2.0], "map": [("cents", 2.0)], "struct": {"cents": 2.0}}.get(kind, 2.0)
    assert content.of_rows([{"amount": whole}, {}])[0].rows == 2


@pytest.mark.parametrize("value", ["x" * 300, "\u6771" * 30, "\ud800"], ids=["long", "long when quoted", "half"])
@pytest.mark.parametrize("options", [{"format": "jsonl"}, {"schema": {"city": "string"}}], ids=["jsonl", "parquet"])
def test_a_value_that_no_folder_can_be_called_after_is_its_rows_fault(
    tmp_path: Path, value: str, options: dict[str, Any]
) -> None:
    content = format_of(semel.Files(tmp_path, partition_by="city", **options))
    with pytest.raises(UnfitRowError):
        content.of_rows([{"city": value}])


def test_texts_that_look_like_times_are_read_as_they_were_written(tmp_path: Path) -> None:
    texts = ["2024-01-01", "2024-01-01T00:00:00Z", "n/a"]
    rows = [{"at": text, "in": {"at": text}, "all": [text]} for text in texts]
    write(tmp_path / "out", *([row] for row in rows), format="jsonl")
    assert semel.read_files(tmp_path / "out").to_pylist() == rows


def test_columns_of_several_types_are_refused_in_words(tmp_path: Path) -> None:
    write(tmp_path / "out", [{"a": 1}], [{"a": "x"}], format="jsonl")
    with pytest.raises(FolderError, match="Rows are whole"):
        semel.read_files(tmp_path / "out")
