"""Finding what identifies a person in plain text: addresses, phone, card, account and national id numbers.

Every rule looks at form first, then at what the form promises: check digits (Luhn for cards, mod 97 for IBANs, each
country's own for its ids), dates that exist, country codes that exist. A number whose form many ordinary numbers share
(eleven digits in a row, say) is taken only where a word before it says what it is. Dates, prices and numbers introduced
as an order's, invoice's or ticket's are left alone, except where a check digit of a card or IBAN speaks against it.

This is a net, not a proof: what is written in words, spread over lines or misspelt passes. Names and street addresses
have no form and are not looked for.

Sources: ISO/IEC 7812 and the networks' number ranges (cards), ISO 13616 and SWIFT's IBAN registry (lengths), ITU-T
E.164 (phone numbers), and the published check-digit rule of each country's number.
"""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


class Rule(StrEnum):
    """What can be looked for; the value is the name in a placeholder and in counts."""

    EMAIL = "email"
    IBAN = "iban"
    CARD = "card"
    NATIONAL_ID = "national-id"
    PHONE = "phone"
    IP = "ip"
    """IPv4 and IPv6. Off unless asked for: a version of four numbers looks the same."""


DEFAULT_RULES = frozenset(Rule) - {Rule.IP}


class Found(NamedTuple):
    """One thing found. ``value`` is its normal form, equal for two spellings of one number: payload."""

    rule: Rule
    start: int
    end: int
    value: str


Span = tuple[int, int]


class _Places:
    """Places of a text that are taken, none overlapping another."""

    def __init__(self, taken: Sequence[Span] = ()) -> None:
        self._spans = sorted(taken)

    def is_free(self, start: int, end: int) -> bool:
        at = bisect_left(self._spans, (start, end))
        is_free_before = at == 0 or self._spans[at - 1][1] <= start
        return is_free_before and (at == len(self._spans) or end <= self._spans[at][0])

    def take(self, start: int, end: int) -> bool:
        """Take a place; False when a part of it is taken already."""
        if not self.is_free(start, end):
            return False
        insort(self._spans, (start, end))
        return True


def find(text: str, rules: frozenset[Rule] = DEFAULT_RULES, taken: Sequence[Span] = ()) -> list[Found]:
    """Everything these rules find, by place, no two overlapping; of two rules the earlier in ``Rule`` has a place.

    Args:
        text: plain text, payload.
        rules: what is looked for.
        taken: places that are not looked at.
    """
    places = _Places(taken)
    found: list[Found] = []
    looks: list[Iterable[Found]] = []
    if Rule.EMAIL in rules:
        looks.append(_emails(text))
    if rules & _NUMBERS and (_ASCII_GATE if text.isascii() else _GATE).search(text):
        numbers = _numbers(text, rules)
        looks += (numbers[rule] for rule in Rule if rule in numbers)
    if Rule.IP in rules:
        looks.append(_ips(text))
    for look in looks:
        found += [one for one in look if places.take(one.start, one.end)]
    return sorted(found, key=lambda one: one.start)


_GATE = re.compile(r"\d(?:[^\d\n]{0,3}\d){5}")
_ASCII_GATE = re.compile(r"[0-9](?:[^0-9\n]{0,3}[0-9]){5}")
"""Six digits near one another: without them no rule about numbers finds anything."""
_NUMBERS = frozenset({Rule.IBAN, Rule.CARD, Rule.NATIONAL_ID, Rule.PHONE})

# ------------------------------------------------------------------------------------------------- shared shapes

_BEFORE = r"(?<![0-9A-Za-z_])(?<!\d[.,:/\-\u2013])(?<![0-9A-Za-z][\-/])"
"""Not in the middle of a word or of a longer number. Letters of scripts that set no spaces may stand before."""
_AFTER = r"(?![0-9A-Za-z_])(?![.,:/\-\u2013]\d)(?!-[A-Za-z])"
_SPACE = r"[ \t\u00a0\u2007\u202f]"
_DASH = r"[\-\u2010\u2011\u2012\u2013]"
_GAP = rf"(?:{_SPACE}|{_DASH}|\.)"
_CONTEXT_CHARS = 40
"""How far before a number a word may stand that says what it is."""


def _digits(text: str) -> str:
    """The digits of a text, of any script, as ASCII."""
    return "".join(str(int(char)) for char in text if char.isdecimal())


def _alnum(text: str) -> str:
    return "".join(str(int(char)) if char.isdecimal() else char for char in text if char.isalnum()).upper()


def _before(text: str, start: int) -> str:
    return text[max(0, start - _CONTEXT_CHARS) : start]


_LETTER_BEFORE = re.compile(r"[^\W\d_]")


def _is_said(words: re.Pattern[str], before: str) -> bool:
    """Whether one of the words stands before a number; looked for only where there are letters: tables have none."""
    return _LETTER_BEFORE.search(before) is not None and words.search(before) is not None


def _date_exists(year: int, month: int, day: int) -> bool:
    try:
        date(year, month, day)
    except ValueError:
        return False
    return True


def _any_century(year: int, month: int, day: int) -> bool:
    return _date_exists(2000 + year, month, day) or _date_exists(1900 + year, month, day)


