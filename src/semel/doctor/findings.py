"""What the doctor can find, by name. Alert rules and tests use the same names."""

from __future__ import annotations

import re
import shlex
from enum import Enum

import msgspec


class Certainty(Enum):
    """How sure a finding is."""

    CERTAIN = "certain"  # follows from what the brokers say
    LIKELY = "likely"  # the ordinary explanation of what they say
    POSSIBLE = "possible"  # depends on something that a broker does not know


class Ailment(msgspec.Struct, frozen=True):
    title: str
    meaning: str


AILMENTS: dict[str, Ailment] = {
    "hanging-transaction": Ailment(
        "A transaction that no coordinator knows is open in a partition",
        "No timeout ends it: the last stable offset stays where it is, and readers of committed data get nothing more "
        "from this partition.",
    ),
    "long-transaction": Ailment(
        "A transaction is open for very long",
        "Readers of committed data wait for its end, also those of other producers' records in the same partitions.",
    ),
    "prepared-transaction": Ailment(
        "A prepared transaction (two-phase commit) is not finished by anybody",
        "It has no timeout. Until its owner comes back and ends it as its database says, readers of committed data "
        "wait.",
    ),
    "unfinished-decision": Ailment(
        "A transaction is decided, but its markers are not written",
        "The coordinator cannot write to one of its partitions. Readers of committed data wait.",
    ),
    "fenced-again": Ailment(
        "A replaced producer is refused again and again",
        "Two programs use one transactional id and take it from each other, or one that was replaced still runs.",
    ),
    "unstable-offsets": Ailment(
        "Offsets of a group are pending in an open transaction",
        "A member that starts now waits until that transaction ends: OffsetFetch says UNSTABLE_OFFSET_COMMIT.",
    ),
    "group-behind-transaction": Ailment(
        "A group has read all that is committed, and an open transaction hides the rest",
        "Its lag grows although its members are well. They go on when the transaction ends.",
    ),
    "group-out-of-range": Ailment(
        "A group's committed offset is not in the log",
        "Records were deleted before the group read them, or the topic was made anew. auto.offset.reset decides where "
        "it goes on: records are skipped or read again.",
    ),
    "autocommit-beside-transactions": Ailment(
        "A group's offsets are committed both by transactions and by a consumer",
        "A consumer with enable.auto.commit=true (or a commit by hand) moves offsets outside of the transaction: after "
        "a crash records are lost or processed twice.",
    ),
    "leaking-ids": Ailment(
        "Very many transactional ids have names that differ in a random part only",
        "A program makes a new id at every start or batch. What a dead instance left open is aborted by its timeout "
        "only, and the coordinator keeps every id for transactional.id.expiration.ms.",
    ),
    "worn-out-epoch": Ailment(
        "A producer has used up nearly all of its epochs",
        "A producer without transactions takes a new epoch after each failed batch, and one with transactions of the "
        "first generation at each start: thirty thousand of them mean that it fails, or starts, in a loop.",
    ),
    "timeout-too-short": Ailment(
        "Batches take nearly as long as their transaction may",
        "A batch that exceeds transaction.timeout.ms is aborted by the coordinator, and fails again when it runs "
        "again.",
    ),
    "ledger-misfit": Ailment(
        "A ledger does not fit the topics that it describes",
        "The sink refuses to go on, or writes to a topic that does not hold what the ledger says.",
    ),
    "unverified-writes": Ailment(
        "The broker takes the first write of a transaction unverified",
        "With transaction.partition.verification.enable=false a late write of the first generation opens a transaction "
        "that nobody ends (KIP-890).",
    ),
    "at-risk": Ailment(
        "Settings of the cluster allow acknowledged records to be lost",
        "Exactly-once holds for what the cluster keeps.",
    ),
}


def shell_word(text: str) -> str:
    """A word as a shell takes it: as $'...', which bash and zsh know, where it has characters that cannot be seen."""
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_SHELL_WORD = re.compile(r"""(?:\$'(?:[^'\\]|\\.)*'|'[^']*'|"[^"]*"|[^\s'"])+""")


def with_options(cure: str, options: str) -> str:
    """A command line with how to reach the cluster: before the word `--`, which may also stand in a name."""
    end = next((word.start() - 1 for word in _SHELL_WORD.finditer(cure) if word[0] == "--"), len(cure))
    return f"{cure[:end]}{options}{cure[end:]}"


class Diagnosis(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    name: str  # of AILMENTS
    where: str  # the transactional id, partition or group that it is about
    certainty: Certainty
    seen: str  # the facts
    cure: str  # a command line, or what to do where no command can do it
    is_command: bool = True

    @property
    def title(self) -> str:
        return AILMENTS[self.name].title

    @property
    def meaning(self) -> str:
        return AILMENTS[self.name].meaning
