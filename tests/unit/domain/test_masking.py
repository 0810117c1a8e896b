"""What is masked, what is not, and that nothing else of a request changes."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import msgspec
import pytest

from batchferry.domain import masking, plugins
from batchferry.domain.errors import ConfigError
from batchferry.domain.masking import Masked, MaskFault, StockMasker, load_masker, mask_body, stock
from batchferry.domain.personaldata import Rule

CHAT = "/v1/chat/completions"

FOUND = [
    ("jane.doe+tag@example.co.uk", "<email-1>"),
    ("Mail <o'brien@x.ie>.", "Mail <<email-1>>."),
    ("写信给jane@x.com请回复", "写信给<email-1>请回复"),
    ("用户@例子.广告 ok", "<email-1> ok"),
    ("müller@straße.de", "<email-1>"),
    ("jane@x.com으로", "<email-1>으로"),
    ("**a@b.co**", "**<email-1>**"),
    ("'a@b.co'", "'<email-1>'"),
    ("email=jane@x.com", "email=<email-1>"),
    ("bounce+jane=example.com@lists.example.org", "<email-1>"),
    ("4111 1111 1111 1111", "<card-1>"),
    ("5555-5555-5555-4444", "<card-1>"),
    ("378282246310005", "<card-1>"),
    ("3782 822463 10005", "<card-1>"),
    ("卡号4111111111111111", "卡号<card-1>"),
    ("６０１１１１１１１１１１１１１７", "<card-1>"),
    ("30569309025904", "<card-1>"),
    ("6304000000000000", "<card-1>"),
    ("DE89 3704 0044 0532 0130 00", "<iban-1>"),
    ("gb82west12345698765432", "<iban-1>"),
    ("FR14 2004 1010 0505 0001 3M02 606", "<iban-1>"),
    ("NL91ABNA0417164300", "<iban-1>"),
    ("+49 (0)89 1234-5678", "<phone-1>"),
    ("+1 415 555 2671", "<phone-1>"),
    ("+14155552671", "<phone-1>"),
    ("0049 89 1234567", "<phone-1>"),
    ("(415) 555-2671", "<phone-1>"),
    ("415-555-2671", "<phone-1>"),
    ("415.555.2671", "<phone-1>"),
    ("1-415-555-2671", "<phone-1>"),
    ("020 7946 0958", "<phone-1>"),
    ("089/1234567", "<phone-1>"),
    ("01 42 68 53 00", "<phone-1>"),
    ("01.02.03.04.05", "<phone-1>"),
    ("03-1234-5678", "<phone-1>"),
    ("(02) 9876 5432", "<phone-1>"),
    ("(11) 91234-5678", "<phone-1>"),
    ("8 (912) 345-67-89", "<phone-1>"),
    ("+7 912 345-67-89", "<phone-1>"),
    ("0171 1234567", "<phone-1>"),
    ("612 34 56 78", "<phone-1>"),
    ("Tel: 555-1234", "Tel: <phone-1>"),
    ("call me at 07700900123", "call me at <phone-1>"),
    ("电话：13800138000", "电话：<phone-1>"),
    ("+91 98765 43210", "<phone-1>"),
    ("+44 (0) 20 7946 0958", "<phone-1>"),
    ("0412 345 678", "<phone-1>"),
    ("+86 138 0013 8000", "<phone-1>"),
    ("tel. 12 34 56 78", "tel. <phone-1>"),
    ("078-05-1120", "<national-id-1>"),
    ("11010519491231002X", "<national-id-1>"),
    ("2341 2341 2346", "<national-id-1>"),
    ("111.444.777-35", "<national-id-1>"),
    ("cpf 11144477735", "cpf <national-id-1>"),
    ("12345678Z", "<national-id-1>"),
    ("X1234567L", "<national-id-1>"),
    ("RSSMRA85T10A562S", "<national-id-1>"),
    ("255081416802538", "<national-id-1>"),
    ("Steuer-ID: 86095742719", "Steuer-ID: <national-id-1>"),
    ("PESEL 44051401359", "PESEL <national-id-1>"),
    ("BSN 111222333", "BSN <national-id-1>"),
    ("NHS number 943 476 5919", "NHS number <national-id-1>"),
    ("Aadhaar 2341-2341-2346", "Aadhaar <national-id-1>"),
    ("NI number AB123456C", "NI number <national-id-1>"),
    ("089 1234567 / 030 7654321", "<phone-1> / <phone-2>"),
    ("+49 89 1234567 80331 München", "<phone-1> 80331 München"),
    ("+49 89 1234567 2024-01-15", "<phone-1> 2024-01-15"),
    ("+33 6 12 34 56 78.", "<phone-1>."),
    ("+1 415 555 2671 2024-01-15", "<phone-1> 2024-01-15"),
    ("089 1234567 030 1234567", "<phone-1> <phone-2>"),
    ("+49 89 1234567. 3 people", "<phone-1>. 3 people"),
    ("AB 12 34 56 C", "<national-id-1>"),
    ("Personnummer 811218-9876", "Personnummer <national-id-1>"),
    ("131052-308T", "<national-id-1>"),
    ("29029600013", "<national-id-1>"),
    ("85.07.30-033.28", "<national-id-1>"),
    ("756.9217.0769.85", "<national-id-1>"),
    ("S1234567D", "<national-id-1>"),
    ("8001015009087", "<national-id-1>"),
    ("SIN 130 692 544", "SIN <national-id-1>"),
    ("TC Kimlik No 10000000146", "TC Kimlik No <national-id-1>"),
    ("HEGG560427MVZRRL04", "<national-id-1>"),
]
LEFT = [
    "12345678 z",
    "2341-2341-2346",
    "012345-6789",
    "4222222222222",
    "20240115A",
    "1701234567890",
    "mobile app 1234567 downloads",
    "05-1234-5678-9012-3456",
    "at 20 oxford street london no 12 abc def ghi",
    "call 1 000 000 users",
    "2024-01-15",
    "01.02.2024",
    "15/01/2024 10:30",
    "2024-01-15T10:30:00Z",
    "order 4242-1111-22",
    "Order no. 415-555-2671",
    "invoice 0123 456 789",
    "$1,234,567.89",
    "1 234 567,89 EUR",
    "EUR 12 345 678",
    "1.234.567,89 €",
    "ISBN 978-0-306-40615-7",
    "9780306406157",
    "1234567890123456",
    "@handle",
    "react@18.2.0",
    "icon@2x.png",
    "112-1234567-1234567",
    "1700000000",
    "1700000000000",
    "3.14159265358979",
    "550e8400-e29b-41d4-a716-446655440000",
    "10:30-12:45",
    "192.168.1.1",
    "2020-2024",
    "1999-2000-2001",
    "12345678",
    "05-2024-001234",
    "48.8566, 2.3522",
    "-01.2345, 36.8219",
    "call 2024-01-15",
    "deadbeef1234567890",
    "ORD4111111111111111",
    "100000",
    "10,000,000 rows",
    "4111 1111 1111 1112",
    "DE89 3704 0044 0532 0130 01",
    "12345678A",
    "v1.2.3.4",
    "tracking 1Z999AA10123456784",
    "555-55",
    "+5",
    "+100 %",
    "0012345678",
    "2023/11/12 2023/12/13",
    "0.0.0.0:8080",
    "price 415 555 dollars",
    "08.12.2024 14.30",
    "8:00-17:00",
    "page 123-456",
    "1e10",
    "GPU 4090 24GB 1008 GB/s",
    "0x1234567890",
    "2 x 1000 x 2000",
    "1234-5678",
    "HTTP 404 500 502 503",
    "0800-1700",
    "2021 2022 2023 2024",
]


def masked_text(text: str, masker: StockMasker = stock) -> str:
    """A user's message after masking."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    found = masker.mask(body, CHAT)
    return text if found is None else json.loads(found)["messages"][0]["content"]


