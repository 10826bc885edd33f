"""What the operator of an orchestrator can set."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads the annotations
from typing import Self

from pydantic import Field, model_validator

from paceline.errors import InvalidFieldError
from paceline_orchestrator.discovery import Endpoint, Role, parse_endpoints
from paceline_serving.security import TlsFiles, refuse_plaintext
from paceline_serving.settings import (
    LISTEN_DESCRIPTION,
    Address,
    ServerSettings,
    Settings,
    StringList,
)

__all__ = ["OrchestratorSettings"]


class PoolSettings(Settings):
    """Model servers."""

    targets: StringList = Field(
        (), description="targets, each HOST:PORT or NAME=HOST:PORT, separated by commas"
    )
    drafters: StringList = Field(
        (), description="drafters, in the same way; without one there is plain decoding"
    )
    pool_tls_authority: Path | None = Field(
        None, description="PEM file: speak TLS to model servers, and trust these"
    )
    pool_tls_certificate: Path | None = Field(
        None, description="PEM file with the certificate that is shown to model servers (mTLS)"
    )
    pool_tls_key: Path | None = Field(None, description="PEM file with its private key")

    @property
    def pool_tls(self) -> TlsFiles | None:
        """The files of the connections to model servers; None is plaintext."""
        if self.pool_tls_authority is None:
            return None
        return TlsFiles(self.pool_tls_certificate, self.pool_tls_key, self.pool_tls_authority)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All model servers."""
        return (
            *parse_endpoints(self.drafters, Role.DRAFTER),
            *parse_endpoints(self.targets, Role.TARGET),
        )

    @model_validator(mode="after")
    def _is_a_pool(self) -> Self:
        if not self.targets:
            raise ValueError("--targets is needed: where the large model is")
        if (self.pool_tls_certificate is None) != (self.pool_tls_key is None):
            raise ValueError("pool_tls_certificate and pool_tls_key go together")
        if self.pool_tls_certificate is not None and self.pool_tls_authority is None:
            raise ValueError("pool_tls_certificate needs pool_tls_authority")
        try:
            endpoints = self.endpoints
        except InvalidFieldError as error:
            raise ValueError(error.message) from None
        names = [endpoint.name for endpoint in endpoints]
        if len(set(names)) < len(names):
            raise ValueError("a drafter and a target have the same name")
        return self


class RequestSettings(Settings):
    """Requests."""

    request_limit: int = Field(
        128, ge=1, le=100_000, description="requests at the same time; more are refused at once"
    )
    default_deadline_seconds: float = Field(
        120.0, gt=0, le=86_400, description="seconds for a request that comes without a deadline"
    )


class OrchestratorSettings(PoolSettings, RequestSettings, ServerSettings):
    """Decode for clients with the drafters and targets of a pool."""

    listen: Address = Field("127.0.0.1:50050", description=LISTEN_DESCRIPTION)

    @model_validator(mode="after")
    def _is_not_sent_in_plaintext(self) -> Self:
        if self.pool_tls is None and not self.insecure:
            for endpoint in self.endpoints:
                refuse_plaintext(endpoint.address, flag="--insecure")
        return self
