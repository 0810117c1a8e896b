"""How a request that is too long is cut into requests of their own."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from batchferry.domain import plugins, splitting
from batchferry.domain.errors import ConfigError
from batchferry.domain.requests import Request, RequestRules, estimate_tokens, parse_request
from batchferry.domain.splitting import (
    GROUP,
    MAX_PARTS,
    NotSplit,
    Part,
    PlainTextSplitter,
    depth_of,
    load_splitter,
    make_parts,
    part_custom_id,
    part_headers,
    plain_text,
    source_of,
)

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
DUE = datetime(2026, 1, 31, 18, tzinfo=UTC)
ROOT = Path(__file__).parents[3]


def chat(text: object, before: Sequence[dict] = (), after: Sequence[dict] = (), **members: object) -> bytes:
    """A chat completion whose last user message is ``text``."""
    messages = [*before, {"role": "user", "content": text}, *after]
    return json.dumps({"model": "m", "messages": messages, **members}, ensure_ascii=False).encode()


def texts(parts: Sequence[bytes] | None) -> list[str]:
    """The text of each part's last user message."""
    assert parts is not None
    found = []
    for part in parts:
        said = [message["content"] for message in json.loads(part)["messages"] if message["role"] == "user"]
        found.append(said[-1])
    return found


def cut(text: str, max_tokens: int) -> list[str]:
    """The texts a long user message is cut into."""
    return texts(plain_text.split(chat(text), CHAT, max_tokens))


def request(text: str = "word " * 400, headers: Sequence[tuple[str, bytes | None]] = (), **record: object) -> Request:
    """An accepted record."""
    value = json.dumps({"custom_id": "r1", "url": CHAT, "body": json.loads(chat(text)), **record}).encode()
    found = parse_request(value, headers)
    assert isinstance(found, Request)
    return found


def parts_of(parent: Request, **options: object) -> tuple[Part, ...] | NotSplit:
    """Cut it as a route would."""
    usual: dict = {"source": "in-0@7", "deadline": DUE, "splitter": plain_text, "max_tokens": 200, "max_depth": 3}
    return make_parts(parent, **(usual | options))


class Fixed:
    """A splitter that gives what it was made with, or raises it."""

    def __init__(self, gives: object) -> None:
        self.gives = gives

    def split(self, body: bytes, endpoint: str, max_tokens: int) -> Sequence[bytes] | None:
        """See ``Splitter``."""
        if isinstance(self.gives, Exception):
            raise self.gives
        return self.gives  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------ where it is cut


def test_paragraphs_are_kept_whole_where_they_can_be():
    """A cut stands behind the blank line, in the second half of the room."""
    paragraphs = [f"{name} " * 30 + "end.\n\n" for name in ("one", "two", "six", "ten")]
    found = cut("".join(paragraphs), 100)
    assert "".join(found) == "".join(paragraphs)
    assert all(text.endswith("end.\n\n") for text in found)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("sentence", "ends"),
    [
        ("This costs 3.14 a piece, e.g.here or there! ", "! "),
        ('He said: "Enough of this talk." ', '." '),
        ("这是一个很长的句子，没有空格。", "。"),
        ("「これは長い文です。」", "」"),
        ("क्या यह एक लंबा वाक्य है। ", "। "),
        ("هل هذه جملة طويلة؟ ", "؟ "),
        ("a line of a list without a mark\n", "\n"),
    ],
)
def test_without_paragraphs_sentences_are_kept_whole(sentence: str, ends: str):
    """In every script that has a mark for it, with closing quotes behind the mark, and lines of a list too."""
    text = sentence * 40
    found = cut(text, 200)
    assert len(found) > 1
    assert "".join(found) == text
    assert all(part.endswith(ends) for part in found)


def test_without_sentences_words_are_kept_whole():
    """A cut inside a word would make two wrong ones."""
    found = cut("several words without an end " * 60, 150)
    assert len(found) > 1
    assert all(part.endswith(" ") for part in found)


