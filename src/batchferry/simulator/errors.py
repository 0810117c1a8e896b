"""Refusals as the provider words them: a status, an error envelope, perhaps a hint when to come back."""

from __future__ import annotations

from typing import Any

INVALID_REQUEST = "invalid_request_error"

_TYPES_AND_CODES: dict[int, tuple[str, str | None]] = {
    400: (INVALID_REQUEST, None),
    401: (INVALID_REQUEST, "invalid_api_key"),
    403: (INVALID_REQUEST, "unsupported_country_region_territory"),
    404: (INVALID_REQUEST, None),
    408: ("timeout", None),
    409: (INVALID_REQUEST, None),
    413: (INVALID_REQUEST, None),
    429: ("requests", "rate_limit_exceeded"),
    500: ("server_error", None),
    502: ("server_error", None),
    503: ("service_unavailable_error", "server_is_overloaded"),
    504: ("server_error", None),
}


def envelope(
    status: int,
    message: str | None = None,
    error_type: str | None = None,
    code: str | None = None,
    param: str | None = None,
) -> dict[str, Any]:
    """The error body of an answer; what is not given is taken from what usually goes with the status."""
    usual_type, usual_code = _TYPES_AND_CODES.get(status, (INVALID_REQUEST if status < 500 else "server_error", None))
    if error_type is None and code is None:
        code = usual_code
    return {
        "error": {
            "message": message if message is not None else f"The request ended with status {status}.",
            "type": error_type if error_type is not None else usual_type,
            "param": param,
            "code": code,
        }
    }


class Refused(Exception):
    """An endpoint refuses a call; becomes the HTTP answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = INVALID_REQUEST,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}
        self.headers = headers or {}