def _luhn(digits: str) -> bool:
    total = 0
    for place, char in enumerate(reversed(digits)):
        value = int(char) << (place & 1)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def _weighted(digits: str, weights: Sequence[int]) -> int:
    return sum(int(digit) * weight for digit, weight in zip(digits, weights, strict=False))


# ------------------------------------------------------------------------------------------------------- e-mail

_UNSPACED = r"\u0e00-\u0e7f\u1100-\u11ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
"""Scripts that set no space between a word and an address: Thai, Korean, Japanese, Chinese."""
_LETTER = rf"(?:(?![{_UNSPACED}])[^\W_])"
_LOCAL = re.compile(rf"(?:{_LETTER}|[_.%+'&~!#$*=\-])+")
_LOCAL_UNSPACED = re.compile(r"[\w.\-]+")
_DOMAIN = re.compile(
    rf"(?:{_LETTER}(?:{_LETTER}|-){{0,62}}\.){{1,8}}(?:xn--[0-9A-Za-z\-]{{2,59}}|(?:(?!\d){_LETTER}){{2,63}})"
)
_DOMAIN_UNSPACED = re.compile(r"(?:[^\W_][\w\-]{0,62}\.){1,8}[^\W\d_]{2,63}")
_PICTURE = re.compile(r"[1-9](?:\.\d)?x\.(?:png|jpe?g|gif|webp|svg|avif|bmp)\Z", re.IGNORECASE)
"""``icon@2x.png`` is a file."""
_MAX_LOCAL_CHARS = 64


def _emails(text: str) -> Iterator[Found]:
    at = -1
    while (at := _next_at(text, at + 1)) >= 0:
        if not text[at + 1 : at + 2].isalnum():
            continue
        before = text[max(0, at - _MAX_LOCAL_CHARS) : at][::-1]
        local_match = _LOCAL.match(before)
        domain = _DOMAIN.match(text, at + 1)
        if local_match is None:
            local_match = _LOCAL_UNSPACED.match(before)
        if domain is None:
            domain = _DOMAIN_UNSPACED.match(text, at + 1)
        if local_match is None or domain is None or _PICTURE.match(domain.group()):
            continue
        local = local_match.group()[::-1].rstrip(".")
        head, sign, tail = local.rpartition("=")
        if sign and "+" not in head:  # mail=jane@..., unlike the bounce+jane=example.org@... of mailing lists
            local = tail
        local = local.lstrip("_.%+'&~!#$*=-")
        if not local:
            continue
        start = at - len(local)
        if text[at - 1] == ".":
            start -= len(local_match.group()) - len(local_match.group().lstrip("."))
        yield Found(Rule.EMAIL, start, domain.end(), f"{local}@{domain.group()}".casefold())


def _next_at(text: str, start: int) -> int:
    plain, wide = text.find("@", start), text.find("\uff20", start)
    return max(plain, wide) if plain < 0 or wide < 0 else min(plain, wide)


# --------------------------------------------------------------------------------------------------------- IBAN

_MIN_IBAN_DIGITS = 8
_IBAN_COUNTRIES = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20"
    " EG29 ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30"
    " KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23"
    " PK24 PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26"
    " UA29 VA22 VG24 XK20 YE30"
)
_IBAN_CHARS: Mapping[str, int] = {entry[:2]: int(entry[2:]) for entry in _IBAN_COUNTRIES.split()}


def _iban_at(text: str, start: int) -> Found | None:
    """The IBAN whose two letters stand there, if one does."""
    wanted = _IBAN_CHARS.get(text[start : start + 2].upper())
    if wanted is None:
        return None
    end, have = start + 2, 2
    while have < wanted and end < len(text):
        char, step = text[end], 1
        if char in " \t\u00a0\u2007\u202f-" and end + 1 < len(text):
            char, step = text[end + 1], 2
        if not (char.isdecimal() or (char.isascii() and char.isalpha())):
            break
        end += step
        have += 1
    if have < wanted or (end < len(text) and text[end].isascii() and text[end].isalnum()):
        return None
    value = _alnum(text[start:end])
    if not value[2:4].isdigit() or sum(map(str.isdigit, value)) < _MIN_IBAN_DIGITS:
        return None  # words that follow something like "at20"
    turned = value[4:] + value[:4]
    is_right = int("".join(str(int(char, 36)) for char in turned)) % 97 == 1
    return Found(Rule.IBAN, start, end, value) if is_right else None


# -------------------------------------------------------------------------------------------------------- cards

_CARD = re.compile(
    rf"(?<![0-9A-Za-z_])(?<!\d[.,])(?:\d{{14,19}}|\d{{4}}({_GAP})\d{{4}}\1\d{{4}}\1\d{{4}}(?:\1\d{{3}})?"
    rf"|\d{{4}}({_GAP})\d{{6}}\2\d{{4,5}})(?![0-9A-Za-z_])(?![.,]\d)"
)
_CARD_RANGES: tuple[tuple[re.Pattern[str], frozenset[int]], ...] = (
    (re.compile(r"4"), frozenset({16, 19})),
    (re.compile(r"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720"), frozenset({16})),
    (re.compile(r"3[47]"), frozenset({15})),
    (re.compile(r"30[0-5]|3[689]"), frozenset({14, 16})),
    (re.compile(r"352[89]|35[3-8]"), frozenset({16})),
    (re.compile(r"6011|64[4-9]|65|62|60|81|82|508|220[0-4]"), frozenset({16, 19})),
    (re.compile(r"50|5[6-8]|6[0379]"), frozenset({16, 18, 19})),
)


