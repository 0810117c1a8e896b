"""The control topic's records: wishes and holds that concern keys, accounts and batches rather than offsets.

Every record is a state with a time, never an act, so that applying it twice equals once. Any replica and the
command line write them; every replica follows them.

======================  ==============================================================================
``hold/<scope>/<why>``  rows of this scope (an account, or one batch key) must not be submitted now
``flush/<key digest>``  rows of the key first read before this instant are due
``cancel/<batch_id>``   this batch is wanted cancelled
``rescue/<batch_id>``   the batch's rows are wanted run through the sync lane
``limit/<account>/<model>``  tokens that the account may have enqueued for the model, as refusals have taught
``canary/<shape>``      what the sample of a kind of prompt came to
``poke/<provider batch>``  a webhook says that there is news of it
``sweep/<account>``     the account (or ``all``) is wanted searched for orphans, since this instant
======================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import orjson

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ids import BatchId, ProviderBatchId

FORMAT = 1


def account_scope(account: str) -> str:
    """The hold scope of a whole provider account."""
    return f"account:{account}"


def shape_scope(shape: str) -> str:
    """The hold scope of one kind of prompt."""
    return f"shape:{shape}"


def key_scope(key: BatchKey) -> str:
    """The hold scope of one batch key."""
    return f"key:{key.digest}"


@dataclass(frozen=True, slots=True)
class Hold:
    """A scope must not submit. It is held while any reason stands, so lifting one cannot lift another."""

    scope: str
    reason: str
    since: datetime
    until: datetime | None = None
    """When it lifts by itself; None waits for an operator."""
    times: int = 1
    """How often in a row this reason has come back: the next pause grows with it."""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Flush:
    """Rows of the key first read before ``before`` are due now."""

    key_digest: str
    before: datetime


@dataclass(frozen=True, slots=True)
class CancelWish:
    """The batch is wanted cancelled; ``rows`` says what becomes of those it did not run: fail, requeue or hold."""

    batch_id: BatchId
    rows: str
    at: datetime


@dataclass(frozen=True, slots=True)
class RescueWish:
    """The unfinished rows of the batch are wanted run through the sync lane, from ``at`` on."""

    batch_id: BatchId
    at: datetime


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Tokens that the account may have enqueued for a model, as far as refusals have taught."""

    account: str
    model: str
    tokens: int
    at: datetime
    """When it was learned; it recovers from then on."""


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """What the sample of a kind of prompt came to. A bad verdict beats a good one until an operator lifts it."""

    shape: str
    is_good: bool
    rows: int
    bad_rows: int
    at: datetime


@dataclass(frozen=True, slots=True)
class Poke:
    """Somebody told us at ``at`` that there is news of a provider batch. It only says where to look."""

    provider_batch_id: ProviderBatchId
    at: datetime


ALL_ACCOUNTS = "all"
"""The scope of a sweep of every account; an account of that name is swept with the others."""


@dataclass(frozen=True, slots=True)
class SweepWish:
    """The account, or ``ALL_ACCOUNTS``, is wanted searched for orphans by a sweep that begins at or after ``at``."""

    scope: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Lifted:
    """The record under ``key`` has ended."""

    key: str


ControlEntry = Hold | Flush | CancelWish | RescueWish | TokenLimit | CanaryVerdict | Poke | SweepWish | Lifted


def encode(entry: ControlEntry) -> tuple[bytes, bytes | None]:
    """The Kafka key and value of a control record."""
    match entry:
        case Hold():
            value: dict[str, object] = {
                "since": _ms(entry.since),
                "until": None if entry.until is None else _ms(entry.until),
                "times": entry.times,
                "label": entry.label,
            }
            return f"hold/{entry.scope}/{entry.reason}".encode(), _dump(value)
        case Flush():
            return f"flush/{entry.key_digest}".encode(), _dump({"before": _ms(entry.before)})
        case CancelWish():
            return f"cancel/{entry.batch_id}".encode(), _dump({"rows": entry.rows, "at": _ms(entry.at)})
        case RescueWish():
            return f"rescue/{entry.batch_id}".encode(), _dump({"at": _ms(entry.at)})
        case TokenLimit():
            key = f"limit/{entry.account}/{entry.model}"
            return key.encode(), _dump({"tokens": entry.tokens, "at": _ms(entry.at)})
        case CanaryVerdict():
            return f"canary/{entry.shape}".encode(), _dump(
                {"good": entry.is_good, "rows": entry.rows, "bad_rows": entry.bad_rows, "at": _ms(entry.at)}
            )
        case Poke():
            return f"poke/{entry.provider_batch_id}".encode(), _dump({"at": _ms(entry.at)})
        case SweepWish():
            return f"sweep/{entry.scope}".encode(), _dump({"at": _ms(entry.at)})
        case Lifted():
            return entry.key.encode(), None


