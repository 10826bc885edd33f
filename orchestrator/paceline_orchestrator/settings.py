"""What the operator of an orchestrator can set."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads the annotations
from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.errors import InvalidFieldError
from paceline.plain_files import read_plain_file
from paceline_contract.limits import (
    DEFAULT_MESSAGE_BYTES,
    LEAST_MESSAGE_BYTES,
    MOST_BIGRAM_BYTES,
    MOST_LOOKAHEAD,
    MOST_MESSAGE_BYTES,
)
from paceline_contract.max_gram import BigramError, MaxGramRules, parse_bigrams
from paceline_contract.suffix_index import Tie
from paceline_orchestrator.fleet.discovery import (
    DEFAULT_PORT,
    Endpoint,
    Role,
    Service,
    parse_endpoints,
    parse_services,
)
from paceline_serving.security import TlsFiles, refuse_plaintext
from paceline_serving.server_settings import LISTEN_DESCRIPTION, ServerSettings
from paceline_serving.settings import Address, Settings, StringList


class PoolSettings(Settings):
    """Model servers."""

    discovery: Literal["static", "dns", "kubernetes"] = Field(
        "static",
        description="how model servers are found: listed in --targets and --drafters; or as the"
        " pods behind --target-service and --drafter-service, by looking the names up in DNS,"
        " or by watching their EndpointSlices in the pod's namespace (needs get, list and"
        " watch on them)",
    )
    targets: StringList = Field((), description="targets, HOST:PORT or NAME=HOST:PORT")
    drafters: StringList = Field(
        (), description="drafters, in the same way; without a drafter there is plain decoding"
    )
    target_service: StringList = Field(
        (), description="a headless Service of targets, NAME or NAME:PORT"
    )
    drafter_service: StringList = Field(
        (), description="a headless Service of drafters, in the same way"
    )
    pool_tls_authority: Path | None = Field(
        None,
        description="PEM file with the authorities of model servers' certificates; turns TLS to"
        " model servers on",
    )
    pool_tls_certificate: Path | None = Field(
        None, description="PEM file with this orchestrator's certificate for model servers (mTLS)"
    )
    pool_tls_key: Path | None = Field(
        None, description="PEM file with this certificate's private key"
    )

    exchange_calls: bool = Field(
        True,
        description="send calls to a model server as messages of one stream, if the server takes"
        " them so; otherwise each call is an RPC, which costs more time and CPU",
    )

    @property
    def pool_tls(self) -> TlsFiles | None:
        """The files of the connections to model servers; None is plaintext."""
        if self.pool_tls_authority is None:
            return None
        return TlsFiles(self.pool_tls_certificate, self.pool_tls_key, self.pool_tls_authority)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All model servers that are listed."""
        return (
            *parse_endpoints(self.drafters, Role.DRAFTER),
            *parse_endpoints(self.targets, Role.TARGET),
        )

    @property
    def services(self) -> tuple[Service, ...]:
        """All Services with model servers behind them."""
        return (
            *parse_services(self.drafter_service, Role.DRAFTER),
            *parse_services(self.target_service, Role.TARGET),
        )

    @model_validator(mode="after")
    def _is_a_pool(self) -> Self:
        if self.discovery == "static":
            if self.target_service or self.drafter_service:
                raise ValueError("services are looked for with --discovery=dns or kubernetes")
            if not self.targets:
                raise ValueError("--targets is needed: where the large model is")
        else:
            if self.targets or self.drafters:
                raise ValueError("--targets and --drafters are for --discovery=static")
            if not self.target_service:
                raise ValueError("--target-service is needed: where the large model is")
        if (self.pool_tls_certificate is None) != (self.pool_tls_key is None):
            raise ValueError("--pool-tls-certificate and --pool-tls-key go together")
        if self.pool_tls_certificate is not None and self.pool_tls_authority is None:
            raise ValueError("--pool-tls-certificate needs --pool-tls-authority")
        try:
            names = [it.name for it in self.endpoints] + [it.name for it in self.services]
        except InvalidFieldError as error:
            raise ValueError(error.message) from None
        if len(set(names)) < len(names):
            raise ValueError("a drafter and a target have the same name")
        return self


class ScalingSettings(Settings):
    """Autoscaling."""

    scaler_listen: Address | Literal[""] = Field(
        "",
        description="HOST:PORT for KEDA's external scaler (gRPC), and for --peer-service. Empty:"
        " none; the gauge paceline_desired_verifiers exists in any case",
    )
    peer_service: str = Field(
        "",
        description="the orchestrators' own headless Service, NAME:PORT with the port of"
        " --scaler-listen: each orchestrator then reports the number for all. Empty: this"
        " orchestrator is alone",
    )
    verifier_lookahead: int = Field(
        5,
        ge=1,
        le=MOST_LOOKAHEAD,
        description="draft tokens in a verification, for the number of targets that a stream wants:"
        " ceil(target latency / (this * drafter latency))",
    )
    fixed_verifiers: int = Field(
        0,
        ge=0,
        le=10_000,
        description="targets that are not scaled; they are subtracted from the wanted number",
    )
    least_verifiers: int = Field(1, ge=0, le=10_000, description="least number of wanted targets")
    most_verifiers: int = Field(64, ge=1, le=10_000, description="largest number of wanted targets")
    scale_down_seconds: float = Field(
        60.0, ge=0, le=86_400, description="seconds for which the largest wanted number stays valid"
    )

    @property
    def peers(self) -> Service | None:
        """Where the other orchestrators are."""
        if not self.peer_service:
            return None
        return parse_services((self.peer_service,), Role.ORCHESTRATOR)[0]

    @model_validator(mode="after")
    def _can_scale(self) -> Self:
        if self.least_verifiers > self.most_verifiers:
            raise ValueError("least_verifiers must not be more than most_verifiers")
        try:
            peers = self.peers
        except InvalidFieldError as error:
            raise ValueError(error.message) from None
        if peers is not None and (peers.port is None or not self.scaler_listen):
            raise ValueError("--peer-service needs the port of --scaler-listen, as NAME:PORT")
        return self