def _card_at(text: str, start: int) -> Found | None:
    match = _CARD.match(text, start)
    if match is None:
        return None
    digits = _digits(match.group())
    is_ranged = any(len(digits) in lengths and first.match(digits) for first, lengths in _CARD_RANGES)
    is_right = is_ranged and len(set(digits)) > 1 and _luhn(digits)
    return Found(Rule.CARD, start, match.end(), digits) if is_right else None


# ------------------------------------------------------------------------------------------------- national ids


class _Id(NamedTuple):
    country: str
    heads: frozenset[int]
    """How many digits its first group can have."""
    shape: re.Pattern[str]
    is_right: Callable[[str], bool]
    """Told the digits and letters, upper case, without what separates them."""
    words: re.Pattern[str] | None = None
    """What must stand before a number whose form is common; None: it is taken on sight."""
    lead: int = 0
    """Characters before its first digit."""
    loose: str = ""
    """The shape, where one separator need not be like another."""


def _id(
    country: str,
    heads: Sequence[int],
    shape: str,
    is_right: Callable[[str], bool],
    words: str | None = None,
    lead: int = 0,
) -> _Id:
    bounded = re.compile(f"{_BEFORE}(?:{shape}){_AFTER}", re.IGNORECASE)
    said = None if words is None else re.compile(rf"(?:{words})[^\d\n]{{0,24}}\Z", re.IGNORECASE)
    return _Id(country, frozenset(heads), bounded, is_right, said, lead, shape.replace(r"\1", r"[ .\-\s]"))


_NINO = "[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]"


def _is_ssn(value: str) -> bool:
    area, group, serial = int(value[:3]), int(value[3:5]), int(value[5:])
    if area >= 900:  # a taxpayer's number instead
        return 50 <= group <= 65 or 70 <= group <= 88 or 90 <= group <= 92 or 94 <= group <= 99
    return area not in {0, 666} and group != 0 and serial != 0


def _is_chinese(value: str) -> bool:
    if not _date_exists(int(value[6:10]), int(value[10:12]), int(value[12:14])) or not "18" <= value[6:8] <= "20":
        return False
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    return "10X98765432"[_weighted(value[:17], weights) % 11] == value[17]


_VERHOEFF_D = (
    "0123456789", "1234067895", "2340178956", "3401289567", "4012395678",
    "5987604321", "6598710432", "7659821043", "8765932104", "9876543210",
)  # fmt: skip
_VERHOEFF_P = (
    "0123456789", "1576283094", "5803796142", "8916043527", "9453126870", "4286573901", "2793806415", "7046913258",
)  # fmt: skip


def _is_aadhaar(value: str) -> bool:
    check = 0
    for place, char in enumerate(reversed(value)):
        check = int(_VERHOEFF_D[check][int(_VERHOEFF_P[place % 8][int(char)])])
    return check == 0 and value[0] not in "01"


def _is_cpf(value: str) -> bool:
    if len(set(value)) == 1:
        return False
    return all(_weighted(value[:size], range(size + 1, 1, -1)) * 10 % 11 % 10 == int(value[size]) for size in (9, 10))


def _is_dni(value: str) -> bool:
    if value[:2] in {"19", "20"} and _date_exists(int(value[:4]), int(value[4:6]), int(value[6:8])):
        return False  # a date with a letter behind it is somebody's file or part number
    number = str("XYZ".find(value[0])) + value[1:8] if value[0] in "XYZ" else value[:8]
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23] == value[8]


_CF_ODD = (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23)


def _is_codice_fiscale(value: str) -> bool:
    total = 0
    for place, char in enumerate(value[:15]):
        number = int(char) if char.isdigit() else ord(char) - ord("A")
        total += number if place % 2 else _CF_ODD[number]
    return chr(ord("A") + total % 26) == value[15]


def _is_nir(value: str) -> bool:
    month = int(value[3:5])
    if not (1 <= month <= 12 or 20 <= month <= 42 or 50 <= month <= 99):
        return False
    number = value[:13].replace("2A", "19").replace("2B", "18")
    return number.isdigit() and 97 - int(number) % 97 == int(value[13:])


def _is_steuer_id(value: str) -> bool:
    most = max(value[:10].count(digit) for digit in value[:10])
    if value[0] == "0" or most not in {2, 3}:
        return False
    product = 10
    for char in value[:10]:
        product = ((int(char) + product) % 10 or 10) * 2 % 11
    return (11 - product) % 10 == int(value[10])


def _is_pesel(value: str) -> bool:
    month = int(value[2:4]) % 20
    is_dated = _any_century(int(value[:2]), month, int(value[4:6]))
    return is_dated and _weighted(value, (1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1)) % 10 == 0


def _is_bsn(value: str) -> bool:
    return _weighted(value, (9, 8, 7, 6, 5, 4, 3, 2, -1)) % 11 == 0 and int(value) > 0


