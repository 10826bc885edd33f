"""A gateway's settings."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads the annotations
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.channel import is_loopback
from paceline.credentials import Tls
from paceline_contract.limits import DEFAULT_MESSAGE_BYTES, MOST_MESSAGE_BYTES
from paceline_gateway.dialects.names import (  # noqa: TC001 - as above
    ReasoningParser,
    ToolParser,
)
from paceline_gateway.http.cors import check_origins
from paceline_serving.security import refuse_plaintext
from paceline_serving.server_settings import RunSettings
from paceline_serving.settings import Settings, StringList, TcpAddress


class OrchestratorAddressSettings(Settings):
    """Orchestrators."""

    orchestrators: StringList = Field(
        (),
        description="HOST:PORT of the orchestrators. Requests are spread over those that serve; a"
        " generation that breaks at one goes on at another",
    )
    orchestrator_tls_authority: Path | None = Field(
        None,
        description="PEM file with the authorities of orchestrators' certificates; turns TLS to"
        " orchestrators on",
    )
    orchestrator_tls_certificate: Path | None = Field(
        None, description="PEM file with this gateway's certificate for orchestrators (mTLS)"
    )
    orchestrator_tls_key: Path | None = Field(
        None, description="PEM file with this certificate's private key"
    )
    orchestrator_tls_server_name: str = Field(
        "",
        description="name in the orchestrators' certificate, if it differs from the address",
    )
    orchestrator_key_file: Path | None = Field(
        None,
        description="file with this gateway's API key for orchestrators, read again when it"
        " changes. Give this key no limits there: --api-keys limits clients here",
    )

    @property
    def orchestrator_tls(self) -> Tls | None:
        """The certificates for orchestrators; None: plaintext."""
        if self.orchestrator_tls_authority is None:
            return None
        return Tls(
            ca_file=self.orchestrator_tls_authority,
            certificate_file=self.orchestrator_tls_certificate,
            key_file=self.orchestrator_tls_key,
            server_name=self.orchestrator_tls_server_name or None,
        )

    @model_validator(mode="after")
    def _has_orchestrators(self) -> Self:
        if not self.orchestrators:
            raise ValueError("--orchestrators is needed: where requests go")
        if (self.orchestrator_tls_certificate is None) != (self.orchestrator_tls_key is None):
            raise ValueError(
                "--orchestrator-tls-certificate and --orchestrator-tls-key go together"
            )
        if self.orchestrator_tls_certificate is not None and not self.orchestrator_tls_authority:
            raise ValueError("--orchestrator-tls-certificate needs --orchestrator-tls-authority")
        if self.orchestrator_tls_server_name and not self.orchestrator_tls_authority:
            raise ValueError("--orchestrator-tls-server-name needs --orchestrator-tls-authority")
        return self


class HttpSettings(Settings):
    """HTTP."""

    listen: TcpAddress = Field(
        "127.0.0.1:8000", description="HOST:PORT (0: any free port) for HTTP"
    )
    metrics_listen: TcpAddress | Literal[""] = Field(
        "",
        description="HOST:PORT for Prometheus metrics over HTTP. Plaintext everywhere, since"
        " metrics are counts and times. Empty: none",
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file with this server's certificate chain: speak HTTPS"
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key")
    api_keys: Path | None = Field(
        None,
        description="YAML file with the hashes of the allowed keys, read again when it changes."
        " Required on an address that other machines can reach",
    )
    page: bool = Field(
        True,
        description="show a page at / on which strategies race; it asks for a key if one is"
        " required",
    )
    strict: bool = Field(
        False,
        description="refuse requests with unknown fields. Without it such fields are left out, and"
        " named in the answer's header x-paceline-ignored",
    )
    cors_origin: StringList = Field(
        (),
        description="origin of a page that may read answers, such as https://app.example, or * for"
        " all of them, which needs --api-keys. None: no other site's page",
    )
    generation_config: Literal["model", "none"] = Field(
        "model",
        description="model: where a request does not say how tokens are chosen, what the model's"
        " generation_config.json says counts. none: OpenAI's defaults",
    )
    tool_parser: ToolParser = Field(
        "auto",
        description="how the model writes calls of tools; auto: the chat template tells; none:"
        " tools are refused",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="how the model marks its reasoning; auto: the chat template tells; none:"
        " reasoning is a part of the answer",
    )
    insecure: bool = Field(
        False,
        description="allow plaintext, and callers without a key, on an address that other machines"
        " can reach; and plaintext to orchestrators elsewhere",
    )


class RequestLimitSettings(Settings):
    """Limits."""

    request_limit: int = Field(
        2048,
        ge=1,
        le=100_000,
        description="requests here at the same time, including those that wait at orchestrators;"
        " further ones are refused at once (429). One client alone gets four fifths",
    )
    choice_limit: int = Field(
        16, ge=1, le=128, description="generations of one request: its prompts times n"
    )
    body_limit_bytes: int = Field(
        DEFAULT_MESSAGE_BYTES,
        ge=1024,
        le=MOST_MESSAGE_BYTES,
        description="most bytes of a request's body, whatever the model is. The limit by the"
        " model's context is usually smaller, and then applies",
    )
    bodies_limit_bytes: int = Field(
        64 << 20,
        ge=1024,
        le=1 << 40,
        description="bytes of all bodies in work together; a further body is refused at once (429)."
        " One client alone gets four fifths",
    )
    resume_seconds: float = Field(
        8,
        ge=0,
        le=86_400,
        description="seconds for which a broken generation waits for an orchestrator to continue"
        " it; then it ends (503)",
    )
    keep_alive_seconds: int = Field(
        620,
        ge=1,
        le=86_400,
        description="seconds for which a connection may be idle between two requests. It must be"
        " longer than the idle limit of a balancer in front, or a request that the"
        " balancer sends just then is lost: nginx and AWS's ALB have 60, Google's has 600",
    )
    slow_reader_seconds: float = Field(
        30,
        gt=0,
        le=3600,
        description="most seconds for a client to send a request's head, to send each mebibyte of"
        " its body, and to read nothing of an answer",
    )

    # An answer that a drain cuts is lost: over HTTP no client can resume it.
    drain_seconds: float = Field(
        RunSettings.model_fields["call_limit_seconds"].default,
        ge=0,
        le=86_400,
        description="seconds for running requests to end after SIGTERM and --drain-delay-seconds;"
        " longer requests are cut. Not given: as long as a call may take"
        " (--call-limit-seconds)",
    )

    @model_validator(mode="after")
    def _has_room_for_a_body(self) -> Self:
        # One client alone gets at most four fifths of the room.
        if 5 * self.body_limit_bytes > 4 * self.bodies_limit_bytes:
            raise ValueError(
                f"body_limit_bytes ({self.body_limit_bytes}) must not be more than four fifths of"
                f" bodies_limit_bytes ({self.bodies_limit_bytes}): there would be no room for it"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _drains_as_long_as_a_call_may_take(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "drain_seconds" in values or "call_limit_seconds" not in values:
            return values
        return {**values, "drain_seconds": values["call_limit_seconds"]}


class GatewaySettings(OrchestratorAddressSettings, HttpSettings, RequestLimitSettings, RunSettings):
    """Serve OpenAI's HTTP interface as a client of orchestrators."""

    @model_validator(mode="after")
    def _is_not_exposed(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key go together")
        check_origins(self.cors_origin, needs_keys=self.api_keys is not None)
        if self.insecure:
            return self
        if self.tls_certificate is None:
            refuse_plaintext(self.listen, flag="--insecure")
        if self.api_keys is None and not is_loopback(self.listen):
            raise ValueError(
                f"{self.listen} is reachable from other machines, so it needs --api-keys;"
                " --insecure allows callers without a key"
            )
        if self.orchestrator_tls is None:
            for address in self.orchestrators:
                refuse_plaintext(address, flag="--insecure")
        return self