def masked_body(body: dict) -> dict:
    """A whole body after masking."""
    found = stock.mask(json.dumps(body).encode(), CHAT)
    return body if found is None else json.loads(found)


@pytest.mark.parametrize(("text", "masked"), FOUND, ids=range(len(FOUND)))
def test_personal_data_is_found(text: str, masked: str):
    """Recall: addresses, numbers of cards, accounts, phones and people in the forms in which they are written."""
    assert masked_text(f"Write {text} down") == f"Write {masked} down"
    assert masked_text(text) == masked


@pytest.mark.parametrize("text", LEFT, ids=range(len(LEFT)))
def test_other_numbers_stay(text: str):
    """Precision: dates, prices, versions, ids and numbers of orders are left as they are."""
    assert masked_text(f"See {text} here") == f"See {text} here"
    assert masked_text(text) == text


def test_addresses_of_machines_are_masked_when_asked_for():
    """IPv4 and IPv6 only with their rule; names and times that look alike stay."""
    both = StockMasker(frozenset({Rule.IP}))
    text = "from 192.168.0.1, 2001:db8::1 and ::1 at 12:30:45, A::B, std::vector, 1.2.3.4.5, 999.1.1.1"
    assert masked_text(text) == text
    assert masked_text(text, both) == (
        "from <ip-1>, <ip-2> and <ip-3> at 12:30:45, A::B, std::vector, 1.2.3.4.5, 999.1.1.1"
    )