def _is_nhs(value: str) -> bool:
    return (11 - _weighted(value[:9], range(10, 1, -1)) % 11) % 11 == int(value[9])


def _is_nino(value: str) -> bool:
    return value[:2] not in {"BG", "GB", "KN", "NK", "NT", "TN", "ZZ"}


def _is_personnummer(value: str) -> bool:
    short = value[-10:]
    day = int(short[4:6])
    return _any_century(int(short[:2]), int(short[2:4]), day - 60 if day > 60 else day) and _luhn(short)


def _is_hetu(value: str) -> bool:
    digits = value[:6] + value[-4:-1]
    is_dated = _any_century(int(value[4:6]), int(value[2:4]), int(value[:2]))
    return is_dated and "0123456789ABCDEFHJKLMNPRSTUVWXY"[int(digits) % 31] == value[-1]


def _is_fodselsnummer(value: str) -> bool:
    day = int(value[:2])
    if not _any_century(int(value[4:6]), int(value[2:4]), day - 40 if day > 40 else day):
        return False
    return (
        _weighted(value, (3, 7, 6, 1, 8, 9, 4, 5, 2, 1)) % 11 == 0
        and _weighted(value, (5, 4, 3, 2, 7, 6, 5, 4, 3, 2, 1)) % 11 == 0
    )


def _is_belgian(value: str) -> bool:
    if not (int(value[2:4]) % 20 <= 12 and int(value[4:6]) <= 31):
        return False
    return any(97 - int(century + value[:9]) % 97 == int(value[9:]) for century in ("", "2"))


def _is_ahv(value: str) -> bool:
    return value[:3] == "756" and _weighted(value, (1, 3) * 6 + (1,)) % 10 == 0


def _is_korean(value: str) -> bool:
    if not _any_century(int(value[:2]), int(value[2:4]), int(value[4:6])) or value[6] == "0":
        return False
    left = 11 - _weighted(value, (2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5)) % 11
    return int(value[12]) in {left % 10, (left + 2) % 10 if value[6] in "5678" else left % 10}


def _is_nric(value: str) -> bool:
    total = _weighted(value[1:8], (2, 7, 6, 5, 4, 3, 2)) + {"T": 4, "G": 4, "M": 3}.get(value[0], 0)
    if value[0] in "ST":
        return "JZIHGFEDCBA"[total % 11] == value[8]
    return ("XWUTRQPNMLK"[total % 11] if value[0] in "FG" else "XWUTRQPNJLK"[10 - total % 11]) == value[8]


def _is_south_african(value: str) -> bool:
    if "15" <= value[:2] <= "19":  # milliseconds since 1970 look the same for years on end
        return False
    return _any_century(int(value[:2]), int(value[2:4]), int(value[4:6])) and value[10] in "012" and _luhn(value)


def _is_sin(value: str) -> bool:
    return value[0] not in "08" and _luhn(value)


def _is_tckn(value: str) -> bool:
    digits = [int(char) for char in value]
    tenth = (sum(digits[0:9:2]) * 7 - sum(digits[1:8:2])) % 10
    return value[0] != "0" and tenth == digits[9] and sum(digits[:10]) % 10 == digits[10]


_CURP_CHARS = "0123456789ABCDEFGHIJKLMN\u00d1OPQRSTUVWXYZ"


def _is_curp(value: str) -> bool:
    if not _any_century(int(value[4:6]), int(value[6:8]), int(value[8:10])):
        return False
    total = sum(_CURP_CHARS.find(char) * weight for char, weight in zip(value[:17], range(18, 1, -1), strict=True))
    return (10 - total % 10) % 10 == int(value[17])


