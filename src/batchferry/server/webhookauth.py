"""How the sender of a delivery proves himself, and by what a repetition of it is known.

============  ==============================================================  ======================================
``standard``  Standard Webhooks: HMAC-SHA256 over ``{id}.{timestamp}.{raw     by ``webhook-id``, for as long as its
              body}``, base64, one or several signatures in one header        timestamp can be in time
``hmac``      HMAC-SHA256 over the raw body, hex or base64, in a header       by its body, for five minutes
``header``    the secret itself in a header                                   by its body, for five minutes
``path``      the secret itself as the last part of the address               by its body, for five minutes
============  ==============================================================  ======================================

Only the first binds a time. Without one, a captured delivery stays good for ever, so what it can do must stay next to
nothing: one poll in five minutes. Every secret of an account is tried, and every comparison takes the same time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, Protocol, Self

from standardwebhooks import Webhook
from starlette.exceptions import HTTPException
from starlette.requests import Request

TOLERANCE_S = 300.0
"""How far a delivery's timestamp may be from our clock, both ways (the official client's value)."""
MAX_SIGNATURES = 16
HMAC_HEADER = "x-webhook-signature"
SECRET_HEADER = "x-webhook-secret"  # noqa: S105 - the header's name

_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")  # no full stop: it separates the parts of what is signed
_TIMESTAMP = re.compile(r"[1-9][0-9]{0,11}")  # as it was signed; no second spelling of the same number


class Outcome(StrEnum):
    """What became of a delivery."""

    POKED = "poked"
    NO_EFFECT = "no_effect"
    UNKNOWN_BATCH = "unknown_batch"
    STILL_RUNNING = "still_running"
    DUPLICATE = "duplicate"
    UNKNOWN_ACCOUNT = "unknown_account"
    BAD_HEADERS = "bad_headers"
    OUT_OF_TIME = "out_of_time"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    TOO_MANY = "too_many"
    BAD_SIGNATURE = "bad_signature"
    BAD_BODY = "bad_body"
    NOT_TAKEN = "not_taken"

    @property
    def is_refusal(self) -> bool:
        """Whether the delivery was not taken."""
        return self not in _TAKEN


_TAKEN = frozenset({Outcome.POKED, Outcome.NO_EFFECT, Outcome.UNKNOWN_BATCH, Outcome.STILL_RUNNING, Outcome.DUPLICATE})


class Refused(HTTPException):
    """A delivery is not taken. The text quotes nothing of it."""

    def __init__(self, status_code: int, outcome: Outcome, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status_code, message, headers)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Proof:
    """What is checked once the body is there."""

    check: Callable[[bytes], None]
    """Raises ``Refused`` when the body is not its sender's."""
    delivery_id: str | None
    """Its name by its sender; None: it is known by its body."""
    lasts_s: float
    """How long a repetition must be known."""


class Auth(Protocol):
    """One account's way. Holds its secrets, and never shows them."""

    def begin(self, request: Request, secret: str | None, now: datetime) -> Proof:
        """Check all that can be before the body is read. ``secret`` is what the address ends with.

        Raises:
            Refused: it need not be read.
        """
        ...


class StandardAuth:
    """Standard Webhooks, with any of several keys."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._signers = [Webhook(key) for key in keys]

    def begin(self, request: Request, secret: str | None, now: datetime) -> Proof:
        """Headers and time; see ``Auth``."""
        _no_path(secret)
        delivery_id, timestamp, signatures = _headers(request)
        # The library's own check looks at the wall clock; ours at the service's, which a rehearsal sets.
        if abs(now.timestamp() - timestamp) > TOLERANCE_S:
            raise Refused(400, Outcome.OUT_OF_TIME, f"webhook-timestamp is more than {TOLERANCE_S:g} s from our clock")
        at = datetime.fromtimestamp(timestamp, UTC)

        def check(body: bytes) -> None:
            text = _text(body)
            expected = [signer.sign(delivery_id, at, text).encode() for signer in self._signers]
            if not _any_equal(expected, signatures):
                raise Refused(401, Outcome.BAD_SIGNATURE, "webhook-signature has no signature of this body by a secret")

        return Proof(check, delivery_id, 2 * TOLERANCE_S)


class BodyMacAuth:
    """HMAC-SHA256 over the raw body, in one header."""

    def __init__(self, keys: Sequence[bytes], header: str, prefix: str, digest: str) -> None:
        self._keys = list(keys)
        self._header, self._prefix = header, prefix.strip()
        self._decode = _from_hex if digest == "hex" else _from_base64

    def begin(self, request: Request, secret: str | None, now: datetime) -> Proof:  # noqa: ARG002 - no time is signed
        """The header's form; see ``Auth``."""
        _no_path(secret)
        given = self._decode(_value(request, self._header, self._prefix))
        if given is None:
            raise Refused(400, Outcome.BAD_HEADERS, f"{self._header} is missing or is no HMAC-SHA256")

        def check(body: bytes) -> None:
            if not _any_equal([hmac.digest(key, body, "sha256") for key in self._keys], [given]):
                raise Refused(401, Outcome.BAD_SIGNATURE, f"{self._header} is no signature of this body by a secret")

        return Proof(check, None, TOLERANCE_S)


