"""Errors in OpenAI's form, with the statuses that its clients handle.

    400  fix the request            404  another model, another path     413  a smaller body
    401  another key                408  send faster                     429  wait: the key's limit
    503  wait: overloaded, loading, shutting down                        504  ask for less
    502  tell the operator: orchestrators refuse the gateway itself      500  report it

Its clients retry by themselves after 408, 429 and 5xx, at the time in Retry-After.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline import errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MOST_TEXT = 1000
_SAMPLING = "sampling."

# OpenAI's names of the wire's fields. Sampling parameters have the same names there, except for the
# grammar. The caller names the field of the prompt.
_PARAMETERS = {
    "add_special_tokens": "prompt",
    "branches": "paceline.branches",
    "drafter": "paceline.drafter",
    "fill_in": "suffix",
    "ignore_eos": "paceline.ignore_eos",
    "lookahead": "paceline.lookahead",
    "lora": "model",
    "predicted_text": "prediction",
    "rule": "paceline.rule",
    "sampling.grammar": "response_format",
    "sampling.grammar.json_schema": "response_format",
    "stop_strings": "stop",
    "strategy": "paceline.strategy",
    "target_count": "paceline.targets",
    "targets": "paceline.targets",
    "verification_rule": "paceline.rule",
    "width": "paceline.width",
}
# gRPC's message when an orchestrator does not read so large a message.
_UNREAD = re.compile(r"message larger than max \(\d+ vs\. (?P<limit>\d+)\)")
# Addresses of machines, as gRPC, orchestrators and proxies write them.
_ADDRESS = re.compile(
    r"(?:ipv4|ipv6|unix|unix-abstract|dns):[^\s;,)]+"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|\[[0-9a-f:.]*:[0-9a-f:.]*\](?::\d+)?"
    r"|\b(?:localhost|[a-z0-9_-]+(?:\.[a-z0-9_-]+)+):\d+\b",
    re.IGNORECASE,
)

# Where in a grammar a fault is, and lines of that grammar, as servers tell them.
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_EXCERPT = re.compile(r"\s+\d+ \| ")

_PROMPT_FIELDS = frozenset({"prompt", "text", "token_ids", "token_ids.ids", "ids", "parts"})

# Status, type and code of an error, by the first class that fits.
_KINDS: tuple[tuple[type[errors.PacelineError], int, str, str | None], ...] = (
    (errors.ContextLengthExceededError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.InvalidFieldError, 400, "invalid_request_error", None),
    (errors.ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (errors.UnsupportedError, 400, "invalid_request_error", "unsupported"),
    (errors.OverloadedError, 429, "requests", "overloaded"),
    (errors.CacheExhaustedError, 503, "server_error", "overloaded"),
    (errors.TryAgainError, 503, "server_error", "unavailable"),
    # A new version of the model is being rolled out; a retry gets an answer of one version.
    (errors.ModelMismatchError, 503, "server_error", "unavailable"),
    (errors.DeadlineError, 504, "server_error", "timeout"),
)


class RequestError(Exception):
    """An error answer.

    Attributes:
        status: The HTTP status.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers: dict[str, str] = {}
        if retry_after_seconds is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_seconds)))
        self._error = {
            "message": message[:_MOST_TEXT],
            "type": kind,
            "param": param,
            "code": code,
        }

    @property
    def body(self) -> Mapping[str, Any]:
        """The answer's body."""
        return {"error": self._error}


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return an error with its interface's own name of the parameter.

    Args:
        names: The interface's names, by those that errors have otherwise.
    """
    told = error.body["error"]
    param: str | None = told["param"]
    if param is None or param not in names:
        return error
    message: str = told["message"]
    if message.startswith(f"{param}:"):
        message = names[param] + message.removeprefix(param)
    other = RequestError(
        message, status=error.status, kind=told["type"], param=names[param], code=told["code"]
    )
    other.headers = error.headers
    return other


def no_key(error: errors.UnauthenticatedError) -> RequestError:
    """Say that a client's own key is missing or wrong."""
    refusal = RequestError(error.message, status=401, code="invalid_api_key")
    refusal.headers["www-authenticate"] = "Bearer"
    return refusal