_IDS: tuple[_Id, ...] = (
    _id("US", (3,), r"\d{3}([ -])\d{2}\1\d{4}", _is_ssn),
    _id("US", (9,), r"\d{9}", _is_ssn, r"(?<![a-z])(?:ssn|itin)\b|social security|taxpayer id"),
    _id("CN", (17, 18), r"\d{17}[\dX]", _is_chinese),
    _id("IN", (4,), rf"\d{{4}}({_SPACE})\d{{4}}\1\d{{4}}", _is_aadhaar),
    _id("IN", (4, 12), r"\d{12}|\d{4}-\d{4}-\d{4}", _is_aadhaar, r"aadha?ar|\buid(?:ai)?\b|\u0906\u0927\u093e\u0930"),
    _id("BR", (3,), r"\d{3}\.\d{3}\.\d{3}-\d\d", _is_cpf),
    _id("BR", (11,), r"\d{11}", _is_cpf, r"\bcpf\b"),
    _id("ES", (8,), r"\d{8}-?[A-HJ-NP-TV-Z]", _is_dni),
    _id("ES", (7,), r"[XYZ]\d{7}-?[A-HJ-NP-TV-Z]", _is_dni, lead=1),
    _id("ES", (7,), r"[XYZ]-\d{7}-?[A-HJ-NP-TV-Z]", _is_dni, lead=2),
    _id("FR", (1, 5, 13, 15), r"[12] ?\d\d ?\d\d ?(?:\d\d|2[AB]) ?\d{3} ?\d{3} ?\d\d", _is_nir),
    _id(
        "DE",
        (2, 11),
        r"\d{11}|\d\d \d{3} \d{3} \d{3}",
        _is_steuer_id,
        r"steuer\W?id|steuer(?:liche)?\W?identifikation|\bid\W?nr\b|\btax id\b|\btin\b",
    ),
    _id("PL", (11,), r"\d{11}", _is_pesel, r"\bpesel"),
    _id(
        "NL",
        (3, 4, 9),
        r"\d{9}|\d{3}([. ])\d{3}\1\d{3}|\d{4}\.\d\d\.\d{3}",
        _is_bsn,
        r"\bbsn\b|burgerservice|sofi",
    ),
    _id("GB", (3, 10), r"\d{10}|\d{3}([ -])\d{3}\1\d{4}", _is_nhs, r"\bnhs\b"),
    _id("GB", (2,), rf"{_NINO} \d\d \d\d \d\d [A-D]", _is_nino, lead=3),
    _id("GB", (6,), rf"{_NINO}\d{{6}}[A-D]", _is_nino, r"national insurance|\bnino\b|\bni (?:no|num)", lead=2),
    _id(
        "SE",
        (6, 8, 10, 12),
        r"(?:18|19|20)?\d{6}[-+]?\d{4}",
        _is_personnummer,
        r"person(?:al)?\W?(?:nummer|number|nr)|\bpnr\b|samordningsnummer",
    ),
    _id("FI", (6,), r"\d{6}[-+A-FU-Y]\d{3}[0-9A-FHJ-NPR-Y]", _is_hetu),
    _id("NO", (6, 11), r"\d{6} ?\d{5}", _is_fodselsnummer),
    _id("BE", (2,), r"\d\d\.\d\d\.\d\d-\d{3}\.\d\d", _is_belgian),
    _id(
        "BE",
        (11,),
        r"\d{11}",
        _is_belgian,
        r"rijksregister|registre national|national(?:e)? (?:number|nummer)",
    ),
    _id("CH", (3, 13), r"756\.\d{4}\.\d{4}\.\d\d|756\d{10}", _is_ahv),
    _id("KR", (6,), r"\d{6}-\d{7}", _is_korean),
    _id("SG", (7,), r"[STFGM]\d{7}[A-Z]", _is_nric, lead=1),
    _id("ZA", (6, 13), r"\d{13}|\d{6} \d{4} \d{3}", _is_south_african),
    _id(
        "CA",
        (3, 9),
        r"\d{9}|\d{3}([ -])\d{3}\1\d{3}",
        _is_sin,
        r"\bsin\b|social insurance|\bnas\b|assurance sociale",
    ),
    _id("TR", (11,), r"\d{11}", _is_tckn, r"kimlik|\btckn\b|\bt\.?c\.? ?no"),
    _id("MX", (6,), r"[A-Z][AEIOUX][A-Z]{2}\d{6}[HMX][A-Z]{2}[B-DF-HJ-NP-TV-Z]{3}[0-9A-Z]\d", _is_curp, lead=4),
    _id("IT", (2,), r"[A-Z]{6}\d\d[A-EHLMPRST]\d\d[A-Z]\d{3}[A-Z]", _is_codice_fiscale, lead=6),
)
_IDS_BY_HEAD: Mapping[int, Sequence[_Id]] = {
    head: [kind for kind in _IDS if head in kind.heads and not kind.lead]
    for head in {head for kind in _IDS for head in kind.heads}
}
_LED_IDS_BY_HEAD: Mapping[int, Sequence[_Id]] = {
    head: [kind for kind in _IDS if head in kind.heads and kind.lead] for head in _IDS_BY_HEAD
}
_ANY_ID: Mapping[int, re.Pattern[str]] = {
    head: re.compile("|".join(f"(?:{kind.loose})" for kind in kinds), re.IGNORECASE)
    for head, kinds in _IDS_BY_HEAD.items()
    if kinds
}
"""Some id may stand here: one look instead of one for each country."""


def _id_at(text: str, start: int, head: int, *, is_fresh: bool) -> Iterator[Found]:
    """National ids whose first group of ``head`` digits stands there."""
    kinds: Sequence[_Id] = ()
    if is_fresh and (any_id := _ANY_ID.get(head)) is not None and any_id.match(text, start):
        kinds = _IDS_BY_HEAD[head]
    if head in _LED_IDS_BY_HEAD and start and (text[start - 1].isalpha() or text[start - 1] in " -"):
        kinds = [*kinds, *_LED_IDS_BY_HEAD[head]]
    for kind in kinds:
        first = start - kind.lead
        match = kind.shape.match(text, first) if first >= 0 else None
        if match is None:
            continue
        if kind.words is not None and not _is_said(kind.words, _before(text, first)):
            continue
        value = _alnum(match.group())
        if kind.is_right(value):
            yield Found(Rule.NATIONAL_ID, first, match.end(), f"{kind.country}{value}")


# ------------------------------------------------------------------------------------------------------- phones