def decode(key: bytes, value: bytes | None) -> ControlEntry | None:
    """Read a control record; None for one of a kind this version does not know, or that cannot be read.

    A damaged wish is not worth stopping for: unlike a ledger record it holds no fact about a row.
    """
    try:
        text = key.decode()
        if value is None:
            return Lifted(text)
        members = orjson.loads(value)
        kind, _, rest = text.partition("/")
        if kind == "hold":
            scope, _, reason = rest.rpartition("/")
            until = members.get("until")
            return Hold(
                scope,
                reason,
                _at(members["since"]),
                None if until is None else _at(until),
                int(members.get("times", 1)),
                str(members.get("label", "")),
            )
        if kind == "flush":
            return Flush(rest, _at(members["before"]))
        if kind == "cancel":
            return CancelWish(BatchId(rest), str(members["rows"]), _at(members["at"]))
        if kind == "rescue":
            return RescueWish(BatchId(rest), _at(members["at"]))
        if kind == "limit":
            account, _, model = rest.partition("/")
            return TokenLimit(account, model, int(members["tokens"]), _at(members["at"]))
        if kind == "canary":
            rows, bad_rows = int(members["rows"]), int(members["bad_rows"])
            return CanaryVerdict(rest, members["good"] is True, rows, bad_rows, _at(members["at"]))
        if kind == "poke":
            return Poke(ProviderBatchId(rest), _at(members["at"]))
        if kind == "sweep":
            return SweepWish(rest, _at(members["at"]))
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, OSError):
        return None
    return None


def hold_key(hold: Hold) -> str:
    """The control key of a hold."""
    return f"hold/{hold.scope}/{hold.reason}"


def _dump(members: Mapping[str, object]) -> bytes:
    return orjson.dumps({"v": FORMAT, **{name: value for name, value in members.items() if value is not None}})


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def _at(value: float) -> datetime:
    return datetime.fromtimestamp(value / 1000, UTC)


@dataclass(slots=True)
class ControlState:
    """All standing control records."""

    holds: dict[str, Hold] = field(default_factory=dict)
    flushes: dict[str, Flush] = field(default_factory=dict)
    cancels: dict[BatchId, CancelWish] = field(default_factory=dict)
    sweeps: dict[str, SweepWish] = field(default_factory=dict)
    rescues: dict[BatchId, RescueWish] = field(default_factory=dict)
    limits: dict[tuple[str, str], TokenLimit] = field(default_factory=dict)
    canaries: dict[str, CanaryVerdict] = field(default_factory=dict)
    pokes: dict[ProviderBatchId, Poke] = field(default_factory=dict)

    def apply(self, entry: ControlEntry) -> None:
        """Take one record in."""
        match entry:
            case Hold():
                self.holds[hold_key(entry)] = entry
            case Flush():
                self.flushes[entry.key_digest] = entry
            case CancelWish():
                self.cancels[entry.batch_id] = entry
            case SweepWish():
                self.sweeps[entry.scope] = entry
            case RescueWish():
                self.rescues[entry.batch_id] = entry
            case TokenLimit():
                self.limits[entry.account, entry.model] = entry
            case CanaryVerdict():
                known = self.canaries.get(entry.shape)
                if known is None or known.is_good:
                    self.canaries[entry.shape] = entry
            case Poke():
                self.pokes[entry.provider_batch_id] = entry
            case Lifted(key):
                self.holds.pop(key, None)
                kind, _, rest = key.partition("/")
                if kind == "flush":
                    self.flushes.pop(rest, None)
                elif kind == "cancel":
                    self.cancels.pop(BatchId(rest), None)
                elif kind == "sweep":
                    self.sweeps.pop(rest, None)
                elif kind == "rescue":
                    self.rescues.pop(BatchId(rest), None)
                elif kind == "limit":
                    account, _, model = rest.partition("/")
                    self.limits.pop((account, model), None)
                elif kind == "canary":
                    self.canaries.pop(rest, None)
                elif kind == "poke":
                    self.pokes.pop(ProviderBatchId(rest), None)

    def standing(self, key: BatchKey, now: datetime, shape: str = "") -> list[Hold]:
        """The holds that keep this batch key (or this kind of prompt in it) from being submitted at ``now``."""
        scopes = {account_scope(key.account), key_scope(key), *([shape_scope(shape)] if shape else [])}
        return [hold for hold in self.holds.values() if hold.scope in scopes and _stands(hold, now)]

    def expired(self, now: datetime) -> list[Hold]:
        """Holds whose time is over but whose record is still there."""
        return [hold for hold in self.holds.values() if not _stands(hold, now)]

    def all_standing(self, now: datetime) -> Iterable[Hold]:
        """Every hold that stands at ``now``."""
        return [hold for hold in self.holds.values() if _stands(hold, now)]


def _stands(hold: Hold, now: datetime) -> bool:
    return hold.until is None or now < hold.until