@pytest.mark.parametrize(
    "character",
    [
        "x",
        "汉",
        "\U0001f600",  # outside the basic plane: two halves in UTF-16
        "e\u0301",
        "\U0001f44d\U0001f3fd",  # a thumb with a skin tone
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",  # a family
        "\u2764\ufe0f",
        "\U0001f1e9\U0001f1ea",  # a flag of two letters
        "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",  # a flag of tags
        "\u1112\u1161\u11ab",  # a Korean syllable in pieces
        "नि",
        "\r\n",
    ],
)
def test_a_text_without_any_mark_is_cut_between_whole_characters(character: str):
    """What is drawn as one character stays in one part, wherever the room ends."""
    for max_tokens in range(120, 132):
        found = cut(character * 600, max_tokens)
        assert "".join(found) == character * 600
        assert all(part.replace(character, "") == "" for part in found)


def test_a_character_of_endless_marks_is_cut_all_the_same():
    """One letter with thousands of accents must not make a request uncuttable."""
    text = "e" + "\u0301" * 2_000
    found = cut(text, 300)
    assert "".join(found) == text
    assert len(found) > 1


def test_an_early_paragraph_is_no_reason_for_a_tiny_part():
    """A title above one endless paragraph stays with it: the cut stands behind a sentence instead."""
    found = cut("A title\n\n" + "And then it went on. " * 60, 150)
    assert len(found) == 3
    assert found[0].startswith("A title\n\nAnd then it went on. ")


def test_parts_use_their_room():
    """All but the last part are at least half full, so there are not many more of them than there must be."""
    body = chat("some words here. " * 2_000)
    parts = plain_text.split(body, CHAT, 1_000)
    assert parts is not None
    assert all(500 <= estimate_tokens(part) <= 1_000 for part in parts[:-1])
    assert len(parts) <= 2 * estimate_tokens(body) // 1_000


# ---------------------------------------------------------------------------------------------- what stays the same


def test_everything_but_the_text_is_the_same_token_for_token():
    """Numbers, escapes, the order of members and members that nobody knows are kept as the caller wrote them."""
    frame = (
        b'{"temperature":1.0,"seed":123456789012345678901234567890,"model":"m","messages":['
        b'{"role":"system","content":"caf\\u00e9 \\/ 1e400"},{"content":%b,"x":1.50,"role":"user"},'
        b'{"role":"assistant","content":"{"}],"stop":null,"new":{"a" : 1}}'
    )
    parts = plain_text.split(frame % json.dumps("word " * 400).encode(), CHAT, 200)
    assert parts is not None
    assert len(parts) > 1
    for part in parts:
        text = json.loads(part)["messages"][1]["content"]
        assert part == frame % json.dumps(text).encode()


def test_the_last_user_message_is_the_one_that_is_cut():
    """System prompt, examples and a beginning of the answer are repeated in every part."""
    before = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "an example"},
        {"role": "assistant", "content": "its answer"},
    ]
    after = [{"role": "assistant", "content": "{"}]
    parts = plain_text.split(chat("word " * 400, before, after), CHAT, 200)
    assert parts is not None
    for part in parts:
        messages = json.loads(part)["messages"]
        assert messages[:3] == before
        assert messages[4:] == after
    assert "".join(texts(parts)) == "word " * 400


@pytest.mark.parametrize(
    "input_",
    ["word " * 400, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "word " * 400}]],
)
def test_responses_are_cut_in_their_input(input_: object):
    """A text, or a list of plain messages."""
    body = {"model": "m", "instructions": "Be brief.", "input": input_}
    parts = plain_text.split(json.dumps(body).encode(), RESPONSES, 200)
    assert parts is not None
    found = [json.loads(part) for part in parts]
    assert {part["instructions"] for part in found} == {"Be brief."}
    said = [part["input"] if isinstance(input_, str) else part["input"][1]["content"] for part in found]
    assert "".join(said) == "word " * 400
    assert all(estimate_tokens(part) <= 200 for part in parts)


def test_messages_of_anthropic_are_cut_like_chat():
    """Their system prompt is a member of its own and stays."""
    body = json.loads(chat("word " * 400)) | {"system": "Be brief.", "max_tokens": 9}
    parts = plain_text.split(json.dumps(body).encode(), "/v1/messages", 200)
    assert "".join(texts(parts)) == "word " * 400
    assert {json.loads(part)["system"] for part in parts or ()} == {"Be brief."}