_COUNTRY_CODES = re.compile(
    r"1|7|2(?:0|7|1[1-38]|[2-46]\d|5[0-8]|9[0178])|3(?:[0-469]|[578]\d)|4(?:[013-9]|2[013])|5(?:[1-8]|0\d|9\d)"
    r"|6(?:[0-6]|7[0-9]|8[0-9]|9[0-2])|8(?:[1246]|0[08]|5[02356]|7\d|8[0-8])|9(?:[0-58]|6\d|7\d|9[2-68])"
)
_PART = rf"(?:{_SPACE}{{1,2}}|{_SPACE}?{_DASH}{_SPACE}?|\.|{_SPACE}?/{_SPACE}?(?![0+(]))"
"""Between two groups of one number. A slash before a 0 or a plus sign stands between two numbers."""
_INTERNATIONAL = re.compile(
    rf"(?<![0-9A-Za-z_+])(?:[+\uff0b]{_SPACE}?|(?<!\d{_SPACE})00{_SPACE}?(?=[1-9]))\(?[1-9]\d{{0,14}}\)?"
    rf"(?:(?:{_PART}?\(\d{{1,5}}\){_PART}?|{_PART})\d{{1,14}})?"
    rf"(?:(?:{_PART}?\(\d{{1,5}}\){_PART}?|{_PART})\d{{2,14}}){{0,8}}(?!\d|[.,:]\d)"
)
_NANP = re.compile(rf"{_BEFORE}(?:1{_GAP})?[2-9]\d\d({_GAP})[2-9]\d\d\1\d{{4}}{_AFTER}")
"""North America: 415-555-2671, 1.415.555.2671."""
_PAIRS = re.compile(rf"{_BEFORE}[6789]\d\d{_SPACE}\d\d{_SPACE}\d\d{_SPACE}\d\d{_AFTER}")
"""Spain: 612 34 56 78."""
_AREA = re.compile(
    rf"(?<![0-9A-Za-z_])(?<!\d[.,])(?:[08]{_SPACE}?)?\(0?\d{{2,4}}\)(?:{_PART}?\d{{2,8}})(?:{_PART}\d{{2,5}}){{0,3}}{_AFTER}"
)
"""An area code in parentheses: (415) 555-2671, (11) 91234-5678, 8 (912) 345-67-89."""
_TRUNK = re.compile(rf"{_BEFORE}(?<!\d{_SPACE})0[1-9](?:\d{{0,3}}|\d{{4}}(?=[ /]))(?:{_PART}\d{{2,8}}){{1,5}}{_AFTER}")
"""A trunk 0: 089 1234567, 020 7946 0958, 01 42 68 53 00, 03-1234-5678."""
_SAID_SO = re.compile(
    r"(?:\b(?:tel(?:e(?:fon|phone|fono|foon))?(?:nummer|nr)?|t\u00e9l(?:\u00e9phone)?|tel\u00e9fono|phone|mobile?|mobil"
    r"|cell(?:phone)?|handy(?:nummer)?|portable|celular|m\u00f3vil|fax|whats\W?app|sms|rufnummer|call(?:ed)?|dial|ring"
    r"|text me|reach me|anrufen|appelez|llamar?|telefonummer|numer telefonu)\b"
    r"|\u7535\u8bdd|\u96fb\u8a71|\u624b\u673a|\u624b\u6a5f|\u643a\u5e2f|\uc804\ud654|\ud578\ub4dc\ud3f0"
    r"|\u0442\u0435\u043b\u0435\u0444\u043e\u043d\w*|\u0442\u0435\u043b\b)"
    r"[\s.:#=()/\-\uff1a]{0,6}(?:(?:no|nr|num|number|nummer|is|ist|est|es|me|us|him|her|at|on|under|unter|my|our|the|au|al"
    r"|\u662f|\u53f7\u7801)\b[\s.:#=()\-\uff1a]{0,4}){0,4}\Z",
    re.IGNORECASE,
)
_SAID_STEMS = (
    "tel", "t\u00e9l", "phone", "mob", "cel", "handy", "porta", "m\u00f3v", "fax", "what", "sms", "rufn", "call",
    "dial", "ring", "text me", "reach", "anruf", "appel", "llam", "\u7535\u8bdd", "\u96fb\u8a71", "\u624b\u673a",
    "\u624b\u6a5f", "\u643a\u5e2f", "\uc804\ud654", "\ud578\ub4dc", "\u0442\u0435\u043b",
)  # fmt: skip
"""A text without any of these says nowhere that a number is a phone's."""
_SIGNS = frozenset("+\uff0b( \t\u00a0\u2007\u202f")
_LOOSE = re.compile(rf"{_BEFORE}\(?\d{{1,15}}(?:(?:\){_PART}?|{_PART})\d{{1,14}}){{0,8}}{_AFTER}")
"""What may be a phone number where a word says so."""
_OTHER_NUMBER = re.compile(
    r"(?:\b(?:order|purchase|po|invoice|ticket|case|claim|ref(?:erence)?|policy|contract|customer|account|acct|item"
    r"|article|part|sku|ean|upc|isbn|issn|serial|tracking|parcel|shipment|transaction|trace|request|version|model|lot"
    r"|batch|bestell\w*|auftrag\w*|rechnung\w*|kunden\w*|vertrags?\w*|artikel\w*|sendung\w*|konto\w*|aktenzeichen"
    r"|vorgang\w*|commande|facture|pedido|factura|ordine|fattura|zam\u00f3wien\w*|faktur\w*|swift|bic|gtin|asin|doi)\b"
    r"|\u8ba2\u5355|\u8a02\u55ae|\u6ce8\u6587|\uc8fc\ubb38)"
    r"[\s.:#=\-(\u2116]{0,4}(?:(?:no|nr|num|number|nummer|id|code|is|was|n\u00b0|n\u00ba)\b[\s.:#=]{0,4}){0,3}\Z",
    re.IGNORECASE,
)
_MONEY_BEFORE = re.compile(r"(?:[$\u20ac\u00a3\u00a5\u20b9\u20bd]|\b(?:USD|EUR|GBP|CHF|JPY|INR|CNY|Rs)\.?)\s?\Z")
_MONEY_AFTER = re.compile(
    r"\s?(?:[%$\u20ac\u00a3\u00a5\u20b9\u20bd\u2030]"
    r"|(?:USD|EUR|GBP|CHF|JPY|INR|CNY|PLN|SEK|NOK|DKK|euros?|dollars?|kg|km|tokens?|rows?|bytes?|users?|people)\b)",
    re.IGNORECASE,
)
_GROUPS = re.compile(r"\d+")


