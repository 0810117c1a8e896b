"""The demo's input: customers' questions, edge cases that must work, and records that must be refused.

Every record says in its header ``expect`` how it has to end, so that the books can be checked from the topics alone:
``succeeded``, ``failed``, a class, or ``bad_record/<rule>``; several with ``|`` between them.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import NamedTuple

from batchferry.cli.demo.ports import OPENAI, Body, Port

SECOND_SLICE = "second-opinion"
"""Slice of every tenth question, which asks the port's second model: a second batch key."""
EXPECT = "expect"
INTENT = "intent"
"""Header with the data set's own label, to compare the answer with; a business header that comes back untouched."""
LONG_CHARS = 560_000
"""More tokens than the simulated model's context holds, and still below Kafka's default record size."""
FUTURE_S = 20 * 3600
ALWAYS_FAILS = "Please fail every time"
"""The scenario answers 500 to this question however often it is asked."""


class Item(NamedTuple):
    """One record to produce; ``ahead_s`` is added to its timestamp."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    ahead_s: float = 0.0


def items(port: Port = OPENAI) -> list[Item]:
    """Everything in the order it is produced: most questions first, the odd ones among the last."""
    asked = list(questions(port))
    return [*asked[:-40], *edge_cases(port), *bad_records(port), *asked[-40:]]


def questions(port: Port = OPENAI) -> Iterator[Item]:
    """The data set's questions."""
    text = resources.files("batchferry.cli").joinpath("data/banking77.csv").read_text(encoding="utf-8")
    found = list(csv.DictReader(io.StringIO(text, newline="")))
    intents = sorted({row["category"] for row in found})
    for number, row in enumerate(found):
        second = number % 10 == 9
        yield _item(
            port,
            f"q-{number:05}",
            port.body(port.models[second], _instruction(intents), row["text"]),
            "succeeded|failed",
            (INTENT, row["category"].encode()),
            *([("slice", SECOND_SLICE.encode())] if second else []),
        )


