"""Files are held against the service's rules, every fault is named, and the estimate is the service's own sum."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from batchferry.cli.exits import Exit
from batchferry.cli.main import call
from batchferry.cli.validate import CustomIds
from batchferry.domain.requests import BadRecord, parse_request

Validate = Callable[..., tuple[int, Any, str]]


def _line(custom_id: str, question: str = "hello", model: str = "gpt-4o-mini", **more: object) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": question}], **more}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


def _settings(tmp_path: Path, **settings: object) -> list[str]:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    return ["--config", str(path)]


@pytest.fixture
def validate(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Validate:
    """Runs the command on these lines: exit code, what --json says (or the table), standard error."""
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "BATCHFERRY_CONFIG", "KAFKA_BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)

    def run(data: bytes | list[bytes], *flags: object) -> tuple[int, Any, str]:
        path = tmp_path / "in.jsonl"
        path.write_bytes(data if isinstance(data, bytes) else b"".join(line + b"\n" for line in data))
        capfd.readouterr()
        code = call(["validate", str(path), *map(str, flags)])
        told = capfd.readouterr()
        return code, told.out if "--table" in flags else json.loads(told.out), told.err

    return run


def test_validate_a_good_file(validate: Validate) -> None:
    """A good file has no fault, and its estimate has rows, tokens, batches and both costs as exact decimals."""
    code, told, _ = validate([_line(f"c{number}", max_tokens=100) for number in range(1_000)])
    assert code == Exit.OK
    assert (told["ok"], told["lines"], told["errors"], told["faults"], told["notes"]) == (True, 1_000, 0, [], [])
    estimate = told["estimate"]
    assert (estimate["rows"], estimate["batches"], estimate["output_tokens"]) == (1_000, 1, 100_000)
    request = parse_request(_line("c1", max_tokens=100))
    assert not isinstance(request, BadRecord)
    assert estimate["input_tokens"] == 1_000 * request.tokens
    # gpt-4o-mini: 0.15 and 0.60 USD a million tokens, half of it in a batch
    listed = (estimate["input_tokens"] * 15 + 100_000 * 60) / 10**8
    assert float(estimate["sync_cost_usd"]) == pytest.approx(listed, abs=1e-12)
    assert float(estimate["cost_usd"]) == pytest.approx(listed / 2, abs=1e-12)
    assert float(estimate["saving_usd"]) == pytest.approx(listed / 2, abs=1e-12)


def test_validate_names_line_rule_and_remedy(validate: Validate) -> None:
    """Each kind of bad line is named with its number, the service's rule and a remedy; the good ones still count."""
    bad = {
        2: (b"", "empty"),
        4: (b"  \t", "empty"),
        5: (b"not json", "not_json"),
        6: (_line("x").replace(b"hello", b"h\xffllo"), "not_utf8"),
        7: (b'{"custom_id": 7}', "custom_id_type"),
        8: (_line("s", stream=True), "streaming"),
        9: (b"\xef\xbb\xbf" + _line("b"), "bom"),
        10: (b'{"custom_id":"u","url":"/v1/nothing","body":{}}', "unknown_endpoint"),
    }
    lines = [bad[number][0] if number in bad else _line(f"c{number}") for number in range(1, 12)]
    code, told, _ = validate(lines)
    assert code == Exit.LINES_REFUSED
    assert {fault["line"]: fault["rule"] for fault in told["faults"]} == {line: rule for line, (_, rule) in bad.items()}
    assert all(fault["remedy"] and fault["message"] for fault in told["faults"])
    assert told["errors"] == len(bad)
    assert told["estimate"]["rows"] == 11 - len(bad)


def test_validate_tells_doubled_ids_apart(validate: Validate) -> None:
    """The same id with the same request and with another one are told apart, each naming the first line."""
    lines = [_line("a"), _line("b"), _line("a"), _line("c"), _line("b", "another question"), _line("a")]
    code, told, _ = validate(lines)
    assert code == Exit.LINES_REFUSED
    assert told["errors_by_rule"] == {"duplicate_custom_id": 3}
    texts = {fault["line"]: fault["message"] for fault in told["faults"]}
    assert sorted(texts) == [3, 5, 6]
    assert "line 1 " in texts[3]
    assert "the same request" in texts[3]
    assert "line 2 " in texts[5]
    assert "another request" in texts[5]