class RequestSettings(Settings):
    """Requests."""

    api_keys: Path | None = Field(
        None,
        description="YAML file with the hashes of the allowed keys, read again when it changes."
        " Without it every client that can connect may call",
    )
    request_limit: int = Field(
        128, ge=1, le=100_000, description="requests worked on at the same time; further ones wait"
    )
    queue_limit: int = Field(
        4096,
        ge=0,
        le=1_000_000,
        description="requests that wait for their turn; further ones are refused at once. One"
        " client alone gets four fifths of this, and of --request-limit",
    )
    queue_limit_bytes: int = Field(
        64 << 20,
        ge=1 << 20,
        le=1 << 40,
        description="bytes of the waiting requests' messages together; further requests are refused"
        " at once, too",
    )
    message_limit_bytes: int = Field(
        DEFAULT_MESSAGE_BYTES,
        ge=LEAST_MESSAGE_BYTES,
        le=MOST_MESSAGE_BYTES,
        description="most bytes of one message that is read at all. The limit by the targets'"
        " context is usually smaller",
    )
    queue_seconds: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="most seconds that a request waits for its turn; then it is refused",
    )
    default_deadline_seconds: float = Field(
        120.0,
        gt=0,
        le=86_400,
        description="seconds for a request without a deadline; not more than a call may take",
    )

    @model_validator(mode="after")
    def _can_wait(self) -> Self:
        if self.message_limit_bytes > self.queue_limit_bytes:
            raise ValueError(
                f"message_limit_bytes ({self.message_limit_bytes}) must not be more than"
                f" queue_limit_bytes ({self.queue_limit_bytes}): such a request could never wait"
            )
        return self


class TextSettings(Settings):
    """Drafting from the text."""

    max_gram_tie: Literal["earliest", "latest"] = Field(
        "earliest", description="which of several earlier places in a text Max-Gram copies from"
    )
    max_gram_bigrams: Path | None = Field(
        None,
        description="file with the most frequent successor of each token, for Max-Gram; see make"
        " bigrams. It is left out if the targets' vocabulary has another size",
    )

    def text_rules(self) -> MaxGramRules:
        """Say what texts propose by; reads the file.

        Raises:
            OSError, UnicodeDecodeError: It cannot be read.
            BigramError: It is no table.
        """
        path = self.max_gram_bigrams
        if path is None:
            return MaxGramRules(Tie(self.max_gram_tie), ())
        text = read_plain_file(path, most_bytes=MOST_BIGRAM_BYTES).decode()
        return MaxGramRules(Tie(self.max_gram_tie), parse_bigrams(text))

    @model_validator(mode="after")
    def _has_a_table(self) -> Self:
        try:
            self.text_rules()
        except (OSError, UnicodeDecodeError, BigramError) as error:
            raise ValueError(f"max_gram_bigrams {self.max_gram_bigrams}: {error}") from None
        return self


class OrchestratorSettings(
    PoolSettings, ScalingSettings, RequestSettings, TextSettings, ServerSettings
):
    """Decode for clients with the drafters and targets of a pool."""

    listen: Address = Field("127.0.0.1:50050", description=LISTEN_DESCRIPTION)

    @model_validator(mode="after")
    def _is_not_sent_in_plaintext(self) -> Self:
        if self.pool_tls is None and not self.insecure:
            addresses = [endpoint.address for endpoint in self.endpoints]
            addresses += [f"{it.name}:{it.port or DEFAULT_PORT}" for it in self.services]
            for address in addresses:
                refuse_plaintext(address, flag="--insecure")
        if self.scaler_listen and self.tls_certificate is None and not self.insecure:
            refuse_plaintext(self.scaler_listen, flag="--insecure")
        return self

    @model_validator(mode="after")
    def _keeps_its_deadline(self) -> Self:
        is_wished = "default_deadline_seconds" in self.model_fields_set
        if is_wished and self.default_deadline_seconds > self.call_limit_seconds:
            raise ValueError(
                f"default_deadline_seconds ({self.default_deadline_seconds:g}) must not be more"
                f" than call_limit_seconds ({self.call_limit_seconds:g}), which ends every call"
            )
        return self

    @model_validator(mode="after")
    def _finds_its_peers(self) -> Self:
        if self.peers is not None and self.discovery == "static":
            raise ValueError("--peer-service needs --discovery=dns or kubernetes")
        return self