def test_only_the_rules_asked_for_are_applied():
    """A masker of cards alone leaves addresses."""
    only = StockMasker(frozenset({Rule.CARD}))
    assert masked_text("a@b.co 4111 1111 1111 1111", only) == "a@b.co <card-1>"


def test_one_value_has_one_placeholder_within_a_request():
    """However it is written; counts are of places, and hold no payload."""
    body = msgspec.json.encode(
        {"messages": [{"content": "A@b.co, c@d.co, 4111-1111-1111-1111"}, {"content": "a@B.co 4111111111111111"}]}
    )
    found = stock.mask_counted(body, CHAT)
    assert found is not None
    assert [one["content"] for one in json.loads(found.body)["messages"]] == [
        "<email-1>, <email-2>, <card-1>",
        "<email-1> <card-1>",
    ]
    assert found.counts == {"email": 3, "card": 2}
    assert "b.co" not in repr(found)


def test_a_placeholder_of_the_callers_is_not_given_again():
    """Else two people would become one."""
    assert masked_text("<email-1> knows x@y.org and <email-2>") == "<email-1> knows <email-3> and <email-2>"


def test_with_a_key_placeholders_are_the_same_over_requests_and_differ_between_keys():
    """A keyed hash: told apart without being told."""
    one, other = StockMasker(hash_key=b"k" * 16), StockMasker(hash_key=b"o" * 16)
    first = masked_text("x@y.org", one)
    assert masked_text("mail a@b.co or X@y.org", one).endswith(f" or {first}")
    assert first.startswith("<email-k")
    assert len(first) == len("<email-k>") + 12
    assert masked_text("x@y.org", other) != first
    assert "k" * 16 not in repr(one)


def test_texts_of_every_api_are_looked_at_and_nothing_else():
    """Messages, blocks, documents, tool calls and results; never models, names, ids, schemas, URLs or base64."""
    mail, card = "x@y.org", "4111111111111111"
    kept = {
        "model": mail,
        "user": mail,
        "metadata": {"who": mail},
        "tools": [{"type": "function", "function": {"name": card, "parameters": {"enum": [mail]}}}],
        "response_format": {"json_schema": {"schema": {"const": mail}}},
    }
    image = {"type": "image_url", "image_url": {"url": f"https://h/{card}?m={mail}"}}
    pdf = {"type": "document", "source": {"data": f"{card} x", "type": "base64"}}
    thought = {"type": "thinking", "thinking": mail, "signature": card}
    body = {
        **kept,
        "system": [{"type": "text", "text": mail}],
        "instructions": mail,
        "prompt": {"id": mail, "variables": {"to": mail, "x": {"type": "input_text", "text": card}}},
        "suffix": mail,
        "input": [
            {
                "type": "function_call",
                "call_id": card,
                "name": mail,
                "arguments": json.dumps({mail: [mail, 1], "n": card}),
            },
            {"type": "function_call_output", "call_id": mail, "output": mail},
        ],
        "messages": [
            {"role": mail, "name": mail, "content": [{"type": "text", "text": mail}, image, pdf, thought]},
            {"content": [{"type": "document", "source": {"data": mail, "media_type": "text/plain", "type": "text"}}]},
            {"content": [{"type": "tool_use", "id": mail, "name": mail, "input": {mail: {"a": [mail]}}}]},
            {"content": [{"type": "tool_result", "tool_use_id": mail, "content": [{"type": "text", "text": mail}]}]},
            {"tool_calls": [{"id": mail, "function": {"name": mail, "arguments": f"not JSON {mail}"}}]},
        ],
        "contents": [
            {
                "parts": [
                    {"text": mail},
                    {"inlineData": {"data": card}},
                    {"functionCall": {"name": mail, "args": {"a": mail}}},
                ]
            }
        ],
        "systemInstruction": {"parts": [{"text": mail}]},
    }
    is_, number = "<email-1>", "<card-1>"
    assert masked_body(body) == {
        **kept,
        "system": [{"type": "text", "text": is_}],
        "instructions": is_,
        "prompt": {"id": mail, "variables": {"to": is_, "x": {"type": "input_text", "text": number}}},
        "suffix": is_,
        "input": [
            {
                "type": "function_call",
                "call_id": card,
                "name": mail,
                "arguments": json.dumps({mail: [is_, 1], "n": number}),
            },
            {"type": "function_call_output", "call_id": mail, "output": is_},
        ],
        "messages": [
            {"role": mail, "name": mail, "content": [{"type": "text", "text": is_}, image, pdf, thought]},
            {"content": [{"type": "document", "source": {"data": is_, "media_type": "text/plain", "type": "text"}}]},
            {"content": [{"type": "tool_use", "id": mail, "name": mail, "input": {mail: {"a": [is_]}}}]},
            {"content": [{"type": "tool_result", "tool_use_id": mail, "content": [{"type": "text", "text": is_}]}]},
            {"tool_calls": [{"id": mail, "function": {"name": mail, "arguments": f"not JSON {is_}"}}]},
        ],
        "contents": [
            {
                "parts": [
                    {"text": is_},
                    {"inlineData": {"data": card}},
                    {"functionCall": {"name": mail, "args": {"a": is_}}},
                ]
            }
        ],
        "systemInstruction": {"parts": [{"text": is_}]},
    }


