"""The table of APIs is the truth: the docs page is made from it, its handlers exist, the protocol has its versions."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from semel.broker.dispatch import NOT_SERVED, TABLE, Dispatcher, Row, Served, markdown
from semel.protocol.api import api_of
from semel.protocol.errors import UnsupportedVersionError

DOCS = Path(__file__).parents[3] / "docs" / "protocol-support.md"


def test_docs_page_is_the_table() -> None:
    assert DOCS.read_text() == markdown(), "run: python -m semel.broker.dispatch > docs/protocol-support.md"


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.handler.partition(":")[2])
def test_every_row_has_a_handler_and_versions_that_the_protocol_knows(row: Row) -> None:
    served = Served(row)
    assert len(inspect.signature(served.handler).parameters) == 3
    for version in (served.min_version, served.max_version):
        assert version in served.api.request.valid
        assert version in served.api.response.valid
    assert api_of(row.key).key == row.key


def test_unknown_apis_and_versions_are_refused_by_name() -> None:
    dispatcher = Dispatcher(lambda name: False)
    with pytest.raises(UnsupportedVersionError, match="API 9999 is not served"):
        dispatcher.find(9999, 0)
    with pytest.raises(UnsupportedVersionError, match="Metadata is served in versions 0-13, not 14"):
        dispatcher.find(3, 14)
    with pytest.raises(UnsupportedVersionError, match="Produce is served in versions 3-13, not 2"):
        dispatcher.find(0, 2)


def test_every_refused_api_has_a_reason() -> None:
    assert all(reason for _, reason in NOT_SERVED.values())