def test_validate_counts_all_and_names_some(validate: Validate) -> None:
    """--max-errors bounds what is named, in the order of lines and doubled ids among them, never what is counted."""
    lines = [_line("a"), b"bad", _line("a"), *[b"bad"] * 500, _line("a")]
    code, told, _ = validate(lines, "--max-errors", 3)
    assert code == Exit.LINES_REFUSED
    assert [fault["line"] for fault in told["faults"]] == [2, 3, 4]
    assert told["errors"] == 503
    code, told, _ = validate(lines, "--max-errors", 0)
    assert (code, told["errors"], told["faults"]) == (Exit.LINES_REFUSED, 503, [])
    code, shown, err = validate(lines, "--table", "--max-errors", 2)
    assert code == Exit.LINES_REFUSED
    assert "503 (501 not_json, 2 duplicate_custom_id)" in shown
    assert "503 faults" in err
    assert "line 2: " in err
    assert "... and 501 more" in err
    assert "line 4:" not in err


def test_validate_max_tokens_by_route(validate: Validate, tmp_path: Path) -> None:
    """A request without a bound is let through, noted or refused, as its route says; embeddings need none."""
    embedding = json.dumps(
        {"custom_id": "e", "url": "/v1/embeddings", "body": {"model": "text-embedding-3-small", "input": "x"}}
    ).encode()
    lines = [_line("a"), _line("b", max_completion_tokens=5), embedding]
    for setting, code, errors in (("allow", Exit.OK, 0), ("warn", Exit.OK, 0), ("fail", Exit.LINES_REFUSED, 1)):
        flags = _settings(tmp_path, routes={"default": {"missing_max_tokens": setting}})
        ended, told, _ = validate(lines, *flags)
        assert (ended, told["errors"]) == (code, errors)
        assert any("do not bound" in note for note in told["notes"]) == (setting == "warn")
    assert told["faults"][0]["rule"] == "missing_max_tokens"
    assert "max_completion_tokens" in told["faults"][0]["remedy"]


def test_validate_batches_by_the_routes_limits(validate: Validate, tmp_path: Path) -> None:
    """Batches are counted a key, by the first limit of its route; several models are a note, not a fault."""
    flags = _settings(
        tmp_path,
        routes={
            "mini": {"models": ["gpt-4o-mini"], "max_rows": 30},
            "rest": {"models": ["*"], "max_tokens": 100},
        },
    )
    lines = [_line(f"c{number}") for number in range(100)]
    lines += [_line(f"d{number}", "x" * 200, "gpt-4o") for number in range(3)]
    code, told, _ = validate(lines, *flags)
    assert code == Exit.OK
    by_model = {one["model"]: one for one in told["keys"]}
    assert by_model["gpt-4o-mini"]["batches"] == 4
    assert by_model["gpt-4o"]["batches"] == 3
    assert told["estimate"]["batches"] == 7
    assert any("2 kinds of request" in note for note in told["notes"])
    _, shown, _ = validate(lines, *flags, "--table")
    assert "gpt-4o-mini" in shown
    assert "2 kinds of request" in shown


def test_validate_unknown_prices_are_unknown(validate: Validate) -> None:
    """One model without a price makes the file's cost unknown, in words and as null, never nothing."""
    lines = [_line("a"), _line("b", model="nobody-knows-it")]
    code, told, _ = validate(lines)
    assert code == Exit.OK
    assert (told["estimate"]["cost_usd"], told["estimate"]["sync_cost_usd"]) == (None, None)
    assert any("nobody-knows-it" in note for note in told["notes"])
    _, shown, _ = validate(lines, "--table")
    assert shown.count("unknown") >= 4


def test_validate_answers_length(validate: Validate) -> None:
    """--output-tokens says how long answers are; what a request allows stays its bound."""
    lines = [_line("a", max_tokens=10), _line("b")]
    assert validate(lines)[1]["estimate"]["output_tokens"] == 10 + 1_000
    assert validate(lines, "--output-tokens", 200)[1]["estimate"]["output_tokens"] == 10 + 200


def test_validate_too_long(validate: Validate, tmp_path: Path) -> None:
    """A row that no context can hold is a fault with its figures; a route that splits such rows only has it noted."""
    lines = [_line("a", "word " * 20_000), _line("b")]
    code, told, _ = validate(lines, *_settings(tmp_path, routes={"default": {"context_tokens": 1_000}}))
    assert code == Exit.LINES_REFUSED
    assert [(fault["line"], fault["rule"]) for fault in told["faults"]] == [(1, "too_long")]
    assert "1,000" in told["faults"][0]["message"]
    assert told["estimate"]["rows"] == 1
    split = {"default": {"context_tokens": 1_000, "policies": {"too_long": "split"}}}
    code, told, _ = validate(lines, *_settings(tmp_path, routes=split))
    assert code == Exit.OK
    assert any("too long" in note for note in told["notes"])