def too_much(error: errors.OverloadedError) -> RequestError:
    """Say that a client's own key is used up for now."""
    return RequestError(
        error.message,
        status=429,
        kind="requests",
        code="rate_limit_exceeded",
        retry_after_seconds=error.retry_after_seconds,
    )


def of_paceline(error: errors.PacelineError, *, prompt: str) -> RequestError:
    """Turn an orchestrator's error into OpenAI's form.

    Args:
        prompt: The name of the prompt's parameter in this request, such as "messages".
    """
    if isinstance(error, errors.PermissionDeniedError):
        return _not_let_in()
    if (unread := _UNREAD.search(error.message)) is not None:
        return RequestError(
            f"{prompt}: with it the request has more than {unread['limit']} bytes, the most that"
            " orchestrators take",
            status=413,
            param=prompt,
            code="too_large",
        )
    for error_class, status, kind, code in _KINDS:
        if isinstance(error, error_class):
            retry = error.retry_after_seconds
            may_pass = status in {429, 503}
            if may_pass and retry is None:
                retry = 1.0
            return RequestError(
                _message(error, prompt),
                status=status,
                kind=kind,
                code=code,
                param=_parameter(error, prompt),
                retry_after_seconds=retry if may_pass else None,
            )
    return RequestError(
        "the gateway got no answer; its log has the cause, under the request's id",
        status=500,
        kind="server_error",
        code="internal",
    )


@contextmanager
def naming_grammar(param: str | None) -> Iterator[None]:
    """Turn errors about a grammar that the gateway made into OpenAI's form.

    Args:
        param: The parameter from which the grammar was made; None: the client wrote it itself.

    Raises:
        RequestError: The grammar cannot be enforced.
    """
    try:
        yield
    except errors.PacelineError as error:
        refusal = _of_grammar(error, param=param)
        if refusal is None:
            raise
        raise refusal from error


def _of_grammar(error: errors.PacelineError, *, param: str | None) -> RequestError | None:
    violation = _violation(error)
    if param is None or violation is None or not violation.field.startswith("sampling.grammar"):
        return None
    # The grammar itself, which may follow the reason, is the gateway's.
    reason = _EXCERPT.split(violation.description, maxsplit=1)[0]
    words = f"{param}: cannot be enforced: {_PLACE.sub('', reason)}"
    code = "unsupported" if isinstance(error, errors.UnsupportedError) else None
    return RequestError(words, param=param, code=code)


def _not_let_in() -> RequestError:
    """Say that orchestrators refuse the gateway, not the gateway's client."""
    return RequestError(
        "the orchestrators refuse this gateway's own key or certificate; the gateway's operator"
        " has to correct that, and the gateway's log has the orchestrators' messages",
        status=502,
        kind="server_error",
        code="gateway_refused",
    )


def _parameter(error: errors.PacelineError, prompt: str) -> str | None:
    if (violation := _violation(error)) is not None:
        field = violation.field
        return prompt if field in _PROMPT_FIELDS else _name_of(field)
    if isinstance(error, errors.ModelNotFoundError):
        return "model"
    return prompt if isinstance(error, errors.ContextLengthExceededError) else None


def _is_field(word: str) -> bool:
    return word in _PARAMETERS or word.startswith(_SAMPLING)


def _name_of(field: str) -> str:
    return _PARAMETERS.get(field, field.removeprefix(_SAMPLING))


def _message(error: errors.PacelineError, prompt: str) -> str:
    """Return the server's message, with the client's name of the field, without addresses.

    The transport's messages are for operators; the log has them.
    """
    if isinstance(error, errors.ConnectionLostError):
        return "no orchestrator can be reached now"
    violation = _violation(error)
    if violation is None:
        return _ADDRESS.sub("(an address)", error.message)
    return f"{_parameter(error, prompt)}: {violation.description}"


def _violation(error: errors.PacelineError) -> errors.FieldViolation | None:
    """Return the wrong field; the message of an UnsupportedError begins with the field's name."""
    if error.violations:
        return error.violations[0]
    field, _, description = error.message.partition(": ")
    if not (isinstance(error, errors.UnsupportedError) and _is_field(field)):
        return None
    return errors.FieldViolation(field, description)