# --------------------------------------------------------------------------------------------- what is not cut


LONG = "word " * 400
TOOL_CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        (chat("short"), CHAT),
        (chat(LONG, [{"role": "system", "content": LONG}]), CHAT),
        (chat("short", [{"role": "system", "content": LONG}]), CHAT),
        (chat([{"type": "text", "text": LONG}]), CHAT),
        (chat([{"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": LONG}]), CHAT),
        (chat(LONG, [{"role": "system", "content": [{"type": "text", "text": "a"}]}]), CHAT),
        (chat(LONG, [TOOL_CALL]), CHAT),
        (chat(LONG, [{"role": "tool", "tool_call_id": "c", "content": "4"}]), CHAT),
        (chat(LONG, [{"role": "assistant", "content": None}]), CHAT),
        (chat(LONG, [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]), CHAT),
        (chat(None), CHAT),
        (json.dumps({"messages": [{"role": "system", "content": LONG}]}).encode(), CHAT),
        (json.dumps({"messages": [LONG]}).encode(), CHAT),
        (json.dumps({"messages": LONG}).encode(), CHAT),
        (json.dumps({"prompt": LONG}).encode(), "/v1/completions"),
        (json.dumps({"input": LONG}).encode(), "/v1/embeddings"),
        (json.dumps({"input": LONG, "previous_response_id": "resp_1"}).encode(), RESPONSES),
        (json.dumps({"input": LONG, "conversation": "conv_1"}).encode(), RESPONSES),
        (json.dumps({"input": [{"type": "item_reference", "id": "x"}]}).encode(), RESPONSES),
        (
            json.dumps({"input": [{"role": "user", "content": [{"type": "input_text", "text": LONG}]}]}).encode(),
            RESPONSES,
        ),
        (b'{"messages":[{"role":"user","content":"\\ud83d' + b"a" * 4_000 + b'"}]}', CHAT),
        (b"[]", CHAT),
        (b"", CHAT),
        (b"\xff", CHAT),
        (b'{"messages":' + b"[" * 5_000, CHAT),
    ],
)
def test_what_is_not_one_long_plain_text_is_left_alone(body: bytes, endpoint: str):
    """Nothing is guessed: what cannot be cut by the rule is not cut, and nothing is raised."""
    assert plain_text.split(body, endpoint, 200) is None


def test_tools_without_calls_do_not_stop_a_cut():
    """A forced tool is a common way to structured output over a long text."""
    parts = plain_text.split(chat(LONG, tools=[{"type": "function", "function": {"name": "f"}}]), CHAT, 200)
    assert "".join(texts(parts)) == LONG


def test_a_request_that_would_need_too_many_parts_is_not_cut():
    """Every part pays again for what is repeated, so their number is bounded."""
    body = chat("word " * 100_000)
    assert plain_text.split(body, CHAT, 200) is None
    found = plain_text.split(body, CHAT, 2_000)
    assert found is not None
    assert len(found) <= MAX_PARTS


def test_a_text_that_fits_after_its_escapes_are_counted_only():
    """Quotes and line ends cost two bytes in JSON, control characters six: the parts still fit."""
    text = '"\n\x00' * 900
    parts = plain_text.split(chat(text), CHAT, 300)
    assert "".join(texts(parts)) == text
    assert all(estimate_tokens(part) <= 300 for part in parts or ())


# ------------------------------------------------------------------------------------------------- the new records


def test_parts_are_lawful_records_that_say_whose_they_are():
    """Each has an id of its own, the same endpoint, the parent's headers and deadline, and its place in the row."""
    parent = request(headers=[("traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"), ("tenant", b"t")])
    parts = parts_of(parent)
    assert isinstance(parts, tuple)
    assert len(parts) > 1
    for number, part in enumerate(parts, 1):
        read = parse_request(part.value, part.headers)
        assert isinstance(read, Request)
        assert read.custom_id == part.custom_id == f"r1#part{number}"
        assert (read.url, read.model, read.deadline) == (CHAT, "m", DUE)
        assert read.tokens <= 200
        assert read.traceparent == parent.traceparent
        passed = dict(read.passed_headers)
        assert passed["tenant"] == b"t"
        assert (passed["parent"], passed["parent-id"]) == (b"in-0@7", b"r1")
        assert (passed["part"], passed["parts"]) == (str(number).encode(), str(len(parts)).encode())
        assert depth_of(read.passed_headers) == 1
    assert "".join(json.loads(part.value)["body"]["messages"][0]["content"] for part in parts) == "word " * 400


