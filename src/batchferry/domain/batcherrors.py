"""Why a provider refused a whole batch, in our own words: what the entries of its error list are about."""

from __future__ import annotations

from enum import StrEnum


class BatchErrorKind(StrEnum):
    """What one entry of a failed batch's error list is about; the value says who is to blame."""

    ROW = "row"
    """The line it names: without that line the rest may go again."""
    TOKEN_LIMIT = "token_limit"  # noqa: S105 (a quota, no password)
    """More tokens are enqueued than the account may have: nothing is wrong, wait and send less."""
    FILE_MISSING = "file_missing"
    """The provider does not see the input file (any more): upload again."""
    ACCOUNT = "account"
    """Quota, billing, authentication or permission: hold the account, blame no row."""
    MODEL = "model"
    """The model is unknown, has no batch mode, or is closed to this account: hold the batch key."""
    TOO_LARGE = "too_large"
    """More rows or bytes than a batch may have there: send it in two halves."""
    UNKNOWN = "unknown"
    """Nothing we know, or the file as a whole: hold and tell an operator, never fail all rows."""