_PhoneWay = tuple[int, re.Pattern[str], Callable[[str, re.Match[str]], int | None]]


def _phone_at(text: str, ways: Iterable[_PhoneWay]) -> Iterator[Found]:
    """Phone numbers that begin in these ways."""
    for first, shape, end_of in ways:
        match = shape.match(text, first)
        end = None if match is None else end_of(text, match)
        if end is None or _MONEY_BEFORE.search(_before(text, first)) or _MONEY_AFTER.match(text, end):
            continue
        yield Found(Rule.PHONE, first, end, _phone_value(text[first:end]))


def _phone_ways(text: str, start: int, head: int, *, is_fresh: bool, may_be_said: bool) -> Iterator[_PhoneWay]:
    """How a phone number whose first group of ``head`` digits stands there can begin, and where."""
    last = text[start - 1 : start]
    is_opened = last == "("
    if last and last in _SIGNS:
        before = text[max(0, start - 3) : start]
        sign = before.rstrip("(").rstrip(" \t\u00a0\u2007\u202f")
        if sign[-1:] in {"+", "\uff0b"}:
            yield start - len(before) + len(sign) - 1, _INTERNATIONAL, _international_end
    char = text[start]
    if is_opened and head <= 5:
        yield start - 1, _AREA, _area_end
    elif head == 1 and char in "08" and "(" in text[start + 1 : start + 3]:
        yield start, _AREA, _area_end
    if is_fresh:
        if char == "0" and head >= 2:
            if text[start + 1] == "0" and head != 3:
                yield start, _INTERNATIONAL, _international_end
            elif head <= 6:
                yield start, _TRUNK, _trunk_end
        elif (head == 3 and char >= "2") or (head == 1 and char == "1"):
            yield start, _NANP, _shaped_end
            if head == 3 and char >= "6":
                yield start, _PAIRS, _shaped_end
        if may_be_said:
            first = start - is_opened
            if _is_said(_SAID_SO, _before(text, first)):
                yield first, _LOOSE, _said_so_end


def _phone_value(written: str) -> str:
    """``+49 (0)89 1`` and ``0049 89 1`` are one number; a number without a country stays as it is."""
    digits = _digits(re.sub(r"(?<=\d)(\s*)\(0\)", r"\1", written))
    if written[0] in "+\uff0b":
        return f"+{digits}"
    return f"+{digits[2:]}" if digits.startswith("00") else digits


def _international_end(text: str, match: re.Match[str]) -> int | None:
    for end in _ends(text, match):
        digits = _phone_value(text[match.start() : end])[1:]
        if _COUNTRY_CODES.match(digits) is None:
            return None
        if not 8 <= len(digits) <= 15 or (digits[0] == "1" and (len(digits) != 11 or digits[1] in "01")):
            continue
        if match.group()[0] in "+\uff0b":
            return end
        # Two zeros also begin a number that is padded to a width.
        before = _before(text, match.start())
        if len(digits) < 10:
            return None
        has_groups = _has_groups(text[match.start() : end])
        if _is_said(_SAID_SO, before) or (has_groups and not _is_said(_OTHER_NUMBER, before)):
            return end
    return None


def _shaped_end(text: str, match: re.Match[str]) -> int | None:
    return None if _is_said(_OTHER_NUMBER, _before(text, match.start())) else match.end()


def _area_end(text: str, match: re.Match[str]) -> int | None:
    for end, groups in _national_ends(text, match):
        code = groups[1] if len(groups[0]) == 1 else groups[0]
        return None if _is_year(code) else end
    return None


def _trunk_end(text: str, match: re.Match[str]) -> int | None:
    for end, groups in _national_ends(text, match):
        if [len(group) for group in groups] == [2] * 5:
            return end if len(set(re.findall(r"\D+", text[match.start() : end]))) == 1 else None
        return None if _has_date(groups) else end
    return None


def _national_ends(text: str, match: re.Match[str]) -> Iterator[tuple[int, list[str]]]:
    if _is_said(_OTHER_NUMBER, _before(text, match.start())):
        return
    for end in _ends(text, match):
        groups = _groups(text[match.start() : end])
        if len(groups) > 1 and 9 <= sum(map(len, groups)) <= 12:
            yield end, groups


