"""Where the files of a checkpoint are read from, and what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.spark.checkpoint import local_files


@pytest.mark.parametrize("scheme", ["file:", "file://"])
def test_local_files_are_read_as_they_are_whatever_the_name_of_their_folder(tmp_path: Path, scheme: str) -> None:
    folder = tmp_path / "50% of it"
    (folder / "offsets").mkdir(parents=True)
    (folder / "offsets/7").write_text("v1\n")
    files = local_files(f"{scheme}{folder}")
    assert files is not None
    assert files.read("offsets/7") == "v1\n"
    assert files.read("offsets/8") is None
    assert files.names("offsets") == ["7"]
    assert files.names("state") == []


@pytest.mark.parametrize("root", ["hdfs://name:8020/checkpoints", "viewfs:/checkpoints", "s3a://bucket/checkpoints"])
def test_other_files_are_left_to_hadoop(root: str) -> None:
    assert local_files(root) is None
