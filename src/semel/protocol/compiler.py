"""Turns a table of `schema` into code: one decoder and one encoder for each version in use, generated as plain Python.

Neighbouring numbers are read and written by a single `struct` call. Decoding works on one memoryview and copies nothing
but the small fields themselves; a record set stays a memoryview. No length that the bytes claim is believed before it
is compared with the bytes that are left.
"""

from __future__ import annotations

import struct
import typing
from collections.abc import Callable, Iterable
from typing import Any

from semel.protocol.errors import DecodeError, EncodeError
from semel.protocol.schema import Buffer, Field, FieldKind, Struct, Tag, VersionRange, fields_of


def read_uvarint(buf: Buffer, pos: int) -> tuple[int, int]:
    """An unsigned varint of at most 32 bits, and the position after it."""
    value = shift = 0
    while True:
        byte = buf[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 28:
            raise DecodeError(f"varint at byte {pos - 5} is longer than 5 bytes")
    if value > 0xFFFFFFFF:
        raise DecodeError(f"varint {value} does not fit into 32 bits")
    return value, pos


def write_uvarint(value: int) -> bytes:
    """An unsigned varint. Almost every length fits into one byte."""
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_ONE_BYTE = [bytes([value]) for value in range(0x80)]


def _short(field: str, need: int, left: int) -> DecodeError:
    return DecodeError(f"{field} says it takes {need} bytes, but only {left} are left")


def _null(field: str) -> DecodeError:
    return DecodeError(f"{field} is null, which this version does not allow")


def _negative(field: str, length: int) -> DecodeError:
    return DecodeError(f"{field} has length {length}; expected 0 or more, or -1 for null where that is allowed")


def _skip_tags(buf: Buffer, pos: int, end: int, known: dict[int, Callable[..., int]], target: dict[str, Any]) -> int:
    """Reads a section of tagged fields: known ones into `target`, others are passed over."""
    count, pos = read_uvarint(buf, pos)
    for _ in range(count):
        number, pos = read_uvarint(buf, pos)
        size, pos = read_uvarint(buf, pos)
        if size > end - pos:
            raise _short(f"tagged field {number}", size, end - pos)
        reader = known.get(number)
        if reader is not None and reader(buf, pos, pos + size, target) != pos + size:
            raise DecodeError(f"tagged field {number} says it takes {size} bytes, but its content takes another number")
        pos += size
    return pos


def _put_tags(put: Callable[[Buffer], None], present: list[tuple[int, list[Buffer]]]) -> None:
    put(write_uvarint(len(present)))
    for number, parts in present:
        put(write_uvarint(number) + write_uvarint(sum(map(len, parts))))
        for part in parts:
            put(part)


def _dropped(struct_name: str, field: str, version: int, value: object) -> EncodeError:
    return EncodeError(
        f"{struct_name}.{field} = {value!r:.80} cannot be sent in version {version}; leave it at its default or use "
        "a version that has it"
    )


def _parts_of(value: Any) -> tuple[int, Iterable[Buffer]]:
    parts = value if isinstance(value, list) else [value]
    return sum(map(len, parts)), parts


# -- the compiler ------------------------------------------------------------------------------------------------------
class _Code:
    """Lines of a function under construction, with the names that they use."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "uvarint": read_uvarint,
            "put_uvarint": write_uvarint,
            "short": _short,
            "null": _null,
            "negative": _negative,
            "skip_tags": _skip_tags,
            "put_tags": _put_tags,
            "dropped": _dropped,
            "parts_of": _parts_of,
            "unpack_from": struct.unpack_from,
            "pack": struct.pack,
            "EncodeError": EncodeError,
        }

    def add(self, depth: int, *lines: str) -> None:
        self.lines += ["    " * depth + line for line in lines]

    def name(self, prefix: str, value: Any) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def build(self, function: str) -> Any:
        exec(compile("\n".join(self.lines), f"<generated {function}>", "exec"), self.names)
        return self.names[function]


Decoder = Callable[[Buffer, int, int], tuple[Any, int]]
Encoder = Callable[[Any, Callable[[Buffer], None]], None]
_decoders: dict[tuple[type[Struct], int, bool], Decoder] = {}
_encoders: dict[tuple[type[Struct], int, bool], Encoder] = {}


def decoder_of(cls: type[Struct], version: int, flexible: bool) -> Decoder:
    """decode(buf, pos, end) -> (struct, position after it)."""
    key = (cls, version, flexible)
    if key not in _decoders:
        _decoders[key] = _DecoderWriter(cls, version, flexible).build()
    return _decoders[key]


def encoder_of(cls: type[Struct], version: int, flexible: bool) -> Encoder:
    """encode(struct, put): hands the bytes to `put`, part by part."""
    key = (cls, version, flexible)
    if key not in _encoders:
        _encoders[key] = _EncoderWriter(cls, version, flexible).build()
    return _encoders[key]


def smallest_size(kind: FieldKind | type[Struct], version: int, flexible: bool) -> int:
    """The fewest bytes that one element can take: bounds what a hostile array length may ask for."""
    if isinstance(kind, FieldKind):
        return struct.calcsize(">" + kind.letter) if kind.letter else _smallest_length(kind, flexible)
    total = 1 if flexible else 0
    for field in fields_of(kind):
        if version not in field.present or field.is_tagged(version):
            continue
        if field.is_array:
            total += 1 if flexible else 4
        elif not isinstance(field.kind, FieldKind) and version in field.null:
            total += 1
        else:
            total += smallest_size(field.kind, version, flexible)
    return max(total, 1)


def _smallest_length(kind: FieldKind, flexible: bool) -> int:
    return 1 if flexible else 2 if kind.name == "string" else 4


class _DecoderWriter:
    """Writes the decoder of one struct in one version."""

    def __init__(self, cls: type[Struct], version: int, flexible: bool) -> None:
        self.cls, self.version, self.flexible = cls, version, flexible
        self.code = _Code()
        self.code.names["Target"] = cls

    def build(self) -> Decoder:
        plain = [f for f in fields_of(self.cls) if self.version in f.present and not f.is_tagged(self.version)]
        self.code.add(0, "def decode(buf, pos, end):")
        run: list[Field] = []
        for field in plain:
            if self._is_number(field):
                run.append(field)
                continue
            self._numbers(run)
            run = []
            self._value(field, 1, f"v_{field.name}")
        self._numbers(run)
        arguments = ", ".join(f"{f.name}=v_{f.name}" for f in plain)
        if self.flexible:
            self._tags()
            arguments += ", **tagged" if arguments else "**tagged"
        self.code.add(1, f"return Target({arguments}), pos")
        return typing.cast(Decoder, self.code.build("decode"))

    def _is_number(self, field: Field) -> bool:
        return not field.is_array and isinstance(field.kind, FieldKind) and bool(field.kind.letter)

    def _numbers(self, run: list[Field]) -> None:
        if not run:
            return
        layout = struct.Struct(">" + "".join(typing.cast(FieldKind, f.kind).letter for f in run))
        reader = self.code.name("read", layout.unpack_from)
        targets = ", ".join(f"v_{f.name}" for f in run)
        self.code.add(1, f"{targets}, = {reader}(buf, pos)", f"pos += {layout.size}")

    def _tags(self) -> None:
        known = {}
        for field in fields_of(self.cls):
            if field.is_tagged(self.version) and self.version in field.present:
                known[typing.cast(Tag, field.tag).number] = self._tag_reader(field)
        table = self.code.name("tags", known)
        self.code.add(1, "tagged = {}")
        self.code.add(1, "if buf[pos] == 0:", "    pos += 1", "else:")
        self.code.add(2, f"pos = skip_tags(buf, pos, end, {table}, tagged)")

    def _tag_reader(self, field: Field) -> Callable[..., int]:
        inner = _DecoderWriter(self.cls, self.version, self.flexible)
        inner.code.add(0, "def read_tag(buf, pos, end, tagged):")
        inner._value(field, 1, "value")
        inner.code.add(1, f"tagged[{field.name!r}] = value", "return pos")
        return typing.cast(Callable[..., int], inner.code.build("read_tag"))

    def _value(self, field: Field, depth: int, target: str) -> None:
        if field.is_array:
            self._array(field, depth, target)
        elif isinstance(field.kind, FieldKind) and field.kind.letter:
            self._number(field.kind, depth, target)
        elif isinstance(field.kind, FieldKind):
            self._bytes(field.kind, field, depth, target)
        else:
            self._struct(field, depth, target)

    def _number(self, kind: FieldKind, depth: int, target: str) -> None:
        layout = struct.Struct(">" + kind.letter)
        reader = self.code.name("read", layout.unpack_from)
        self.code.add(depth, f"{target}, = {reader}(buf, pos)", f"pos += {layout.size}")

    def _length(self, field: Field, depth: int, letter: str) -> None:
        """Leaves the length in `n`, -1 for null."""
        if self.flexible:
            self.code.add(depth, "n = buf[pos]", "pos += 1")
            self.code.add(depth, "if n > 127:", "    n, pos = uvarint(buf, pos - 1)", "n -= 1")
        else:
            reader = self.code.name("read", struct.Struct(">" + letter).unpack_from)
            self.code.add(depth, f"n, = {reader}(buf, pos)", f"pos += {struct.calcsize('>' + letter)}")
        self.code.add(depth, "if n < 0:")
        where = f"'{self.cls.__name__}.{field.name}'"
        if self.version in field.null:
            self.code.add(depth + 1, f"if n < -1: raise negative({where}, n)")
        else:
            self.code.add(depth + 1, f"raise null({where}) if n == -1 else negative({where}, n)")

    def _bytes(self, kind: FieldKind, field: Field, depth: int, target: str) -> None:
        self._length(field, depth, "h" if kind.name == "string" else "i")
        where = f"'{self.cls.__name__}.{field.name}'"
        if self.version in field.null:
            self.code.add(depth + 1, f"{target} = None")
            self.code.add(depth, "else:")
            depth += 1
        make = {
            "string": "str(buf[pos:pos + n], 'utf-8')",
            "bytes": "bytes(buf[pos:pos + n])",
            "records": "buf[pos:pos + n]",
        }
        self.code.add(depth, f"if n > end - pos: raise short({where}, n, end - pos)")
        self.code.add(depth, f"{target} = {make[kind.name]}", "pos += n")

    def _struct(self, field: Field, depth: int, target: str) -> None:
        reader = self.code.name(
            "decode", decoder_of(typing.cast(type[Struct], field.kind), self.version, self.flexible)
        )
        if self.version in field.null:
            self.code.add(depth, "mark, pos = buf[pos], pos + 1", f"if mark >= 128: {target} = None", "else:")
            depth += 1
        self.code.add(depth, f"{target}, pos = {reader}(buf, pos, end)")

    def _array(self, field: Field, depth: int, target: str) -> None:
        self._length(field, depth, "i")
        where = f"'{self.cls.__name__}.{field.name}'"
        if self.version in field.null:
            self.code.add(depth + 1, f"{target} = None")
            self.code.add(depth, "else:")
            depth += 1
        least = smallest_size(field.kind, self.version, self.flexible)
        self.code.add(depth, f"if n * {least} > end - pos: raise short({where}, n * {least}, end - pos)")
        kind = field.kind
        if isinstance(kind, FieldKind) and kind.letter and kind.letter != "16s":
            size = struct.calcsize(">" + kind.letter)
            self.code.add(
                depth, f"{target} = list(unpack_from(f'>{{n}}{kind.letter}', buf, pos))", f"pos += n * {size}"
            )
            return
        self.code.add(depth, f"{target} = []", "for _ in range(n):")
        item = Field(field.name, kind, False, field.present, VersionRange(0, -1), None, False, None)
        self._value(item, depth + 1, "item")
        self.code.add(depth + 1, f"{target}.append(item)")


class _EncoderWriter:
    """Writes the encoder of one struct in one version."""

    def __init__(self, cls: type[Struct], version: int, flexible: bool) -> None:
        self.cls, self.version, self.flexible = cls, version, flexible
        self.code = _Code()

    def build(self) -> Encoder:
        self.code.add(0, "def encode(obj, put):")
        self.code.add(1, "pass")
        run: list[Field] = []
        for field in fields_of(self.cls):
            if self.version not in field.present:
                self._refuse_if_set(field)
            elif not field.is_tagged(self.version):
                if not field.is_array and isinstance(field.kind, FieldKind) and field.kind.letter:
                    run.append(field)
                    continue
                self._numbers(run)
                run = []
                self._value(field, 1, f"obj.{field.name}", "put")
        self._numbers(run)
        if self.flexible:
            self._tags()
        return typing.cast(Encoder, self.code.build("encode"))

    def _refuse_if_set(self, field: Field) -> None:
        if field.is_ignorable:
            return
        default = self.code.name("default", field.default)
        self.code.add(1, f"if obj.{field.name} != {default}:")
        self.code.add(2, f"raise dropped({self.cls.__name__!r}, {field.name!r}, {self.version}, obj.{field.name})")

    def _numbers(self, run: list[Field]) -> None:
        if not run:
            return
        layout = struct.Struct(">" + "".join(typing.cast(FieldKind, f.kind).letter for f in run))
        writer = self.code.name("write", layout.pack)
        self.code.add(1, f"put({writer}({', '.join(f'obj.{f.name}' for f in run)}))")

    def _tags(self) -> None:
        tagged = [f for f in fields_of(self.cls) if self.version in f.present and f.is_tagged(self.version)]
        if not tagged:
            self.code.add(1, r"put(b'\0')")
            return
        self.code.add(1, "present = []")
        for field in sorted(tagged, key=lambda f: typing.cast(Tag, f.tag).number):
            default = self.code.name("default", field.default)
            self.code.add(1, f"if obj.{field.name} != {default}:", "    parts = []", "    put_part = parts.append")
            self._value(field, 2, f"obj.{field.name}", "put_part")
            self.code.add(2, f"present.append(({typing.cast(Tag, field.tag).number}, parts))")
        self.code.add(1, "put_tags(put, present)")

    def _value(self, field: Field, depth: int, value: str, put: str) -> None:
        if field.is_array:
            self._array(field, depth, value, put)
        elif isinstance(field.kind, FieldKind) and field.kind.letter:
            writer = self.code.name("write", struct.Struct(">" + field.kind.letter).pack)
            self.code.add(depth, f"{put}({writer}({value}))")
        elif isinstance(field.kind, FieldKind):
            self._bytes(field.kind, field, depth, value, put)
        else:
            self._struct(field, depth, value, put)

    def _length(self, letter: str) -> str:
        if self.flexible:
            return "put_uvarint(n + 1)"
        return f"{self.code.name('write', struct.Struct('>' + letter).pack)}(n)"

    def _null(self, field: Field, letter: str, depth: int, value: str, put: str) -> int:
        """Writes the null case; the depth of the other case."""
        if self.version not in field.null:
            message = f"{self.cls.__name__}.{field.name} may not be null in version {self.version}"
            self.code.add(depth, f"if {value} is None: raise EncodeError({message!r})")
            return depth
        marker = b"\0" if self.flexible else struct.pack(">" + letter, -1)
        self.code.add(depth, f"if {value} is None: {put}({marker!r})", "else:")
        return depth + 1

    def _bytes(self, kind: FieldKind, field: Field, depth: int, value: str, put: str) -> None:
        letter = "h" if kind.name == "string" else "i"
        depth = self._null(field, letter, depth, value, put)
        length = self._length(letter)
        if kind.name == "records":
            self.code.add(
                depth, f"n, chunks = parts_of({value})", f"{put}({length})", f"for chunk in chunks: {put}(chunk)"
            )
            return
        encode = ".encode()" if kind.name == "string" else ""
        self.code.add(depth, f"data = {value}{encode}", "n = len(data)")
        self.code.add(depth, f"{put}({length} + data)" if kind.name == "string" else f"{put}({length}); {put}(data)")

    def _struct(self, field: Field, depth: int, value: str, put: str) -> None:
        writer = self.code.name(
            "encode", encoder_of(typing.cast(type[Struct], field.kind), self.version, self.flexible)
        )
        if self.version in field.null:
            self.code.add(depth, f"if {value} is None: {put}(b'\\xff')", "else:")
            depth += 1
            self.code.add(depth, f"{put}(b'\\x01')")
        self.code.add(depth, f"{writer}({value}, {put})")

    def _array(self, field: Field, depth: int, value: str, put: str) -> None:
        depth = self._null(field, "i", depth, value, put)
        self.code.add(depth, f"items = {value}", "n = len(items)", f"{put}({self._length('i')})")
        kind = field.kind
        if isinstance(kind, FieldKind) and kind.letter and kind.letter != "16s":
            self.code.add(depth, f"{put}(pack(f'>{{n}}{kind.letter}', *items))")
            return
        self.code.add(depth, "for item in items:")
        item = Field(field.name, kind, False, field.present, VersionRange(0, -1), None, False, None)
        self._value(item, depth + 1, "item", put)