def test_parts_go_where_their_parent_went():
    """Account, slice and priority were read from the parent's headers; its SLA was not, for it would begin anew."""
    headers = [("sla", b"PT30H"), ("provider", b"acct"), ("slice", b"blue"), ("priority", b"now")]
    parts = parts_of(request(headers=headers))
    assert isinstance(parts, tuple)
    for part in parts:
        read = parse_request(part.value, part.headers)
        assert isinstance(read, Request)
        assert (read.account, read.slice, read.priority_now) == ("acct", "blue", True)
        assert (read.sla_s, read.deadline) == (None, DUE)


def test_parts_of_a_cloudevent_are_plain_records():
    """The data of a structured event is the request; its parts are no events and must not claim to be."""
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    event = {
        "specversion": "1.0",
        "traceparent": trace,
        "data": {"custom_id": "r1", "body": json.loads(chat("word " * 400))},
    }
    parent = parse_request(json.dumps(event).encode(), [("content-type", b"application/cloudevents+json")])
    assert isinstance(parent, Request)
    parts = parts_of(parent)
    assert isinstance(parts, tuple)
    for part in parts:
        read = parse_request(part.value, part.headers)
        assert isinstance(read, Request)
        assert read.traceparent == trace.encode()


def test_a_part_may_be_cut_again_but_not_for_ever():
    """The depth is counted in a header; the parts of a part name the part as their parent."""
    first = parts_of(request())
    assert isinstance(first, tuple)
    part = parse_request(first[0].value, first[0].headers)
    assert isinstance(part, Request)
    second = parts_of(part, source="in-0@9", max_tokens=90, max_depth=2)
    assert isinstance(second, tuple)
    assert second[0].custom_id == "r1#part1#part1"
    names = [name for name, _ in second[0].headers]
    assert len(names) == len(set(names))
    assert dict(second[0].headers)["parent"] == b"in-0@9"
    assert dict(second[0].headers)["parent-id"] == b"r1#part1"
    assert depth_of(second[0].headers) == 2
    assert parts_of(part, max_tokens=90, max_depth=1) is NotSplit.SPLIT_DEPTH


def test_an_id_too_long_for_its_suffix_is_a_reason_not_to_cut():
    """Shortening it could give two requests the same parts."""
    assert part_custom_id("a" * 1_018, 9) == "a" * 1_018 + "#part9"
    assert part_custom_id("a" * 1_018, 10) is None
    assert parts_of(request(custom_id="a" * 1_020)) is NotSplit.CUSTOM_ID_TOO_LONG


@pytest.mark.parametrize(
    ("gives", "reason"),
    [
        (None, NotSplit.NOT_CUTTABLE),
        ([], NotSplit.NOT_CUTTABLE),
        ([chat("one")], NotSplit.NOT_CUTTABLE),
        ([chat("one")] * (MAX_PARTS + 1), NotSplit.TOO_MANY_PARTS),
        ([chat("one"), b"{"], NotSplit.UNLAWFUL_PART),
        ([chat("one"), b'{"messages":[]}'], NotSplit.UNLAWFUL_PART),
        ([chat("one"), chat("two") + b',"url":"/v1/embeddings"'], NotSplit.UNLAWFUL_PART),
        ([chat("one"), "text"], NotSplit.SPLITTER_FAILED),
        (5, NotSplit.SPLITTER_FAILED),
        (RuntimeError("secret words"), NotSplit.SPLITTER_FAILED),
    ],
)
def test_a_foreign_splitter_can_spoil_nothing(gives: object, reason: NotSplit):
    """Whatever it gives or raises, the parent gets a reason and no unlawful record is written."""
    assert parts_of(request(), splitter=Fixed(gives)) is reason


