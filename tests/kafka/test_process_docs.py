"""The Python examples of docs/client.md work as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.broker import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
REGISTRY = ('Client({"url": "http://localhost:8081"', 'Client.new_client({"url": "mock://"')  # one in memory instead


def test_examples_of_the_client_page_run_from_top_to_bottom(cluster: Cluster, capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:
        code = block.replace("localhost:9092", cluster.bootstrap).replace('"orders', f'"{cluster.name}-docs-orders')
        code = code.replace(*REGISTRY)
        exec(compile(code, str(PAGE), "exec"), names)
    assert names["stats"].records_in > 0  # type: ignore[attr-defined]
    assert names["table"].column_names == ["topic", "partition", "offset", "timestamp", "key", "value"]  # type: ignore[attr-defined]
    names["admin"].close()  # type: ignore[attr-defined]
    assert "TopicPartition" in capsys.readouterr().out
