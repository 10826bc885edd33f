"""Errors in Anthropic's form, with the statuses that its clients handle.

    400  invalid_request_error   404  not_found_error        413  request_too_large
    401  authentication_error    429  rate_limit_error: the key's own limit
    500  api_error               504  timeout_error
    529  overloaded_error: wait, as with 503 in OpenAI's form

Its clients retry by themselves after 408, 409, 429 and 5xx, at the time in Retry-After.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline_gateway.errors import RequestError, renamed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline_gateway.http.connection import Connection

PATH = "/v1/messages"
"""Paths that begin with it speak Anthropic's form."""

_OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
# Anthropic's names of what errors name as OpenAI does.
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}


class MessagesError(RequestError):
    """An error answer in Anthropic's form.

    Args:
        error: The same in OpenAI's.
        request_id: The request's id.
    """

    def __init__(self, error: RequestError, *, request_id: str) -> None:
        told = error.body["error"]
        message = told["message"]
        is_full = error.status == 503 or told["code"] == "overloaded"
        super().__init__(message, status=_OVERLOADED if is_full else error.status)
        self.headers = error.headers
        usual = "invalid_request_error" if self.status < 500 else "api_error"
        self._told = {
            "type": "error",
            "error": {"type": _TYPES.get(self.status, usual), "message": message},
            "request_id": request_id or None,
        }

    @property
    def body(self) -> Mapping[str, Any]:
        """The answer's body, which is also the last event of a stream."""
        return self._told


def speak_anthropics(connection: Connection) -> None:
    """Have a connection answer errors in Anthropic's form, and tell the id by its header."""
    connection.headers["request-id"] = connection.request_id
    connection.translate = lambda it: MessagesError(it, request_id=connection.request_id)
    connection.error_event = lambda body: (body, "error")


def name_parameters(connection: Connection) -> None:
    """Name parameters as Anthropic does from here on; before, errors have the body's own names."""
    translate = connection.translate
    connection.translate = lambda it: translate(renamed(it, _NAMES))