def test_parts_that_would_be_refused_are_not_written():
    """A parent with as many headers as a record may have has no room for those of a part."""
    parent = request(headers=[(f"h{number}", b"x") for number in range(60)])
    assert parts_of(parent) is NotSplit.UNLAWFUL_PART
    assert isinstance(parts_of(parent, rules=RequestRules(max_headers=70)), tuple)


def test_headers_state_the_deadline_in_utc_and_replace_those_of_a_parent():
    """Names are compared as the reader does, without regard to case; other headers keep their place and value."""
    due = DUE.astimezone(timezone(timedelta(hours=2)))
    given = [("SLA", b"PT1H"), ("a", None), ("Deadline", b"x"), ("Part", b"9"), ("ce_id", b"e"), ("a", b"2")]
    assert part_headers(given, source_of("in", 3, 44), "id é", 2, 5, 1, due) == (
        ("a", None),
        ("ce_id", b"e"),
        ("a", b"2"),
        ("parent", b"in-3@44"),
        ("parent-id", "id é".encode()),
        ("part", b"2"),
        ("parts", b"5"),
        ("split-depth", b"1"),
        ("deadline", b"2026-01-31T18:00:00Z"),
    )


@pytest.mark.parametrize(
    ("headers", "depth"),
    [
        ((), 0),
        ((("split-depth", b"2"),), 2),
        ((("Split-Depth", b"2"), ("split-depth", b"3")), 3),
        ((("split-depth", b"-1"),), 0),
        ((("split-depth", b"two"),), 0),
        ((("split-depth", None),), 0),
        ((("split-depth", b"9" * 5_000),), 0),
    ],
)
def test_the_depth_is_read_back_or_is_none(headers: Sequence[tuple[str, bytes | None]], depth: int):
    """A header that is no count was not written by us."""
    assert depth_of(headers) == depth


# ---------------------------------------------------------------------------------------------------- loading


def offer(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Let packages offer splitters."""
    found = EntryPoints(EntryPoint(name.rstrip("_"), value, GROUP) for name, value in values.items())
    monkeypatch.setattr(plugins, "entry_points", lambda group: found.select(group=group))


def test_the_built_in_splitter_is_what_the_package_offers():
    """The name that routes use by default means the same object with and without the package's metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    offered = project["project"]["entry-points"][GROUP]
    assert offered.keys() == splitting._BUILT_IN.keys()
    for name, value in offered.items():
        assert EntryPoint(name, value, GROUP).load() is load_splitter(name)


def test_other_packages_add_theirs(monkeypatch: pytest.MonkeyPatch):
    """An object, or a class to make one of."""
    offer(monkeypatch, mine=f"{__name__}:OFFERED", made="batchferry.domain.splitting:PlainTextSplitter")
    assert load_splitter("mine") is OFFERED
    assert isinstance(load_splitter("made"), PlainTextSplitter)
    assert load_splitter("made") is not plain_text


OFFERED = Fixed(None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "no splitter 'nowhere'; known are: absent, broken, needy, plain_text, twice, wrong"),
        ("absent", "'absent' .* cannot be loaded: ModuleNotFoundError"),
        ("broken", "'broken' .* cannot be loaded: AttributeError"),
        ("needy", "'needy' .* cannot be loaded: TypeError"),
        ("wrong", "'wrong' .* has no method split"),
        ("twice", "'twice' is offered more than once"),
    ],
)
def test_a_splitter_that_cannot_be_had_is_a_fault_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, name: str, says: str
):
    """Told at start-up, with what there is."""
    offer(
        monkeypatch,
        absent="no_such_package_of_ours:splitter",
        broken="batchferry.domain.splitting:no_such_name",
        needy=f"{__name__}:Fixed",
        wrong="batchferry.domain.splitting:MAX_PARTS",
        twice="batchferry.domain.splitting:plain_text",
        twice_="batchferry.domain.splitting:PlainTextSplitter",
    )
    with pytest.raises(ConfigError, match=says):
        load_splitter(name)
