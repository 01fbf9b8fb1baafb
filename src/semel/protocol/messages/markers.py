"""The content of control records."""

from __future__ import annotations

from semel.protocol.api import Format
from semel.protocol.schema import Struct, int32


class EndTxnMarker(Struct):
    """The value of a commit or abort marker."""

    coordinator_epoch: int32 = 0


END_TXN_MARKER = Format(EndTxnMarker, "0")
