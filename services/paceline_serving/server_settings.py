"""The settings of every server process: addresses, TLS, logs, start and stop."""

from __future__ import annotations

import re
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from paceline_serving.security import ROLES, TlsFiles, refuse_plaintext
from paceline_serving.settings import Address, Settings, StringList, TcpAddress

LISTEN_DESCRIPTION = "HOST:PORT (0: any free port) or unix:PATH for gRPC"


def _check_collector(url: str) -> str:
    if url and not re.fullmatch(r"https?://[^/\s]+", url):
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    return url


class ListenSettings(Settings):
    """Where to listen."""

    listen: Address = Field("127.0.0.1:50051", description=LISTEN_DESCRIPTION)
    health_listen: Address | Literal[""] = Field(
        "127.0.0.1:0",
        description="HOST:PORT for grpc.health.v1 alone, for probes; --listen serves it, too."
        " Plaintext everywhere, since it tells only a status. Empty: no port of its own",
    )
    metrics_listen: TcpAddress | Literal[""] = Field(
        "",
        description="HOST:PORT for Prometheus metrics over HTTP. Plaintext everywhere, since"
        " metrics are counts and times. Empty: none",
    )
    reflection: bool = Field(False, description="let clients ask for the protos (gRPC reflection)")


class ServerTlsSettings(Settings):
    """Transport security."""

    tls_certificate: Path | None = Field(
        None, description="PEM file with this server's certificate chain"
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key")
    tls_client_authority: Path | None = Field(
        None, description="PEM file: require client certificates of these authorities (mTLS)"
    )
    peer_roles: StringList = Field(
        (),
        description="allowed callers, as SPIFFE_ID=ROLE with a role of"
        f" {', '.join(sorted(ROLES))}; all others are then refused. Needs"
        " --tls-client-authority. Empty: every client certificate may call",
    )
    insecure: bool = Field(
        False, description="allow plaintext on an address that other machines can reach"
    )

    @property
    def server_tls(self) -> TlsFiles:
        """The files of the server's end."""
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_authority)

    @property
    def role_of_peer(self) -> dict[str, str]:
        """SPIFFE id to role."""
        return dict(pair.split("=", 1) for pair in self.peer_roles)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key go together")
        if self.tls_client_authority is not None and self.tls_certificate is None:
            raise ValueError("--tls-client-authority needs --tls-certificate and --tls-key")
        if self.peer_roles and self.tls_client_authority is None:
            raise ValueError("--peer-roles needs --tls-client-authority")
        for pair in self.peer_roles:
            if pair.partition("=")[2] not in ROLES or not pair.startswith("spiffe://"):
                raise ValueError(
                    f"peer_roles: {pair!r} is not spiffe://...=ROLE, ROLE one of"
                    f" {', '.join(sorted(ROLES))}"
                )
        return self


class LogSettings(Settings):
    """Logs, on standard error."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the least severe level to log"
    )
    log_format: Literal["json", "text"] = Field(
        "json", description="one JSON object a line, or text for people"
    )


class TraceSettings(Settings):
    """Traces, by OpenTelemetry (the extra paceline[tracing])."""

    trace_endpoint: Annotated[str, AfterValidator(_check_collector)] = Field(
        "",
        description="http://HOST:PORT or https://HOST:PORT of a collector that takes spans by OTLP"
        " over gRPC: ids, methods, times and statuses of calls. Empty: none",
    )


class ProcessSettings(Settings):
    """Start and stop."""

    call_limit_seconds: float = Field(
        600, gt=0, le=86_400, description="most seconds that a call may take, whatever its deadline"
    )
    drain_delay_seconds: float = Field(
        0,
        ge=0,
        le=600,
        description="seconds to keep serving after SIGTERM, so that balancers notice",
    )
    drain_seconds: float = Field(
        25,
        ge=0,
        le=86_400,
        description="seconds after --drain-delay-seconds for running work to end",
    )
    exit_with_parent: bool = Field(
        False, description="stop at once when standard input closes: the parent process is gone"
    )


class RunSettings(LogSettings, TraceSettings, ProcessSettings):
    """The settings of every process, for gRPC and HTTP alike."""


class ServerSettings(ListenSettings, ServerTlsSettings, RunSettings):
    """The settings of every gRPC server process."""

    @model_validator(mode="after")
    def _is_not_exposed(self) -> Self:
        if self.tls_certificate is None and not self.insecure:
            refuse_plaintext(self.listen, flag="--insecure")
        return self
