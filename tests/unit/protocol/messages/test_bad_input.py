"""Whatever the bytes are, decoding gives a message or a typed error, and takes no more memory than they justify."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from typing import Any

import pytest

from semel.protocol.api import FLEXIBLE_FROM, api_of, read_request_header
from semel.protocol.errors import DecodeError, EncodeError, ProtocolError, UnsupportedVersionError
from semel.protocol.messages.cluster import (
    METADATA,
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    MetadataRequestTopic,
)
from semel.protocol.messages.groups import HEARTBEAT, LIST_GROUPS, HeartbeatRequest, ListGroupsRequest
from semel.protocol.messages.records import (
    FETCH,
    PRODUCE,
    FetchRequest,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)

from .samples import all_formats, plain, sample

FORMATS = [(fmt, version) for _, fmt, version in all_formats()]


def test_every_truncation_is_refused():
    for fmt, version in FORMATS:
        message = sample(fmt.struct, version, random.Random(f"{fmt.name}{version}"))
        encoded = memoryview(fmt.encode(message, version))
        for end in sorted(random.Random(version).sample(range(len(encoded)), min(len(encoded), 25))):
            with pytest.raises(DecodeError):
                fmt.decode(encoded[:end], version)


def test_trailing_bytes_are_refused():
    for fmt, version in FORMATS:
        encoded = fmt.encode(fmt.struct(), version)
        with pytest.raises(DecodeError, match="1 bytes follow"):
            fmt.decode(encoded + b"\0", version)


def fuzz(seconds: float, seed: int) -> int:
    """Decodes mutated messages until the time is up; the number of tries."""
    rng, tries, end = random.Random(seed), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        fmt, version = rng.choice(FORMATS)
        data = bytearray(fmt.encode(sample(fmt.struct, version, rng), version))
        mutate(data, rng)
        try:
            fmt.decode(bytes(data), version)
        except ProtocolError:
            pass
        except Exception as error:
            raise AssertionError(
                f"{fmt} version {version} raised {error!r} (seed {seed}) on {bytes(data).hex()}"
            ) from error
        tries += 1
    return tries


def mutate(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 5)):
        kind, at = rng.randrange(5), rng.randrange(len(data) + 1)
        if kind == 0:
            data[at : at + 4] = struct.pack(">i", rng.choice([-1, -2, 0x7FFFFFFF, -0x80000000, 1 << 20]))
        elif kind == 1:
            data[at : at + rng.randrange(6)] = b"\xff" * rng.randrange(11)
        elif kind == 2:
            data[at : at + 1] = rng.randbytes(1)
        elif kind == 3:
            del data[at:]
        else:
            data[at:at] = rng.randbytes(rng.randrange(8))


def test_fuzzed_bytes_give_typed_errors_only():
    assert fuzz(seconds=4, seed=time.time_ns()) > 100


@pytest.mark.full
@pytest.mark.timeout(600)
def test_fuzzed_bytes_give_typed_errors_only_for_minutes():
    assert fuzz(seconds=240, seed=time.time_ns()) > 10_000


@pytest.mark.parametrize(
    ("fmt", "version", "data"),
    [
        (LIST_GROUPS.request, 4, b"\xff\xff\xff\xff\x0f\0"),  # 4,294,967,294 strings in no bytes
        (METADATA.request, 0, b"\x7f\xff\xff\xff"),  # 2,147,483,647 topics in no bytes
        (FETCH.request, 4, struct.pack(">iiiibi", -1, 0, 0, 0, 0, 0x7FFFFFFF)),
    ],
)
def test_a_huge_array_length_allocates_nothing(fmt, version, data):
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="only"):
            fmt.decode(data, version)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_varint_of_more_than_five_bytes_is_refused():
    with pytest.raises(DecodeError, match="longer than 5 bytes"):
        LIST_GROUPS.request.decode(b"\xff\xff\xff\xff\xff\xff\x01\0", 4)


def test_a_negative_length_is_refused_with_the_field_and_the_length():
    with pytest.raises(DecodeError, match=r"HeartbeatRequest.group_id has length -7"):
        HEARTBEAT.request.decode(struct.pack(">h", -7), 0)


def test_null_where_it_is_not_allowed_is_refused_both_ways():
    with pytest.raises(DecodeError, match=r"HeartbeatRequest.group_id is null"):
        HEARTBEAT.request.decode(struct.pack(">h", -1), 0)
    with pytest.raises(EncodeError, match="may not be null in version 0"):
        METADATA.request.encode(MetadataRequest(topics=None), 0)


def test_a_field_that_a_version_lacks_is_refused_if_set_and_dropped_if_ignorable():
    with pytest.raises(EncodeError, match="group_instance_id = 'me' cannot be sent in version 2"):
        HEARTBEAT.request.encode(HeartbeatRequest(group_id="g", group_instance_id="me"), 2)
    assert FETCH.request.decode(FETCH.request.encode(FetchRequest(rack_id="r"), 4), 4).rack_id == ""


def test_values_that_do_not_fit_are_refused():
    for request in (HeartbeatRequest(generation_id=1 << 40), HeartbeatRequest(group_id="x" * 40_000)):
        with pytest.raises(EncodeError, match="cannot be encoded"):
            HEARTBEAT.request.encode(request, 0)


def test_unknown_apis_and_versions_are_refused_by_name():
    with pytest.raises(UnsupportedVersionError, match="no API with key 999"):
        api_of(999)
    with pytest.raises(UnsupportedVersionError, match=r"ListGroupsRequest has versions 0-5, not 6"):
        LIST_GROUPS.request.encode(ListGroupsRequest(), 6)


def test_unknown_tagged_fields_are_passed_over():
    plain_bytes = LIST_GROUPS.request.encode(ListGroupsRequest(states_filter=["Stable"]), 5)
    assert plain_bytes.endswith(b"\0")
    tagged = plain_bytes[:-1] + b"\x01\x63\x05hello"
    assert LIST_GROUPS.request.decode(tagged, 5) == ListGroupsRequest(states_filter=["Stable"])


def test_a_record_set_stays_a_view_of_the_frame():
    data = [TopicProduceData(name="t", partition_data=[PartitionProduceData(index=1, records=b"x" * 1000)])]
    frame = memoryview(bytearray(PRODUCE.request.encode(ProduceRequest(topic_data=data), 9)))
    found: Any = PRODUCE.request.decode(frame, 9).topic_data[0].partition_data[0].records
    assert isinstance(found, memoryview)
    assert found.obj is frame.obj
    assert not found.readonly


def test_a_record_set_is_handed_through_without_a_copy():
    buffer = memoryview(b"y" * 500_000)
    data = [TopicProduceData(name="t", partition_data=[PartitionProduceData(index=1, records=[buffer, b"z"])])]
    parts = PRODUCE.request.encode_parts(ProduceRequest(topic_data=data), 9)
    assert any(part is buffer for part in parts)
    assert PRODUCE.request.decode(b"".join(parts), 9).topic_data[0].partition_data[0].records[-2:] == b"yz"


@pytest.mark.parametrize(
    "frame", [b"", b"\0\x12", struct.pack(">hhih", 18, 3, 1, 500), struct.pack(">hhih", 18, 3, 1, -9)]
)
def test_a_broken_request_header_is_a_typed_error(frame):
    with pytest.raises(DecodeError):
        read_request_header(frame, FLEXIBLE_FROM)


def test_a_client_id_that_is_not_text_is_a_typed_error():
    with pytest.raises(DecodeError, match="not UTF-8"):
        read_request_header(struct.pack(">hhih", 18, 0, 1, 2) + b"\xff\xfe", FLEXIBLE_FROM)


def test_an_unknown_api_still_has_a_readable_header():
    header = read_request_header(struct.pack(">hhih", 4711, 3, 9, -1), FLEXIBLE_FROM)
    assert (header.api_key, header.version, header.correlation_id, header.client_id) == (4711, 3, 9, None)


def test_the_answer_to_api_versions_has_a_plain_header_in_every_version():
    api = api_of(18)
    for version in range(5):
        frame = b"".join(api.frame_response(ApiVersionsResponse(), version, 5))
        assert frame[4:8] == struct.pack(">i", 5)
        assert plain(api.read_response(frame[4:], version)[1]) == plain(ApiVersionsResponse())
    assert api.request.decode(api.request.encode(ApiVersionsRequest(), 3), 3) == ApiVersionsRequest()


def test_defaults_are_not_shared_between_messages():
    one = MetadataRequest()
    assert one.topics == []
    one.topics.append(MetadataRequestTopic(name="x"))
    assert MetadataRequest().topics == []
