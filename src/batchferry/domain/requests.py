"""What an input record must be: the one place where a record is accepted, or refused with rule and remedy.

The value of a record is one provider batch line, ``{custom_id, method?, url?, body}``. Strictness is not
pedantry here: providers refuse a whole file for one bad line, so whatever could spoil a file (bytes that are
not UTF-8, a byte order mark, half a surrogate pair, ``stream: true``, a missing model) is refused before it meets
its neighbours.

How a record is read: msgspec decodes the few members that matter and checks the JSON of all it skips; it checks
neither the UTF-8 of skipped strings, nor repeated members of the line, nor depth, so these three are checked
here. Most records look alike, so the usual look has a quick way; a record that does not fit
it, for whatever reason, is read again carefully, and only there is a fault looked for and named. A number is
passed on as written, whatever its size. Members repeated inside ``body`` are not looked for.

What the body must be depends on the endpoint, in the family's own words: OpenAI's and Mistral's endpoints, Anthropic's
Messages (``MESSAGES_ENDPOINT``), Gemini's generateContent (``GENERATE_ENDPOINT``, both spellings of its members).

Two more lines are taken as they come, where an account of their family is configured:

- ``{custom_id, params}``: a row of an Anthropic batch; ``params`` is the body.
- ``{key, request}``: a line of a Gemini batch file; ``key`` is the custom_id, ``request`` the body. The model must
  stand in ``request.model``, where Gemini's own request has it: such a file does not say it, only its job does.

At Gemini's endpoint the model is named in the body and nowhere else; ``models/`` in front of it is no part of its name.

What happens to the parts of a record:

- ``body`` goes to the provider with every JSON token as it was; raw line breaks between tokens become spaces,
  because the provider's file has one request a line.
- Members other than those above are ignored.
- The headers ``sla``, ``deadline``, ``provider``, ``slice`` and ``priority`` are read and end here (the outcome
  states what came of them). Every other header is kept and passed on to the outcome.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import orjson

from batchferry.domain.times import parse_duration_s

DEFAULT_ENDPOINTS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/completions",
        "/v1/moderations",
    }
)

MESSAGES_ENDPOINT = "/v1/messages"
"""Where Anthropic's Messages stand; a record ``{custom_id, params}`` without a url means it."""
GENERATE_ENDPOINT = "/v1beta/models:generateContent"
"""Our one name for Gemini's native endpoint, whose real path holds the model."""

OWN_ENDPOINTS: Mapping[str, str] = {"anthropic": MESSAGES_ENDPOINT, "gemini": GENERATE_ENDPOINT}
"""Families of providers with an endpoint of their own; all others share OpenAI's."""

MAX_NAME_CHARS = 256
"""Longest model name, slice or account name: they become metric labels, file names and control keys."""
LINE_OVERHEAD_BYTES = 256
"""Room for everything of a provider's line that is not body or url: custom_id, method, quotes and braces."""
IMAGE_TOKENS = 1_600
"""What an inline image (or sound, or document) is counted as, instead of the length of its base64 text."""

_GENERATING = ("/completions", "/responses", "/messages", ":generateContent")
_MODELS_FOLDER = "models/"
"""In front of a Gemini model's name where Google writes it as a resource."""
_JSON_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"


class RecordRule(StrEnum):
    """Every rule an input record can break; ``REMEDIES`` says what to do about each."""

    TOMBSTONE = "tombstone"
    EMPTY = "empty"
    TOO_LARGE = "too_large"
    BOM = "bom"
    NOT_UTF8 = "not_utf8"
    NOT_JSON = "not_json"
    TRAILING_DATA = "trailing_data"
    LONE_SURROGATE = "lone_surrogate"
    TOO_DEEP = "too_deep"
    NOT_OBJECT = "not_object"
    DUPLICATE_MEMBER = "duplicate_member"
    CLOUDEVENT_SHAPE = "cloudevent_shape"
    SHAPE_NOT_SUPPORTED = "shape_not_supported"
    MISSING_CUSTOM_ID = "missing_custom_id"
    CUSTOM_ID_TYPE = "custom_id_type"
    CUSTOM_ID_EMPTY = "custom_id_empty"
    CUSTOM_ID_TOO_LONG = "custom_id_too_long"
    METHOD_NOT_POST = "method_not_post"
    URL_IS_ABSOLUTE = "url_is_absolute"
    UNKNOWN_ENDPOINT = "unknown_endpoint"
    MISSING_BODY = "missing_body"
    BODY_NOT_OBJECT = "body_not_object"
    MISSING_MODEL = "missing_model"
    MISSING_INPUT = "missing_input"
    WRONG_TYPE = "wrong_type"
    STREAMING = "streaming"
    BAD_HEADER = "bad_header"
    TIMESTAMP_MISSING = "timestamp_missing"
    TIMESTAMP_FUTURE = "timestamp_future"
    MISSING_MAX_TOKENS = "missing_max_tokens"
    NOT_IN_A_BATCH = "not_in_a_batch"
    NOT_MASKABLE = "not_maskable"


