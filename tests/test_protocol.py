"""dtorch/protocol.py and native/common/protocol.h say the same, and every kind is handled by whoever receives it."""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from pathlib import Path

import pytest

from dtorch import protocol
from dtorch.protocol import Message, Record, Trace

ROOT = Path(__file__).resolve().parent.parent
HEADER = (ROOT / "native" / "common" / "protocol.h").read_text()

CONTROLLER = ("dtorch/controller/*.py",)
WORKER = ("native/worker/*.cpp", "native/worker/*.h")
CLIENT = ("native/client/*.cpp", "dtorch/client/*.py")

#: Who handles what is said in each direction (a message's tens digit).
RECEIVERS = {0: CONTROLLER, 1: WORKER, 2: CONTROLLER, 3: CLIENT}
#: A worker's messages that the client handles; the controller passes them on, and looks into PROGRESS itself.
PASSED_ON = {Message.PROGRESS, Message.VALUE, Message.META, Message.DONE, Message.ERROR, Message.RETURNED}


def _cpp_enum(name: str) -> dict[str, int]:
    body = re.search(rf"enum class {name}\s*:\s*\w+\s*\{{(.*?)\}};", HEADER, re.DOTALL)
    assert body, f"protocol.h has no enum class {name}"
    return {member: int(value) for member, value in re.findall(r"(\w+)\s*=\s*(\d+)", body[1])}


def _cpp_constant(name: str) -> int:
    found = re.search(rf"constexpr \w+ {name} = ([\d *]+);", HEADER)
    assert found, f"protocol.h has no constant {name}"
    product = 1
    for factor in found[1].split("*"):
        product *= int(factor)
    return product


def _code(patterns: tuple[str, ...]) -> str:
    """The receivers' sources without comments, in which a name counts as handled."""
    files = sorted(file for pattern in patterns for file in ROOT.glob(pattern))
    assert files, f"no sources match {patterns}"
    return _without_comments("\n".join(file.read_text() for file in files))


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/|#[^\n]*|\"\"\".*?\"\"\"", "", text, flags=re.DOTALL)


def _handles(code: str, kind: IntEnum) -> bool:
    return re.search(rf"\b{type(kind).__name__}(?:::|\.){kind.name}\b", code) is not None


@pytest.mark.parametrize("enum", [Message, Record, Trace])
def test_both_languages_number_the_kinds_alike(enum: type[IntEnum]) -> None:
    assert _cpp_enum(enum.__name__) == {kind.name: kind.value for kind in enum}


def test_both_languages_number_the_extension_types_alike() -> None:
    ours = {name.removeprefix("EXT_"): value for name, value in vars(protocol).items() if name.startswith("EXT_")}
    assert _cpp_enum("Ext") == ours


@pytest.mark.parametrize(
    ("python", "cpp"),
    [
        ("VERSION", "kVersion"),
        ("INLINE_BYTES", "kInlineBytes"),
        ("DIRECT_BYTES", "kDirectBytes"),
        ("FLAG_CONJ", "kFlagConj"),
        ("FLAG_NEG", "kFlagNeg"),
        ("TRACE_MESSAGE", "kTraceMessage"),
    ],
)
def test_both_languages_have_the_same_constants(python: str, cpp: str) -> None:
    assert _cpp_constant(cpp) == getattr(protocol, python)


def test_both_languages_lay_trace_events_out_alike() -> None:
    body = re.search(r"struct TraceEvent \{(.*?)\};", HEADER, re.DOTALL)
    assert body
    letters = {"uint64_t": "Q", "uint32_t": "I", "int8_t": "b", "uint8_t": "B", "uint16_t": "H"}
    fields, layout = [], "<"
    for kind, names in re.findall(r"(\w+) ([\w, ]+);", body[1]):
        fields += names.split(", ")
        layout += letters[kind] * len(names.split(", "))
    assert " ".join(fields) == protocol.TRACE_FIELDS
    assert layout == protocol.TRACE_EVENT
    assert f"sizeof(TraceEvent) == {struct.calcsize(layout)}" in HEADER


@pytest.mark.parametrize(
    ("enum", "table"),
    [
        (Message, protocol.MESSAGE_FIELDS),
        (Message, protocol.MESSAGE_DOCS),
        (Record, protocol.RECORD_FIELDS),
        (Record, protocol.RECORD_DOCS),
        (Trace, protocol.TRACE_DOCS),
    ],
)
def test_every_kind_has_fields_and_a_sentence(enum: type[IntEnum], table: dict[IntEnum, str]) -> None:
    assert list(table) == list(enum)
    if table in (protocol.MESSAGE_DOCS, protocol.RECORD_DOCS, protocol.TRACE_DOCS):
        assert all(text.endswith(".") for text in table.values())


@pytest.mark.parametrize("kind", list(Message), ids=lambda kind: kind.name)
def test_every_message_is_handled_by_its_receiver(kind: Message) -> None:
    receiver = CLIENT if kind in PASSED_ON else RECEIVERS[kind // 10]
    assert _handles(_code(receiver), kind), f"{kind.name} is not mentioned in {' '.join(receiver)}"


def test_the_controller_looks_into_progress() -> None:
    assert _handles(_code(CONTROLLER), Message.PROGRESS)


@pytest.mark.parametrize("kind", list(Record), ids=lambda kind: kind.name)
def test_every_record_is_handled_by_the_worker(kind: Record) -> None:
    assert _handles(_code(WORKER), kind), f"{kind.name} is not mentioned in {' '.join(WORKER)}"


def test_a_kind_nobody_handles_is_noticed() -> None:
    class Message(IntEnum):
        UNHEARD_OF = 99

    assert not _handles(_code(CONTROLLER + WORKER + CLIENT), Message.UNHEARD_OF)


def test_a_kind_that_only_a_comment_names_is_not_handled() -> None:
    class Message(IntEnum):
        HELLO = 1

    comments = ["// Message::HELLO opens", "/* Message::HELLO */", "# Message.HELLO opens", '"""Message.HELLO"""']
    assert not any(_handles(_without_comments(text), Message.HELLO) for text in comments)
    assert _handles("case Message::HELLO:", Message.HELLO)
    assert _handles("if kind == Message.HELLO:", Message.HELLO)