def edge_cases(port: Port = OPENAI) -> Iterator[Item]:
    """Unusual and lawful: each must be answered, or fail at the provider for what it is."""
    succeeds = "succeeded|failed"  # the simulated provider refuses a few of any kind

    def ask(question: str) -> Body:
        return port.body(port.models[0], _instruction(), question)

    def item(custom_id: str, body: Body, expect: str, *headers: tuple[str, bytes]) -> Item:
        return _item(port, custom_id, body, expect, *headers)

    yield item("edge-empty", ask(""), succeeds)
    yield item("edge-too-long", ask("How do I find my card? " * (LONG_CHARS // 23)), port.too_long)
    yield item("edge-long", ask("My card does not work. " * 2_000), succeeds)
    yield item(
        "edge-control", ask("tab\tbell\x07 nul\x00 escape\x1b[31m line\nbreak\r\n del\x7f next\x85line"), succeeds
    )
    yield item("edge-separators", ask("one\u2028two\u2029three, and \ufeff in the middle"), succeeds)
    yield item("edge-emoji", ask("Where is my 💳? 👩‍👩‍👧‍👦 🏳️‍🌈 paid 💶 but no 🧾 came 🤷🏽‍♀️"), succeeds)
    yield item("edge-chinese", ask("我的银行卡什么时候到？我已经等了两个星期了。"), succeeds)  # noqa: RUF001
    yield item("edge-arabic", ask("أين بطاقتي؟ \u202eright to left\u202c"), succeeds)
    yield item("edge-" + "🦜ключ" * 60, ask("A custom_id of three hundred characters."), succeeds)
    yield item('edge "quoted" \\ and\nbroken', ask("A custom_id with quotes and a line break."), succeeds)
    yield item("edge-fails", ask(ALWAYS_FAILS), "transient")
    body = ask("The body is printed over many lines, and has numbers no double holds.")
    pretty = json.dumps({"custom_id": "edge-pretty", "body": body}, indent=2, ensure_ascii=False)
    numbers = pretty.replace(*port.odd_numbers)
    yield Item(b"edge-pretty", numbers.replace("\n", "\r\n").encode(), _headers(succeeds))
    event: Body = {"specversion": "1.0", "id": "e1", "source": "/demo", "type": "ask"}
    event["data"] = {"custom_id": "edge-event", "body": ask("A structured CloudEvent.")}
    yield Item(b"edge-event", _json(event), (*_headers(succeeds), ("content-type", b"application/cloudevents+json")))
    traced = ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    yield item("edge-traced", ask("Who follows me?"), succeeds, traced, ("sla", b"PT48H"))
    again = ask("Sent twice by a producer that did not hear the answer.")
    yield item("edge-twice", again, succeeds)
    yield item("edge-twice", again, f"duplicate|{succeeds}")
    yield item("edge-reused", ask("The same custom_id ..."), succeeds)
    yield item("edge-reused", ask("... with another body: both are asked."), succeeds)


def bad_records(port: Port = OPENAI) -> Iterator[Item]:
    """Each breaks one rule and must end as one failure that names it."""
    body = port.body(port.models[0], _instruction(), "What is wrong with me?")
    line = port.plain_line("bad", body)

    def bad(rule: str, value: bytes | None, *more: tuple[str, bytes], ahead_s: float = 0.0) -> Item:
        other = "|succeeded|failed" if ahead_s else ""  # a slow start may let the future become the present
        return Item(f"bad-{rule}".encode(), value, (*_headers(f"bad_record/{rule}{other}"), *more), ahead_s)

    def changed(**members: object) -> bytes:
        return _json({name: value for name, value in {**line, **members}.items() if value is not ...})

    yield bad("tombstone", None)
    yield bad("empty", b"   ")
    yield bad("bom", b"\xef\xbb\xbf" + _json(line))
    yield bad("not_utf8", _json(line).replace(b"wrong", b"wr\xffng"))
    yield bad("not_json", b"{'custom_id': 'python is not json'}")
    yield bad("trailing_data", _json(line) + b" " + _json(line))
    yield bad("lone_surrogate", _json(line).replace(b"wrong", b"wr\\ud83dng"))
    yield bad("too_deep", changed(body={**body, "metadata": _nested(300)}))
    yield bad("not_object", b'["custom_id", "bad"]')
    yield bad("duplicate_member", _json(line)[:-1] + b',"custom_id":"again"}')
    yield bad("missing_custom_id", changed(custom_id=...))
    yield bad("custom_id_type", changed(custom_id=42))
    yield bad("custom_id_empty", changed(custom_id=""))
    yield bad("method_not_post", changed(method="GET"))
    yield bad("url_is_absolute", changed(url=f"https://provider.example{port.endpoint}"))
    yield bad("unknown_endpoint", changed(url="/v1/images/generations"))
    yield bad("missing_body", changed(body=...))
    yield bad("body_not_object", changed(body=json.dumps(body)))
    yield bad("missing_model", changed(body={**body, "model": ""}))
    yield bad("missing_input", changed(body={name: body[name] for name in body if name != port.input_member}))
    yield bad("wrong_type", changed(body=port.wrong_type(body)))
    yield bad("streaming", changed(body={**body, "stream": True}))
    yield bad("bad_header", _json(line), ("sla", b"soon"))
    yield bad("timestamp_future", _json(line), ahead_s=FUTURE_S)


def _item(port: Port, custom_id: str, body: Body, expect: str, *headers: tuple[str, bytes]) -> Item:
    return Item(custom_id.encode(), _json(port.line(custom_id, body)), (*_headers(expect), *headers))


def _headers(expect: str) -> tuple[tuple[str, bytes], ...]:
    return ((EXPECT, expect.encode()),)


def _instruction(intents: Iterable[str] = ()) -> str:
    names = " ".join(intents) or "card_arrival lost_or_stolen_card top_up_failed something_else"
    return f"Which of these intents is the customer's question? Answer with its name alone.\n{names}"


def _nested(levels: int) -> object:
    value: object = "core"
    for _ in range(levels):
        value = [value]
    return value


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