def test_arguments_may_be_an_object_itself():
    """As some providers write them; its names stay."""
    call = {"function": {"name": "a@b.co", "arguments": {"a@b.co": {"to": ["a@b.co"]}}}}
    found = masked_body({"messages": [{"tool_calls": [call]}]})["messages"][0]["tool_calls"][0]
    assert found == {"function": {"name": "a@b.co", "arguments": {"a@b.co": {"to": ["<email-1>"]}}}}


def test_every_byte_outside_what_is_masked_stays():
    """Numbers, spaces, repeated members, escapes and other characters, in the masked text itself as well."""
    body = (
        b'{ "temperature":1.0, "big":12345678901234567890123, "odd":1e400, "caf\\u00e9":"\\/ \xe2\x82\xac",\t'
        b'"messages":[{"content":"\\ud83d\\ude00 caf\\u00e9 \\/\\n\xf0\x9f\x98\x80 a\\u0040b.co \\"x@y.org\\" \\u20ac"}],"odd":2 }'
    )
    expected = body.replace(b"a\\u0040b.co", b"<email-1>").replace(b"x@y.org", b"<email-2>")
    assert stock.mask(body, CHAT) == expected


@pytest.mark.parametrize("prompt", ['"a@b.co"', '["a@b.co","x"]'])
def test_inputs_and_prompts_may_be_texts_or_lists(prompt: str):
    """Embeddings, completions and moderations; token numbers are no text."""
    for name in ("input", "prompt"):
        body = f'{{"{name}":{prompt}}}'.encode()
        assert stock.mask(body, "/v1/embeddings") == body.replace(b"a@b.co", b"<email-1>")
    assert stock.mask(b'{"input":[[4111,1111,1111,1111],[4111111111111111]]}', "/v1/embeddings") is None


def test_what_is_next_to_something_masked_is_masked_too():
    """A number that was no word of its own becomes one when its neighbour goes; the second look finds it."""
    text = "089 1234567 030 1234567"
    assert masked_text(text) == "<phone-1> <phone-2>"


def test_nothing_to_mask_costs_nothing():
    """None, not a copy."""
    assert stock.mask(b'{"model":"m","messages":[{"content":"hello"}],"seed":1234567}', CHAT) is None


@pytest.mark.parametrize("body", [b'{"a":"@"', b'"@"', b'}"@"', b'{"messages":"@\\ud800"}', b"\xff@"])
def test_what_is_no_request_is_a_fault_not_a_leak(body: bytes):
    """It is never passed on unmasked."""
    assert mask_body(stock, body, CHAT) is MaskFault.MASKER_FAILED