def test_validate_spending_limit(validate: Validate, tmp_path: Path) -> None:
    """A file that costs more than its route may spend in a day is told so."""
    lines = [_line(f"c{number}", max_tokens=1_000) for number in range(100)]
    for limit, is_told in ((0.001, True), (10, False)):
        flags = _settings(tmp_path, routes={"default": {"max_usd_per_day": limit}})
        code, told, _ = validate(lines, *flags)
        assert code == Exit.OK
        assert any("a day" in note for note in told["notes"]) == is_told


def test_validate_other_encodings_and_sizes(validate: Validate, tmp_path: Path) -> None:
    """UTF-16 is one fault; a line above the limit is only measured; one above Kafka's default is noted."""
    code, told, _ = validate(b"\n".join([_line("a")] * 3).decode().encode("utf-16"))
    assert code == Exit.LINES_REFUSED
    assert (told["errors"], told["faults"][0]["rule"]) == (1, "not_utf8")
    flags = _settings(tmp_path, limits={"max_record_bytes": 2_000_000})
    lines = [_line("a", "x" * 3_000_000), _line("b", "x" * 1_500_000), _line("c")]
    code, told, _ = validate(lines, *flags)
    assert code == Exit.LINES_REFUSED
    assert [(fault["line"], fault["rule"]) for fault in told["faults"] if fault["rule"] == "too_large"] == [
        (1, "too_large")
    ]
    assert any("1 lines have more than 1,048,588" in note for note in told["notes"])


def test_validate_an_empty_file_and_a_missing_one(validate: Validate, tmp_path: Path) -> None:
    """An empty file has nothing to complain of but says so; a missing one is a usage error."""
    code, told, _ = validate(b"")
    assert (code, told["lines"], told["notes"]) == (Exit.OK, 0, ["the file has no request"])
    assert call(["validate", str(tmp_path / "nowhere.jsonl")]) == Exit.USAGE


def test_validate_reads_a_pipe(monkeypatch: pytest.MonkeyPatch, validate: Validate, capfd: Any) -> None:
    """- reads standard input once, and still finds an id that comes again."""
    reading, writing = os.pipe()
    os.write(writing, b"\n".join([_line("a"), _line("b"), _line("a")]))
    os.close(writing)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert call(["validate", "-"]) == Exit.LINES_REFUSED
    assert json.loads(capfd.readouterr().out)["errors_by_rule"] == {"duplicate_custom_id": 1}


def test_validate_quotes_nothing(validate: Validate) -> None:
    """Whatever is wrong with a line, no word of it is printed."""
    secret = "xyzzy-secret"
    lines = [
        f'{{"custom_id":"a","body":{{"model":"m","messages":"{secret}"}}}}'.encode(),
        f'{{"{secret}'.encode(),
        _line("a", secret, stream=secret),
        _line("b", secret),
        _line("b", secret + "2"),
    ]
    code, told, err = validate(lines)
    assert code == Exit.LINES_REFUSED
    assert told["errors"] == 4
    assert secret not in json.dumps(told) + err


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=60))
def test_validate_finds_every_repeated_id(asked: list[tuple[int, int]]) -> None:
    """What is found agrees with a plain dictionary of whole ids and bodies."""
    ids = CustomIds()
    first: dict[int, tuple[int, int]] = {}
    wanted = set()
    for line, (name, says) in enumerate(asked, 1):
        request = parse_request(_line(str(name), str(says)))
        assert not isinstance(request, BadRecord)
        ids.add(line, request)
        if name in first:
            wanted.add((line, first[name][0], first[name][1] == says))
        first.setdefault(name, (line, says))
    assert set(ids.repeated()) == wanted


def test_validate_memory_is_sixteen_bytes_a_line() -> None:
    """What is kept of a line to find its id again is at most 16 bytes."""
    request = parse_request(_line("a"))
    assert not isinstance(request, BadRecord)
    lines = 40_000
    ids = CustomIds()
    made = [type(request)(str(number), "/u", b"{}", "m", 1) for number in range(1_000)]
    empty = sum(map(sys.getsizeof, ids._parts))
    for line in range(lines):
        ids.add(line, made[line % 1_000])
    held = sum(map(sys.getsizeof, ids._parts)) - empty
    assert held / lines <= 16