REMEDIES: Mapping[RecordRule, str] = {
    RecordRule.TOMBSTONE: "send the request as the record's value; a null value asks for nothing",
    RecordRule.EMPTY: "skip blank lines when producing a file line by line",
    RecordRule.TOO_LARGE: "shorten the request or split it into several records",
    RecordRule.BOM: "write the text as UTF-8 without a byte order mark (in Python: encoding='utf-8', not 'utf-8-sig')",
    RecordRule.NOT_UTF8: "encode the value as UTF-8 before producing it",
    RecordRule.NOT_JSON: "send one JSON object as RFC 8259 has it (no NaN, no comments, no trailing commas)",
    RecordRule.TRAILING_DATA: "send exactly one JSON object a record",
    RecordRule.LONE_SURROGATE: "a text was cut inside a character (an emoji, say): cut between code points",
    RecordRule.TOO_DEEP: "flatten the request body",
    RecordRule.NOT_OBJECT: "send a JSON object: {custom_id, method, url, body}",
    RecordRule.DUPLICATE_MEMBER: "name each member once; readers disagree on which of two counts",
    RecordRule.CLOUDEVENT_SHAPE: "use the CloudEvents binary mode, or one structured event with a JSON object in data",
    RecordRule.SHAPE_NOT_SUPPORTED: "send what the account's API takes: {custom_id, url, body}; {custom_id, params} for"
    " Anthropic, {key, request} for Gemini",
    RecordRule.MISSING_CUSTOM_ID: "add custom_id: the business key by which you will know the answer",
    RecordRule.CUSTOM_ID_TYPE: 'make custom_id a string, for example "42" instead of 42',
    RecordRule.CUSTOM_ID_EMPTY: "give custom_id at least one character",
    RecordRule.CUSTOM_ID_TOO_LONG: "use a shorter key, and carry the rest in a header",
    RecordRule.METHOD_NOT_POST: "leave method out or set it to POST",
    RecordRule.URL_IS_ABSOLUTE: "send only the path, for example /v1/chat/completions; the account decides the host",
    RecordRule.UNKNOWN_ENDPOINT: "use one of the endpoints the service is configured for, or leave url out",
    RecordRule.MISSING_BODY: "add body: the request as the provider's ordinary endpoint takes it",
    RecordRule.BODY_NOT_OBJECT: "make body a JSON object, not a string of JSON",
    RecordRule.MISSING_MODEL: "name the model in body.model (params.model, request.model)",
    RecordRule.MISSING_INPUT: "add what the endpoint works on: messages, input, prompt or contents",
    RecordRule.WRONG_TYPE: "give the member the type the provider's API documents",
    RecordRule.STREAMING: "leave stream out; a batch answer is never streamed",
    RecordRule.BAD_HEADER: "correct the header, or leave it out to take the route's default",
    RecordRule.TIMESTAMP_MISSING: "produce with a timestamp, or set message.timestamp.type=LogAppendTime on the topic",
    RecordRule.TIMESTAMP_FUTURE: "correct the producer's clock, or set message.timestamp.type=LogAppendTime",
    RecordRule.MISSING_MAX_TOKENS: "bound the answer: max_completion_tokens (chat), max_output_tokens (responses),"
    " max_tokens (completions, messages) or generationConfig.maxOutputTokens (Gemini)",
    RecordRule.NOT_MASKABLE: "see the masker's own log; the record is sent to nobody until it can be masked",
    RecordRule.NOT_IN_A_BATCH: "leave out what the provider takes in ordinary calls only",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """A record refused. ``message`` and ``remedy`` never quote the record; ``custom_id`` is the caller's."""

    rule: RecordRule
    message: str
    remedy: str
    custom_id: str | None = None


class Request(msgspec.Struct, frozen=True):
    """A record accepted. ``body`` is payload: one line of JSON, never logged.

    A msgspec struct because one is made for every record: it costs a third of a dataclass.
    """

    custom_id: str
    url: str
    body: bytes
    model: str
    tokens: int
    """Estimated input tokens, see ``estimate_tokens``."""
    max_output_tokens: int | None = None
    """Most tokens the answers can have, all ``n`` of them together; None when the request does not say."""
    inputs: int = 1
    """Texts of an embeddings request; 1 at every other endpoint."""
    sla_s: float | None = None
    deadline: datetime | None = None
    slice: str = ""
    account: str | None = None
    """The header ``provider``: the account the producer asks for."""
    priority_now: bool = False
    traceparent: bytes | None = None
    passed_headers: tuple[tuple[str, bytes | None], ...] = ()
    """What the outcome carries on, ``traceparent`` and CloudEvents headers included, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestRules:
    """The limits a record is held against. Make one and keep it: what was learned of records is kept with it."""

    default_url: str = "/v1/chat/completions"
    """Endpoint of a record that names none."""
    default_url_of: Callable[[str], str] | None = None
    """The same by the record's model, where routes differ in their endpoint; it goes before ``default_url``."""
    endpoints: frozenset[str] = DEFAULT_ENDPOINTS
    accounts: frozenset[str] | None = None
    """Names allowed in the header ``provider``; None allows any."""
    max_record_bytes: int = 16 * 1024 * 1024
    max_line_bytes: int = 200 * 1000 * 1000
    """The provider's limit on a batch file: a line that is larger can go in no file."""
    max_custom_id_chars: int = 1_024
    max_depth: int = 200
    """Levels of arrays and objects inside ``body``. Strict parsers at providers give up at 128 to 1,000."""
    max_sla_s: float | None = None
    max_headers: int = 64
    max_headers_bytes: int = 16 * 1024


DEFAULT_RULES = RequestRules()


_NO_RAW = msgspec.Raw()


class _Line(msgspec.Struct, gc=False):
    custom_id: Any = msgspec.UNSET
    method: Any = msgspec.UNSET
    url: Any = msgspec.UNSET
    body: msgspec.Raw = _NO_RAW
    params: msgspec.Raw = _NO_RAW
    key: msgspec.Raw = _NO_RAW
    request: msgspec.Raw = _NO_RAW


_Count = Annotated[int, msgspec.Meta(ge=0)]
_TextOrArray = str | list[msgspec.Raw]


class _Body(msgspec.Struct, gc=False, kw_only=True):
    """What every endpoint's body is read for. The members that follow are those whose lack spoils a file."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    stream: bool | None = None
    n: _Count | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    max_output_tokens: _Count | None = None


class _ChatBody(_Body, gc=False, kw_only=True):
    messages: list[msgspec.Raw]


class _EmbeddingsBody(_Body, gc=False, kw_only=True):
    input: Annotated[str, msgspec.Meta(min_length=1)] | Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]


class _ModerationsBody(_Body, gc=False, kw_only=True):
    input: _TextOrArray


class _PromptBody(_Body, gc=False, kw_only=True):
    prompt: _TextOrArray


class _MessagesBody(_Body, gc=False, kw_only=True):
    """Source: Anthropic's reference of POST /v1/messages. That max_tokens is there is left to the account's check."""

    messages: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]
    system: _TextOrArray | None = None
    tools: list[msgspec.Raw] | None = None


class _Object(msgspec.Struct, gc=False):
    """Any object."""


_ProtoCount = (
    Annotated[int, msgspec.Meta(ge=0)]
    | Annotated[float, msgspec.Meta(ge=0, multiple_of=1)]
    | Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,10}$")]
)
"""An integer as the JSON of protocol buffers allows it: 16, 16.0 or "16"."""


class _GenerationConfig(msgspec.Struct, gc=False):
    most: _ProtoCount | None = msgspec.field(default=None, name="maxOutputTokens")
    most_too: _ProtoCount | None = msgspec.field(default=None, name="max_output_tokens")
    candidates: _ProtoCount | None = msgspec.field(default=None, name="candidateCount")
    candidates_too: _ProtoCount | None = msgspec.field(default=None, name="candidate_count")


class _GenerateBody(_Body, gc=False, kw_only=True):
    """Source: https://ai.google.dev/api/generate-content.

    The JSON of protocol buffers takes each member in both spellings, and Google's own examples leave out the brackets
    of an array of one.
    """

    contents: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)] | _Object
    system: _Object | None = msgspec.field(default=None, name="systemInstruction")
    system_too: _Object | None = msgspec.field(default=None, name="system_instruction")
    tools: list[msgspec.Raw] | _Object | None = None
    config: _GenerationConfig | None = msgspec.field(default=None, name="generationConfig")
    config_too: _GenerationConfig | None = msgspec.field(default=None, name="generation_config")


class _Named(msgspec.Struct, gc=False):
    model: Any = None
    contents: msgspec.Raw = _NO_RAW


class _LooseBody(msgspec.Struct, gc=False):
    """The same members whatever their types, to say what is wrong with them."""

    model: Any = None
    stream: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    messages: msgspec.Raw = _NO_RAW
    input: msgspec.Raw = _NO_RAW
    prompt: msgspec.Raw = _NO_RAW
    contents: msgspec.Raw = _NO_RAW
    system: msgspec.Raw = _NO_RAW
    tools: msgspec.Raw = _NO_RAW
    systemInstruction: msgspec.Raw = _NO_RAW  # noqa: N815 (as on the wire: refusals quote the member's name)
    system_instruction: msgspec.Raw = _NO_RAW
    generationConfig: msgspec.Raw = _NO_RAW  # noqa: N815
    generation_config: msgspec.Raw = _NO_RAW


class _CloudEvent(msgspec.Struct, gc=False):
    specversion: Any = None
    data: msgspec.Raw = _NO_RAW
    data_base64: Any = None
    traceparent: Any = None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_decode_loose_body = msgspec.json.Decoder(_LooseBody).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_decode_event = msgspec.json.Decoder(_CloudEvent).decode

_DATA_URL = re.compile(rb";base64,[A-Za-z0-9+/=\\]*+")
_DATA_MEMBER = re.compile(rb'"data"[ \t\r\n]*+:[ \t\r\n]*+"(?:[A-Za-z0-9+/=_-]++|\\/)*+"')
"""Where Anthropic's blocks and Gemini's parts have a file's base64 text. Anthropic also has documents in plain text
there, which show by their blanks and escapes."""
_FILE_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=_-\\"
_LOOK_BYTES = 48
_LOOK_EVERY_BYTES = IMAGE_TOKENS * 2
"""Half of the shortest text that counts as a file, in bytes."""
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_STRUCTURED = "application/cloudevents"


class _Headers(msgspec.Struct, frozen=True, gc=False):
    sla_s: float | None = None
    deadline: datetime | None = None
    slice: str = ""
    account: str | None = None
    priority_now: bool = False
    traceparent: bytes | None = None
    passed: tuple[tuple[str, bytes | None], ...] = ()
    content_type: str = ""


_NO_HEADERS = _Headers()


def parse_request(
    value: bytes | None, headers: Sequence[tuple[str, bytes | None]] = (), rules: RequestRules = DEFAULT_RULES
) -> Request | BadRecord:
    """Take a record apart, or say which rule it breaks. Pure, and never raises for what a record holds.

    Of two headers with the same name the last one counts.
    """
    said = _NO_HEADERS
    if headers or value is None or len(value) > rules.max_record_bytes:
        opened = _open(value, headers, rules)
        if isinstance(opened, BadRecord):
            return opened
        value, said = opened
    value = value.strip(_JSON_SPACE)
    try:
        # Strict UTF-8 of the whole record; each byte beyond the first of a character counts for the estimate.
        more_bytes = 0 if value.isascii() else len(value) - len(value.decode())
    except UnicodeDecodeError:
        return _why_unreadable(value, rules)

    # The usual look: a plain custom_id comes first, the body last, and what stands between is the same in every
    # record of a producer, so it is read once. Why the pieces prove the whole: the custom_id has no escapes,
    # quotes or control characters; around any such text the middle is known to make one JSON object whose last
    # member is a null body and whose names are each there once; and the rest is decoded as one JSON value.
    fields: _Body | None = None
    start = 14 if value[:14] == b'{"custom_id":"' else 15 if value[:15] == b'{"custom_id": "' else 0
    if start:
        end = value.find(_QUOTE, start)
        at = value.find(b'"body":', end, end + _MAX_MIDDLE_BYTES) + 7
        middle = _middle(value[end:at], rules)
        if middle is not None and value[-1] == _CLOSE:
            url, decode = middle
            custom_id = value[start:end].decode()
            body = value[at:-1]
            if custom_id.isprintable() and "\\" not in custom_id and 0 < len(custom_id) <= rules.max_custom_id_chars:
                try:
                    fields = decode(body)
                except (ValueError, RecursionError):
                    fields = None
    if (
        fields is None
        or fields.stream
        or not fields.model.isprintable()
        or len(body) + LINE_OVERHEAD_BYTES > rules.max_line_bytes
    ):
        read = _read_carefully(value, rules)
        if isinstance(read, BadRecord):
            return read
        custom_id, url, body, fields = read

    # Deleting a byte is the fastest way to count it (the C code jumps from one to the next). Brackets inside
    # strings count too, so only a suspicion is measured exactly.
    length = len(body)
    if (2 * length - len(body.replace(b"{", b"")) - len(body.replace(b"[", b"")) > rules.max_depth) and _deeper_than(
        body, rules.max_depth
    ):
        return _bad(RecordRule.TOO_DEEP, f"body nests deeper than {rules.max_depth} levels", custom_id)
    if body[0] != _OPEN or body[-1] != _CLOSE:
        body = body.strip(_JSON_SPACE)
    if _LF in body:
        body = body.replace(b"\n", b" ")
    if _CR in body:
        body = body.replace(b"\r", b" ")
    tokens = (length + more_bytes) // 4 + 1
    if length > IMAGE_TOKENS * 4:
        tokens = _without_files(body, tokens)
    model, most = fields.model, fields.max_tokens
    if type(fields) is _GenerateBody:
        model, most = model.removeprefix(_MODELS_FOLDER), _most_of_candidates(fields)
        if not model:
            return _bad(RecordRule.MISSING_MODEL, f"the model is only {_MODELS_FOLDER}", custom_id)
    elif most is None or fields.max_completion_tokens is not None or fields.n is not None:
        most = _most_output_tokens(fields)
    inputs = 1 if type(fields) is not _EmbeddingsBody else _count_inputs(fields)
    if said is _NO_HEADERS:
        return Request(custom_id, url, body, model, tokens, most, inputs)
    return Request(
        custom_id,
        url,
        body,
        model,
        tokens,
        most,
        inputs,
        said.sla_s,
        said.deadline,
        said.slice,
        said.account,
        said.priority_now,
        said.traceparent,
        said.passed,
    )


def estimate_tokens(body: bytes) -> int:
    r"""Input tokens of a request body, estimated from its bytes alone, rather high than low.

    A quarter token for each byte, and another quarter for each byte that continues a UTF-8 character: English
    comes to a quarter token a letter, Cyrillic to three quarters, Chinese to one and a quarter a character (GPT
    tokenizers need 0.6 to 1.1), emoji to one and three quarters. ``\uXXXX`` escapes come to one and a half.
    JSON's own punctuation counts, which covers what chat templates add. An inline base64 data URL counts as
    ``IMAGE_TOKENS``, and so does the base64 text of a member ``data``, for no provider bills a picture by the length of
    its text. What only a name stands for (a stored prompt, Gemini's ``cachedContent``) is not seen. ``body`` must be
    valid UTF-8.
    """
    more_bytes = 0 if body.isascii() else len(body) - len(body.decode())
    return _without_files(body, (len(body) + more_bytes) // 4 + 1)


def check_timestamp(timestamp_ms: int | None, now: datetime, max_skew_s: float) -> BadRecord | None:
    """Refuse a record without a timestamp, or one from further in the future than clocks may differ.

    An old record is never refused for its age: what is too late is decided by the route's policy.
    """
    if timestamp_ms is None or timestamp_ms < 0:
        return _bad(RecordRule.TIMESTAMP_MISSING, "the record has no timestamp")
    ahead_s = timestamp_ms / 1000 - now.timestamp()
    if ahead_s > max_skew_s:
        return _bad(
            RecordRule.TIMESTAMP_FUTURE,
            f"the record's timestamp lies {ahead_s:.0f} s in the future, the limit is {max_skew_s:g} s",
        )
    return None


def check_deadline(request: Request, t0: datetime, rules: RequestRules = DEFAULT_RULES) -> BadRecord | None:
    """Refuse a header ``deadline`` further from ``t0`` than ``max_sla_s``."""
    if request.deadline is None or rules.max_sla_s is None:
        return None
    if (request.deadline - t0).total_seconds() <= rules.max_sla_s:
        return None
    return _bad(
        RecordRule.BAD_HEADER,
        f"header deadline lies more than the longest SLA, {rules.max_sla_s:g} s, after the record's time",
        request.custom_id,
    )


def check_max_tokens(request: Request) -> BadRecord | None:
    """Refuse a request that does not bound its answer's tokens; what is done about it is the route's to say.

    Embeddings and moderations answer with no tokens, so they have nothing to bound.
    """
    if request.max_output_tokens is not None or not request.url.endswith(_GENERATING):
        return None
    return _bad(RecordRule.MISSING_MAX_TOKENS, "the request does not bound the tokens of its answer", request.custom_id)


def has_answer_tokens(url: str) -> bool:
    """Whether answers of this endpoint have tokens of their own: all but embeddings and moderations."""
    return url.endswith(_GENERATING)


def _bad(rule: RecordRule, message: str, custom_id: str | None = None) -> BadRecord:
    return BadRecord(rule=rule, message=message, remedy=REMEDIES[rule], custom_id=custom_id)


# ------------------------------------------------------------------------------------------ the line


_Read = tuple[str, str, bytes, _Body]
"""custom_id, url, body as it came, and what was read of it."""


_MAX_MIDDLE_BYTES = 256
_QUOTE, _OPEN, _CLOSE, _LF, _CR = b'"{}\n\r'


@functools.lru_cache(maxsize=1_024)
def _middle(middle: bytes, rules: RequestRules) -> tuple[str, Callable[[bytes], _Body]] | None:
    """The url between custom_id and body and the decoder of its bodies; None when the middle is not the usual one."""
    try:
        found = _decode_line(b'{"custom_id":"' + middle + b"null}")
    except ValueError:
        return None
    strings = 0
    for given in (found.method, found.url):
        if type(given) is str:
            strings += 1
        elif given is not msgspec.UNSET:
            return None
    # Four quotes for each name with a string, two for body, one that ends the custom_id: more of them would
    # mean an unknown or repeated member, or an escaped quote.
    if middle.count(b'"') != 4 * strings + 3 or found.method not in {msgspec.UNSET, "POST"}:
        return None
    if found.url is msgspec.UNSET and rules.default_url_of is not None:
        return None
    url = rules.default_url if found.url is msgspec.UNSET else found.url
    return (url, _body_decoder(url)) if url in rules.endpoints else None


@functools.lru_cache(maxsize=256)
def _body_decoder(url: str) -> Callable[[bytes], _Body]:
    return msgspec.json.Decoder(_body_type(url)).decode


def _body_type(url: str) -> type[_Body]:
    if url.endswith("/chat/completions"):
        return _ChatBody
    if url == MESSAGES_ENDPOINT:
        return _MessagesBody
    if url == GENERATE_ENDPOINT:
        return _GenerateBody
    if url.endswith("/embeddings"):
        return _EmbeddingsBody
    if url.endswith("/moderations"):
        return _ModerationsBody
    if url.endswith("/completions"):
        return _PromptBody
    return _Body  # responses: input may be left out beside a stored prompt


def _read_carefully(value: bytes, rules: RequestRules) -> _Read | BadRecord:
    """Read a record of any look; every refusal is found and named here. ``value`` is valid UTF-8."""
    try:
        line = _decode_line(value)
    except (ValueError, RecursionError):
        return _why_unreadable(value, rules)
    custom_id, method, url = line.custom_id, line.method, line.url
    body, name, id_name = bytes(line.body), "body", "custom_id"
    members = _LINE_MEMBERS
    if not body and bytes(line.params):
        body, name = bytes(line.params), "params"
    elif not body and bytes(line.request):
        body, name, members = bytes(line.request), "request", _KEYED_MEMBERS
        if custom_id is msgspec.UNSET and bytes(line.key):
            id_name = "key"
            try:
                custom_id = _decode_any(line.key)
            except (ValueError, RecursionError):
                return _why_unreadable(value, rules)
    known_id = custom_id if type(custom_id) is str else None
    repeated = _repeated(value, members)
    if repeated:
        return _bad(
            RecordRule.DUPLICATE_MEMBER,
            f"{repeated} is given more than once",
            known_id if repeated != id_name else None,
        )
    if (own := _OWN_NAMES.get(name)) is not None:
        if own not in rules.endpoints:
            text = f"the record has {name} where body is expected, and no account takes that"
            return _bad(RecordRule.SHAPE_NOT_SUPPORTED, text, known_id)
        url = own if url is msgspec.UNSET or url is None else url
    if custom_id is msgspec.UNSET or custom_id is None:
        return _bad(RecordRule.MISSING_CUSTOM_ID, f"the record has no {id_name}")
    if type(custom_id) is not str:
        return _bad(RecordRule.CUSTOM_ID_TYPE, f"{id_name} is {_kind_of(custom_id)}, not a string")
    if not custom_id:
        return _bad(RecordRule.CUSTOM_ID_EMPTY, f"{id_name} is an empty string")
    if len(custom_id) > rules.max_custom_id_chars:
        return _bad(
            RecordRule.CUSTOM_ID_TOO_LONG,
            f"{id_name} has {len(custom_id)} characters, the limit is {rules.max_custom_id_chars}",
            custom_id[: rules.max_custom_id_chars],
        )
    if method is not msgspec.UNSET and method is not None and str(method).upper() != "POST":
        return _bad(RecordRule.METHOD_NOT_POST, "method is not POST", custom_id)
    if url is msgspec.UNSET or url is None:
        url = _default_url(body, rules)
    if type(url) is not str or url not in rules.endpoints:
        return _bad_url(url, rules, custom_id)
    if not body or body == b"null":
        return _bad(RecordRule.MISSING_BODY, "the record has no body", custom_id)
    if body[:1] != b"{":
        return _bad(RecordRule.BODY_NOT_OBJECT, f"{name} is {_kind_of_raw(body)}, not an object", custom_id)
    line_bytes = len(body) + len(url) + LINE_OVERHEAD_BYTES
    if line_bytes > rules.max_line_bytes:
        return _bad(
            RecordRule.TOO_LARGE,
            f"the request's line would have {line_bytes} bytes, a file of the provider takes {rules.max_line_bytes}",
            custom_id,
        )
    try:
        fields = _body_decoder(url)(body)
    except msgspec.ValidationError:
        return _wrong_in_body(body, _body_type(url), custom_id, name)
    except (ValueError, RecursionError):
        return _why_unreadable(value, rules, custom_id)
    if fields.stream or not fields.model.isprintable():
        return _wrong_in_body(body, _body_type(url), custom_id, name)
    return custom_id, url, body, fields


def _default_url(body: bytes | None, rules: RequestRules) -> str:
    if rules.default_url_of is None or not body or body[:1] != b"{":
        return rules.default_url
    try:
        named = _decode_named(body)
    except (ValueError, RecursionError):
        return rules.default_url  # what is wrong with the body is found out and told next
    model = named.model
    if type(model) is not str:
        return rules.default_url
    is_gemini = GENERATE_ENDPOINT in rules.endpoints and bytes(named.contents)
    return rules.default_url_of(model.removeprefix(_MODELS_FOLDER) if is_gemini else model)


_NOTHING = frozenset({b"", b"null"})
_EMPTY = frozenset({*_NOTHING, b"[]", b'""'})
_INPUTS: Mapping[type[_Body], tuple[str, str]] = {
    _ChatBody: ("messages", "an array"),
    _MessagesBody: ("messages", "an array"),
    _PromptBody: ("prompt", "a string or an array"),
    _GenerateBody: ("contents", "an array or an object"),
}
_OTHERS: Mapping[type[_Body], tuple[tuple[str, bytes, str], ...]] = {
    _MessagesBody: (("system", b'"[', "a string or an array"), ("tools", b"[", "an array")),
    _GenerateBody: (
        ("systemInstruction", b"{", "an object with parts"),
        ("system_instruction", b"{", "an object with parts"),
        ("tools", b"[{", "an array"),
        ("generationConfig", b"{", "an object"),
        ("generation_config", b"{", "an object"),
    ),
}
"""Members beside the input, what their JSON may begin with, and what that is called."""
_PROTO_COUNTS = ("maxOutputTokens", "max_output_tokens", "candidateCount", "candidate_count")
_decode_proto_count = msgspec.json.Decoder(_ProtoCount).decode


def _wrong_in_body(body: bytes, kind: type[_Body], custom_id: str, where: str = "body") -> BadRecord:
    """Name what a body that is JSON lacks or has of the wrong type; ``where`` is the line's name for it."""
    try:
        fields = _decode_loose_body(body)
    except msgspec.ValidationError:
        return _bad(RecordRule.WRONG_TYPE, f"a member of {where} is a number out of range", custom_id)
    model, stream = fields.model, fields.stream
    if model is None or model == "":
        return _bad(RecordRule.MISSING_MODEL, f"{where} has no model", custom_id)
    if type(model) is not str:
        return _bad(RecordRule.WRONG_TYPE, f"{where}.model is {_kind_of(model)}, not a string", custom_id)
    if len(model) > MAX_NAME_CHARS or not model.isprintable():
        return _bad(
            RecordRule.WRONG_TYPE,
            f"{where}.model must be printable and at most {MAX_NAME_CHARS} characters long",
            custom_id,
        )
    if stream is True:
        return _bad(RecordRule.STREAMING, f"{where}.stream is true", custom_id)
    if stream is not None and stream is not False:
        return _bad(RecordRule.WRONG_TYPE, f"{where}.stream is {_kind_of(stream)}, not a boolean", custom_id)
    for name in ("n", "max_tokens", "max_completion_tokens", "max_output_tokens"):
        number = getattr(fields, name)
        if number is not None and (type(number) is not int or number < 0):
            what = "negative" if type(number) is int else _kind_of(number)
            return _bad(RecordRule.WRONG_TYPE, f"{where}.{name} is {what}, not a count", custom_id)
    for name, firsts, wanted in _OTHERS.get(kind, ()):
        given = bytes(getattr(fields, name))
        if given in _NOTHING:
            continue
        if given[0] not in firsts:
            return _bad(RecordRule.WRONG_TYPE, f"{where}.{name} is {_kind_of_raw(given)}, not {wanted}", custom_id)
        if name.startswith("generation") and (wrong := _wrong_count(given)) is not None:
            return _bad(RecordRule.WRONG_TYPE, f"{where}.{name}.{wrong}", custom_id)
    name, wanted = _INPUTS.get(kind, ("input", "a string or an array"))
    given = bytes(getattr(fields, name))
    if given in _EMPTY or (given[:1] == b"[" and not given[1:-1].strip(_JSON_SPACE)):
        return _bad(RecordRule.MISSING_INPUT, f"{where} has no {name}", custom_id)
    return _bad(RecordRule.WRONG_TYPE, f"{where}.{name} is {_kind_of_raw(given)}, not {wanted}", custom_id)


def _wrong_count(config: bytes) -> str | None:
    """What is wrong with the counts of a generationConfig."""
    members = _decode_members(config)
    for name in _PROTO_COUNTS:
        given = bytes(members.get(name, _NO_RAW))
        try:
            if given not in _NOTHING:
                _decode_proto_count(given)
        except ValueError:
            return f"{name} is {_kind_of_raw(given)} that is no count"
    return None


class _Pairs(list[tuple[str, Any]]):
    """An object's members with repetitions."""


_LINE_MEMBERS: Mapping[str, bytes] = {
    name: f'"{name}"'.encode() for name in ("custom_id", "method", "url", "body", "params")
}
_KEYED_MEMBERS: Mapping[str, bytes] = {**_LINE_MEMBERS, "key": b'"key"', "request": b'"request"'}
"""Members of a line, with what each looks like."""
_OWN_NAMES: Mapping[str, str] = {"params": MESSAGES_ENDPOINT, "request": GENERATE_ENDPOINT}
"""What a family's own batch lines call the body, with the endpoint that they mean."""


def _repeated(value: bytes, names: Mapping[str, bytes]) -> str | None:
    """The first of these members of the line that stands there twice; ``value`` is valid JSON and an object."""
    for look in names.values():
        if value.count(look) > 1:
            break
    else:
        if b"\\u00" not in value:  # a name can hide behind escapes
            return None
    seen: set[str] = set()
    members: _Pairs = json.loads(value, object_pairs_hook=_Pairs)
    for name, _ in members:
        if name in seen and name in names:
            return name
        seen.add(name)
    return None


def _custom_id_of(value: bytes) -> str | None:
    """The custom_id of a record that is refused for another reason, if it can be read."""
    try:
        line = _decode_line(value)
        found: object = line.custom_id
        if found is msgspec.UNSET and bytes(line.key) and bytes(line.request):
            found = _decode_any(line.key)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _why_unreadable(value: bytes, rules: RequestRules, custom_id: str | None = None) -> BadRecord:
    """Name what is wrong with a value that could not be read."""
    if not value:
        return _bad(RecordRule.EMPTY, "the record's value is blank")
    if value.startswith(_BOM):
        return _bad(RecordRule.BOM, "the value starts with a byte order mark")
    try:
        value.decode()
    except UnicodeDecodeError as error:
        return _bad(RecordRule.NOT_UTF8, f"byte {error.start} of the value is not UTF-8", custom_id)
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        # The library tells its reasons apart only in words; none of them quotes the text.
        reason = error.msg
        if "surrogate" in reason:
            return _bad(
                RecordRule.LONE_SURROGATE, f"half a surrogate pair near character {error.pos} of the value", custom_id
            )
        if "content after document" in reason:
            return _bad(RecordRule.TRAILING_DATA, "something follows the first JSON value", custom_id)
        if "depth" in reason or "recursion" in reason.lower():
            return _bad(RecordRule.TOO_DEEP, f"the value nests deeper than {rules.max_depth} levels", custom_id)
        return _bad(RecordRule.NOT_JSON, f"not JSON at character {error.pos} of the value", custom_id)
    if not isinstance(found, dict):
        return _bad(RecordRule.NOT_OBJECT, f"the value is {_kind_of(found)}, not an object")
    if _depth_exceeds(found, rules.max_depth):
        return _bad(RecordRule.TOO_DEEP, f"the value nests deeper than {rules.max_depth} levels", custom_id)
    return _bad(RecordRule.NOT_JSON, "the value holds a number out of range", custom_id)


def _deeper_than(body: bytes, max_depth: int) -> bool:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if "depth" in error.msg:
            return True
        found = json.loads(body)  # a number beyond a double: lawful JSON that only this parser reads
    return _depth_exceeds(found, max_depth)


def _depth_exceeds(found: object, max_depth: int) -> bool:
    level: list[Any] = [found]
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def _kind_of_raw(raw: bytes) -> str:
    return {
        b'"': "a string",
        b"[": "an array",
        b"{": "an object",
        b"t": "a boolean",
        b"f": "a boolean",
        b"n": "null",
    }.get(raw[:1], "a number")


def _bad_url(url: object, rules: RequestRules, custom_id: str) -> BadRecord:
    if not isinstance(url, str):
        return _bad(RecordRule.WRONG_TYPE, f"url is {_kind_of(url)}, not a string", custom_id)
    if "://" in url or url.startswith("//"):
        return _bad(RecordRule.URL_IS_ABSOLUTE, "url names a host", custom_id)
    if url.endswith(":generateContent") and GENERATE_ENDPOINT in rules.endpoints:
        text = f"url names a model: here Gemini's endpoint is {GENERATE_ENDPOINT}, and body.model names the model"
        return _bad(RecordRule.UNKNOWN_ENDPOINT, text, custom_id)
    known = ", ".join(sorted(rules.endpoints))
    return _bad(RecordRule.UNKNOWN_ENDPOINT, f"url is none of {known}", custom_id)


def _most_output_tokens(fields: _Body) -> int | None:
    given = [
        most for most in (fields.max_tokens, fields.max_completion_tokens, fields.max_output_tokens) if most is not None
    ]
    return max(given) * max(fields.n or 1, 1) if given else None


def _most_of_candidates(fields: _GenerateBody) -> int | None:
    """As ``_most_output_tokens``; protocol buffers do not tell zero from absent, so neither do we."""
    most, times = 0, 1
    for config in (fields.config, fields.config_too):
        if config is not None:
            most = max(most, int(config.most or config.most_too or 0))
            times = max(times, int(config.candidates or config.candidates_too or 0))
    return most * times or None


def _count_inputs(fields: _EmbeddingsBody) -> int:
    """An array of token numbers is one input; one of texts or of token arrays, as many as it has."""
    texts = fields.input
    if isinstance(texts, str):
        return 1
    return len(texts) if bytes(texts[0])[:1] in {b'"', b"["} else 1


def _without_files(body: bytes, tokens: int) -> int:
    # Searching a text costs more than all else that is done with it; a look every few thousand bytes cannot miss a
    # file that is long enough to matter.
    for at in range(0, len(body), _LOOK_EVERY_BYTES):
        if not body[at : at + _LOOK_BYTES].translate(None, _FILE_BYTES):
            break
    else:
        return tokens
    for pattern in (_DATA_URL, _DATA_MEMBER):
        saved = sum(max((match.end() - match.start()) // 4 - IMAGE_TOKENS, 0) for match in pattern.finditer(body))
        if saved:  # a family has its files in one way
            return tokens - saved
    return tokens


# --------------------------------------------------------------------------------------- the headers


def _read_headers(headers: Sequence[tuple[str, bytes | None]], rules: RequestRules) -> _Headers | BadRecord:
    if len(headers) > rules.max_headers:
        return _bad(RecordRule.BAD_HEADER, f"the record has {len(headers)} headers, the limit is {rules.max_headers}")
    passed: list[tuple[str, bytes | None]] = []
    ours: dict[str, str] = {}
    total = 0
    for header in headers:
        name, raw = header
        value = raw or b""  # the client hands a null header out as None
        total += len(name) + len(value)
        kind = _HEADERS.get(name) or _HEADERS.get(name.lower())
        if kind is None:
            passed.append(header)
            continue
        if kind in _NOTED:
            passed.append(header)
        try:
            ours[kind] = value.decode()
        except UnicodeDecodeError:
            return _bad(RecordRule.BAD_HEADER, f"header {kind} is not UTF-8")
    if total > rules.max_headers_bytes:
        return _bad(
            RecordRule.BAD_HEADER, f"the headers have {total} bytes, the limit is {rules.max_headers_bytes} bytes"
        )
    if not ours:
        return _Headers(passed=tuple(passed))

    sla_s: float | None = None
    if (text := ours.get("sla")) is not None:
        sla_s = _duration_s(text)
        if not sla_s:
            return _bad(
                RecordRule.BAD_HEADER, "header sla is no positive ISO 8601 duration of fixed length, such as PT30H"
            )
        if rules.max_sla_s is not None and sla_s > rules.max_sla_s:
            return _bad(
                RecordRule.BAD_HEADER, f"header sla asks for {sla_s:g} s, the longest SLA is {rules.max_sla_s:g} s"
            )
    deadline: datetime | None = None
    if (text := ours.get("deadline")) is not None:
        if sla_s is not None:
            return _bad(RecordRule.BAD_HEADER, "both sla and deadline are given; send one of them")
        deadline = _instant(text)
        if deadline is None:
            return _bad(
                RecordRule.BAD_HEADER,
                "header deadline is no ISO 8601 instant with a zone, such as 2026-01-31T18:00:00Z",
            )
    if (account := ours.get("provider")) is not None:
        if not _is_name(account):
            return _bad(RecordRule.BAD_HEADER, f"header provider is no name of at most {MAX_NAME_CHARS} characters")
        if rules.accounts is not None and account not in rules.accounts:
            return _bad(RecordRule.BAD_HEADER, "header provider names no configured account")
    if (slice_ := ours.get("slice", "")) and not _is_name(slice_):
        return _bad(RecordRule.BAD_HEADER, f"header slice is no name of at most {MAX_NAME_CHARS} characters")
    if (priority := ours.get("priority", "").lower()) not in {"", "now", "batch"}:
        return _bad(RecordRule.BAD_HEADER, "header priority is neither now nor batch")
    # A broken traceparent starts a new trace, as W3C Trace Context says; it is no reason to refuse work.
    traceparent = ours.get("traceparent") or ours.get("ce_traceparent")
    return _Headers(
        sla_s,
        deadline,
        slice_,
        account,
        priority == "now",
        traceparent.encode() if traceparent and _TRACEPARENT.fullmatch(traceparent) else None,
        tuple(passed),
        ours.get("content-type", "").lower(),
    )


_NOTED = frozenset({"traceparent", "ce_traceparent", "content-type"})
"""Read and passed on; the others of ours end here."""
_HEADERS = {name: name for name in ("sla", "deadline", "provider", "slice", "priority", *_NOTED)}


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable()


@functools.lru_cache(maxsize=1_024)
def _duration_s(text: str) -> float | None:
    """Seconds of an ISO 8601 duration; None for months and years too, which have no fixed length."""
    try:
        return parse_duration_s(text) if text[:1] in {"P", "p"} else None
    except ValueError:
        return None


def _instant(text: str) -> datetime | None:
    try:
        parsed = datetime.fromisoformat(text)
        return parsed.astimezone(UTC) if parsed.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def _open(
    value: bytes | None, headers: Sequence[tuple[str, bytes | None]], rules: RequestRules
) -> tuple[bytes, _Headers] | BadRecord:
    """The value to be read and what the headers say."""
    if value is None:
        return _bad(RecordRule.TOMBSTONE, "the record has no value")
    if len(value) > rules.max_record_bytes:
        return _bad(
            RecordRule.TOO_LARGE, f"the record has {len(value)} bytes, the limit is {rules.max_record_bytes} bytes"
        )
    said = _read_headers(headers, rules)
    if isinstance(said, BadRecord):
        return replace(said, custom_id=_custom_id_of(value))
    if said.content_type.startswith(_STRUCTURED):
        return _unwrap(value, said)
    return value, said


def _unwrap(value: bytes, said: _Headers) -> tuple[bytes, _Headers] | BadRecord:
    """The data of a structured CloudEvent, as if it had been the record's value."""
    if said.content_type.startswith("application/cloudevents-batch"):
        return _bad(RecordRule.CLOUDEVENT_SHAPE, "the record holds a batch of events")
    try:
        value.decode()
        event = _decode_event(value)
    except (ValueError, RecursionError):
        return _bad(RecordRule.CLOUDEVENT_SHAPE, "the value is no structured CloudEvent in JSON")
    inner = bytes(event.data)
    if not inner and isinstance(event.data_base64, str):
        try:
            inner = base64.b64decode(event.data_base64, validate=True)
        except (binascii.Error, ValueError):
            return _bad(RecordRule.CLOUDEVENT_SHAPE, "data_base64 of the event is not base64")
    if not inner:
        return _bad(RecordRule.CLOUDEVENT_SHAPE, "the event has no data")
    passed = tuple((name, raw) for name, raw in said.passed if name.lower() != "content-type")
    traceparent = said.traceparent
    if traceparent is None and isinstance(event.traceparent, str) and _TRACEPARENT.fullmatch(event.traceparent):
        traceparent = event.traceparent.encode()
        passed = (*passed, ("traceparent", traceparent))
    return inner, msgspec.structs.replace(said, passed=passed, traceparent=traceparent)