class SharedSecretAuth:
    """The secret itself, in a header or (``header`` None) in the address."""

    def __init__(self, secrets: Sequence[str], header: str | None, prefix: str) -> None:
        # Digests are compared: of one length, so that not even the secret's length can be told by the time it takes.
        self._digests = [_digest(secret) for secret in secrets]
        self._header, self._prefix = header, prefix.strip()

    def begin(self, request: Request, secret: str | None, now: datetime) -> Proof:  # noqa: ARG002 - no time is signed
        """The secret; see ``Auth``."""
        if self._header is not None:
            _no_path(secret)
            secret = _value(request, self._header, self._prefix)
        if not _any_equal(self._digests, [_digest(secret or "")]):
            raise Refused(401, Outcome.BAD_SIGNATURE, "the secret is not one of this account's")
        return Proof(_nothing_signed, None, TOLERANCE_S)


@dataclass(frozen=True, slots=True)
class AuthPlan:
    """One account's way as plain values, which can be handed to another process."""

    way: Literal["standard", "hmac", "header", "path"]
    keys: tuple[bytes, ...] = field(repr=False)
    """Keys of the signatures, or the shared secrets themselves as UTF-8."""
    header: str | None = None
    prefix: str = ""
    digest: str = "hex"

    def auth(self) -> Auth:
        """Who checks by it."""
        if self.way == "standard":
            return StandardAuth(self.keys)
        if self.way == "hmac":
            return BodyMacAuth(self.keys, self.header or HMAC_HEADER, self.prefix, self.digest)
        header = None if self.way == "path" else self.header or SECRET_HEADER
        return SharedSecretAuth([key.decode() for key in self.keys], header, self.prefix)

    def plain(self) -> dict[str, Any]:
        """As JSON can carry it, secrets included."""
        return {
            "way": self.way,
            "keys": [base64.b64encode(key).decode() for key in self.keys],
            "header": self.header,
            "prefix": self.prefix,
            "digest": self.digest,
        }

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> Self:
        """What ``plain`` gave."""
        return cls(**{**plain, "keys": tuple(base64.b64decode(key) for key in plain["keys"])})


def _no_path(secret: str | None) -> None:
    if secret is not None:
        raise Refused(404, Outcome.BAD_HEADERS, "this account's webhook address ends with its name")


def _nothing_signed(_body: bytes) -> None:
    """The secret was seen before; of the body nothing is proven."""


def _any_equal(expected: Sequence[bytes], given: Sequence[bytes]) -> bool:
    # All are compared, so that the time it takes does not say which one was nearly right.
    return sum(hmac.compare_digest(ours, theirs) for ours in expected for theirs in given) > 0


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _headers(request: Request) -> tuple[str, int, list[bytes]]:
    """Delivery id, timestamp in seconds since the epoch, and the signatures."""
    delivery_id = request.headers.get("webhook-id", "")
    timestamp = request.headers.get("webhook-timestamp", "")
    signatures = request.headers.get("webhook-signature", "").split()
    if not _ID.fullmatch(delivery_id):
        raise Refused(400, Outcome.BAD_HEADERS, "webhook-id is missing or is no id")
    if not _TIMESTAMP.fullmatch(timestamp):
        raise Refused(400, Outcome.BAD_HEADERS, "webhook-timestamp is missing or is no number of seconds")
    if not 1 <= len(signatures) <= MAX_SIGNATURES:
        raise Refused(400, Outcome.BAD_HEADERS, f"webhook-signature holds 1 to {MAX_SIGNATURES} signatures")
    return delivery_id, int(timestamp), [signature.encode() for signature in signatures]


def _text(body: bytes) -> str:
    """The body is JSON, so UTF-8; written back to bytes it is what was sent, byte for byte."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise Refused(400, Outcome.BAD_BODY, "the body is not UTF-8") from None


def _value(request: Request, header: str, prefix: str) -> str:
    """A header's value behind its prefix; empty when either is missing."""
    value = request.headers.get(header, "").strip()
    return value[len(prefix) :].strip() if value.startswith(prefix) else ""


def _from_hex(text: str) -> bytes | None:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if len(found) == hashlib.sha256().digest_size else None


def _from_base64(text: str) -> bytes | None:
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return found if len(found) == hashlib.sha256().digest_size else None