def _said_so_end(text: str, match: re.Match[str]) -> int | None:
    if _is_said(_OTHER_NUMBER, _before(text, match.start())):
        return None
    for end in _ends(text, match):
        groups = _groups(text[match.start() : end])
        if 7 <= sum(map(len, groups)) <= 15:
            return None if _has_date(groups) else end
    return None


def _ends(text: str, match: re.Match[str]) -> Iterator[int]:
    """Where a number that is followed by another one may end, the furthest place first: only before a space."""
    yield match.end()
    groups = list(_GROUPS.finditer(text, match.start(), match.end()))
    for group, after in reversed(list(pairwise(groups))):
        between = text[group.end() : after.start()]
        if between.lstrip(")/")[:1].isspace() and not between.endswith(("-", ".", ")", "(")):
            yield group.end() + between.startswith(")")


def _groups(written: str) -> list[str]:
    return [_digits(group) for group in _GROUPS.findall(written)]


def _has_groups(written: str) -> bool:
    return len(_GROUPS.findall(written.removeprefix("00"))) > 1


def _has_date(groups: Sequence[str]) -> bool:
    """Whether the groups begin with a date (in any usual order) or with a month and year."""
    if len(groups) >= 2 and len(groups[0]) <= 2 and _is_year(groups[1]) and 1 <= int(groups[0]) <= 12:
        return True
    if len(groups) < 3:
        return False
    one, two, three = groups[:3]
    if _is_year(one):
        return len(two) <= 2 and len(three) <= 2 and 1 <= int(two) <= 12 and 1 <= int(three) <= 31
    if len(one) > 2 or len(two) > 2 or not (len(three) == 2 or _is_year(three)):
        return False
    low, high = sorted((int(one), int(two)))
    return 1 <= low <= 12 and high <= 31


def _is_year(group: str) -> bool:
    return len(group) == 4 and group[:2] in {"19", "20"}


# ---------------------------------------------------------------------------------------------------- addresses

_IPV4 = re.compile(r"(?<![0-9A-Za-z_.])(?:\d{1,3}\.){3}\d{1,3}(?![0-9A-Za-z_])(?!\.\d)", re.ASCII)
_IPV6 = re.compile(
    r"(?<![0-9A-Za-z_:.])(?=[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:)[0-9A-Fa-f:]{2,39}(?:(?:\d{1,3}\.){3}\d{1,3})?(?![0-9A-Za-z_:])",
    re.ASCII,
)


def _ips(text: str) -> Iterator[Found]:
    for match in _IPV6.finditer(text) if ":" in text else ():
        written = match.group()
        groups = [group for group in written.split(":") if group]
        # A::B is a name in some languages.
        if len(groups) >= 3 or written == "::1" or (len(groups) == 2 and len(groups[0]) == 4):
            yield from _checked_ip(match)
    for match in _IPV4.finditer(text):
        yield from _checked_ip(match)


def _checked_ip(match: re.Match[str]) -> Iterator[Found]:
    try:
        address = ipaddress.ip_address(match.group())
    except ValueError:
        return
    yield Found(Rule.IP, match.start(), match.end(), str(address))


# ------------------------------------------------------------------------------------------------- all of numbers

_DIGITS = re.compile(r"\d+")
_ASCII_DIGITS = re.compile(r"[0-9]+")
_IS_FRESH = re.compile(_BEFORE)
_LONE_CHARS = 6
"""A shorter group of digits begins nothing where no further digit or letter follows soon."""
_BETWEEN = " \t\u00a0\u2007\u202f-./()\u2010\u2011\u2012\u2013"


def _numbers(text: str, rules: frozenset[Rule]) -> dict[Rule, list[Found]]:
    """What the rules about numbers find, each for itself, in one pass over the groups of digits."""
    found: dict[Rule, list[Found]] = {rule: [] for rule in rules & _NUMBERS}
    ibans, cards = found.get(Rule.IBAN), found.get(Rule.CARD)
    ids, phones = found.get(Rule.NATIONAL_ID), found.get(Rule.PHONE)
    folded = text.casefold() if phones is not None else ""
    may_be_said = any(stem in folded for stem in _SAID_STEMS)
    for group in (_ASCII_DIGITS if text.isascii() else _DIGITS).finditer(text):
        start, end = group.span()
        head = end - start
        if head < _LONE_CHARS and not text[end : end + 3].strip(_BETWEEN):
            continue
        if (
            ibans is not None
            and head >= 2
            and start >= 2
            and text[start - 1].isalpha()
            and not (start > 2 and text[start - 3].isascii() and text[start - 3].isalnum())
            and (one := _iban_at(text, start - 2)) is not None
        ):
            ibans.append(one)
        if cards is not None and (head == 4 or head >= 14) and (one := _card_at(text, start)) is not None:
            cards.append(one)
        is_fresh = _IS_FRESH.match(text, start) is not None
        if ids is not None:
            ids += _id_at(text, start, head, is_fresh=is_fresh)
        if phones is not None:
            ways = _phone_ways(text, start, head, is_fresh=is_fresh, may_be_said=may_be_said)
            phones += _phone_at(text, ways)
    return found