class Foreign:
    """A masker of somebody else's that gives what it is told."""

    def __init__(self, gives: object = None) -> None:
        self.gives = gives

    def mask(self, body: bytes, endpoint: str) -> bytes | None:
        if isinstance(self.gives, Exception):
            raise self.gives
        return self.gives  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("gives", "expected"),
    [
        (None, None),
        (b'{"model":"m","x":1}', None),
        (b'{"model":"m","x":2}', Masked(b'{"model":"m","x":2}', {"other": 1})),
        (RuntimeError("a@b.co"), MaskFault.MASKER_FAILED),
        ("text", MaskFault.MASKER_FAILED),
        (b'{"model":"m"', MaskFault.UNLAWFUL_BODY),
        (b'["m"]', MaskFault.UNLAWFUL_BODY),
        (b'{"model":"m","x":"\xff"}', MaskFault.UNLAWFUL_BODY),
        (b'{"model":"m",\n"x":2}', MaskFault.UNLAWFUL_BODY),
        (b'{"model":"n"}', MaskFault.OTHER_REQUEST),
        (b'{"model":"m","stream":true}', MaskFault.OTHER_REQUEST),
    ],
)
def test_what_a_foreign_masker_gives_is_checked(gives: object, expected: object):
    """One that fails, or gives another request, is a fault of that request; it raises nothing."""
    assert mask_body(Foreign(gives), b'{"model":"m","x":1}', CHAT) == expected


def _entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, masking.GROUP)


def test_maskers_are_loaded_by_name(monkeypatch: pytest.MonkeyPatch):
    """The built-in one without any metadata, others as objects or classes of installed packages."""
    here = [_entry("mine", f"{__name__}:Foreign")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: here if group == masking.GROUP else [])
    assert isinstance(load_masker("stock", hash_key=b"k" * 16), StockMasker)
    assert isinstance(load_masker("mine"), Foreign)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nobody", {}, "there is no masker 'nobody'; known are: mine, none, stock, twice, "),
        ("twice", {}, "more than once"),
        ("none", {}, "has no method mask"),
        ("wrong", {}, "cannot be loaded: ModuleNotFoundError"),
        ("mine", {"rules": frozenset({Rule.CARD})}, "leave them out"),
        ("stock", {"hash_key": b"short"}, "use 16 random bytes or more"),
    ],
)
def test_a_masker_that_cannot_be_used_is_a_fault_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict, words: str
):
    """Said at start, with what to do."""
    here = [
        _entry("mine", f"{__name__}:Foreign"),
        _entry("none", "json:dumps"),
        _entry("twice", "a:b"),
        _entry("twice", "c:d"),
        _entry("wrong", "no_such_package_here:x"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: here)
    with pytest.raises(ConfigError, match=words):
        load_masker(name, **options)


@pytest.mark.parametrize("number", ["+49 89 1234567", "(415) 555-2671"])
def test_numbers_strung_together_are_masked_or_refused(number: str):
    """Where masking one uncovers the next, few are all masked; a request too large for so many rounds is refused."""
    assert masked_text(number * 7) == "<phone-1>" * 7
    body = json.dumps({"messages": [{"role": "user", "content": number * 200}]}).encode()
    walks: list[int] = []

    class Counted(masking._Walk):
        def edits(self, document, mode):
            walks.append(len(document))
            return super().edits(document, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "_Walk", Counted)
        patch.setattr(masking, "MAX_AGAIN_CHARS", 20_000)
        assert mask_body(stock, body, CHAT) is MaskFault.TOO_TANGLED
    assert sum(walks) < 30_000


def test_what_tools_wrote_is_looked_at():
    """Output of code that a model had run, in the forms of the three APIs that have it, and results of searches."""
    told = masked_body(
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "code_execution_tool_result",
                            "content": {"stdout": "jane@x.com", "stderr": "jane@x.com", "return_code": 0},
                        }
                    ],
                }
            ],
            "input": [
                {"type": "code_interpreter_call", "code": "mail('jane@x.com')", "outputs": [{"logs": "jane@x.com"}]},
                {"type": "file_search_call", "results": [{"text": "jane@x.com", "file_id": "file-jane@x.com"}]},
            ],
            "contents": [{"parts": [{"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "jane@x.com"}}]}],
        }
    )
    assert json.dumps(told).count("<email-1>") == 6
    assert told["input"][1]["results"][0]["file_id"] == "file-jane@x.com"
