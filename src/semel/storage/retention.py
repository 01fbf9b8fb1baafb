"""Which segments are too old, too many or below the start offset. It looks and counts, and deletes nothing."""

from __future__ import annotations

from semel.storage.config import LogConfig
from semel.storage.segment import Segment


def expired_count(
    segments: list[Segment], config: LogConfig, now_ms: int, high_watermark: int, start_offset: int
) -> int:
    """How many segments, from the oldest on, may go. Nothing that readers could not see yet ever does."""
    excess_bytes = _excess_bytes(segments, config)
    count = 0
    for number, segment in enumerate(segments):
        next_base = segments[number + 1].base_offset if number + 1 < len(segments) else None
        if next_base is not None and next_base > high_watermark:
            break
        below_start = next_base is not None and next_base <= start_offset
        too_old = config.delete and _is_too_old(segment, config, now_ms)
        too_many = config.delete and segment.size > 0 and excess_bytes >= segment.size
        if not (below_start or too_old or too_many):
            break
        if next_base is None and not _is_wholly_visible(segment, high_watermark):
            break
        excess_bytes -= segment.size
        count += 1
    return count


def _excess_bytes(segments: list[Segment], config: LogConfig) -> int:
    if config.retention_bytes < 0:
        return -1
    return sum(segment.size for segment in segments) - config.retention_bytes


def _is_too_old(segment: Segment, config: LogConfig, now_ms: int) -> bool:
    if config.retention_ms < 0:
        return False
    newest_ms = segment.load_max_timestamp()
    if newest_ms < 0:
        newest_ms = segment.created_ms
    if now_ms - newest_ms <= config.retention_ms:
        return False
    checked_ms = segment.check_max_timestamp()  # an index may be damaged, which is no reason to delete records
    return checked_ms < 0 or now_ms - checked_ms > config.retention_ms


def _is_wholly_visible(segment: Segment, high_watermark: int) -> bool:
    return segment.size > 0 and segment.next_offset() <= high_watermark
