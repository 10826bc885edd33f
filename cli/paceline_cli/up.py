"""`paceline up`: a whole system on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from paceline.errors import InvalidFieldError
from paceline_contract.limits import MOST_DRAFTERS, MOST_TARGETS
from paceline_local.bundled import find_served_models
from paceline_local.models import LocalModelSettings, flags
from paceline_local.options import read_options
from paceline_local.running import running_system
from paceline_local.system import LocalSystem, LocalSystemConfig, reachable
from paceline_local.up_record import record_metrics_addresses
from paceline_serving.settings import Address, OneOrMore  # noqa: TC001 - pydantic reads them

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_EXAMPLES = """
paceline up                                        the bundled models: 1 drafter, 2 targets
paceline up --targets 4 --listen 127.0.0.1:6000
paceline up --target-model ~/big --drafter-model ~/small
paceline up --models build/smollm2                 a model that chats (`make smollm2`)
paceline up --backend simulated --targets 7 --target-option simulated-tpot-seconds=0.04
paceline up --target-option device=cuda:0 --drafter-option device=cuda:1
paceline up --drafter-option then=models/python-tiny --drafter-option then=max-gram
paceline up --http 127.0.0.1:8000                  a gateway in front, for HTTP clients
paceline up --log-directory logs                   keep the servers' logs
"""
_STOPPING = "stopping: running requests may end first; Ctrl-C again ends them at once"
_DEFAULT_ADDRESS = "127.0.0.1:50050"


class UpSettings(LocalModelSettings):
    """Run drafters, targets and an orchestrator on this machine until Ctrl-C.

    Each server is a process of its own; none is left behind. If one server ends, all end. At
    Ctrl-C running requests may end first, for up to --drain-seconds of each server
    (--orchestrator-option drain-seconds=5); a second Ctrl-C ends them at once.
    """

    targets: int = Field(2, ge=1, le=MOST_TARGETS, description="targets to run")
    drafters: int = Field(1, ge=0, le=MOST_DRAFTERS, description="drafters to run")
    target_model: str | None = Field(
        None,
        description="directory, GGUF file or hub id of the large model; without it the bundled one",
    )
    drafter_model: str | None = Field(
        None,
        description="directory, GGUF file or hub id of the small model; without it the bundled one",
    )
    adapter: str = Field(
        "",
        description="directory with an adapter for the large model, which then drafts for itself",
    )
    prune_below: float | None = Field(
        None,
        ge=0,
        le=1,
        description="least probability of its guesses (`paceline serve target --help`); 0: none"
        " is dropped",
    )
    models: Path | None = Field(
        None,
        description="folder of the bundled models, or of one model, with its drafter in"
        " FOLDER/drafter if there is one; without it the installed one",
    )
    listen: Address = Field(_DEFAULT_ADDRESS, description="address of the orchestrator")
    http: Address | Literal[""] = Field(
        "",
        description="address of a gateway for OpenAI's HTTP interface; without it there is no"
        " gateway",
    )
    insecure: bool = Field(False, description="let other machines connect in plaintext")
    orchestrator_option: OneOrMore = Field(
        (),
        description="further option of the orchestrator, as NAME=VALUE",
    )
    gateway_option: OneOrMore = Field(
        (), description="further option of the gateway, in the same way"
    )
    log_directory: Path | None = Field(
        None, description="directory for logs; without it they are not kept"
    )

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients have to show a key to the orchestrator."""
        return any(_names(each, "api-keys") for each in self.orchestrator_option)

    @model_validator(mode="after")
    def _prunes_guesses_that_there_are(self) -> Self:
        if self.prune_below is not None and not self.adapter:
            raise ValueError("--prune-below goes with --adapter")
        return self

    @model_validator(mode="after")
    def _gives_its_gateway_a_key(self) -> Self:
        shown = any(_names(each, "orchestrator-key-file") for each in self.gateway_option)
        if self.http and self.asks_for_keys and not shown:
            raise ValueError(
                "the orchestrator asks for keys, so --http needs --gateway-option"
                " orchestrator-key-file=FILE, with one of them"
            )
        return self


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(UpSettings, arguments, program="paceline up", examples=_EXAMPLES)
    config = _config(settings)
    if settings.log_directory is not None:
        settings.log_directory.mkdir(parents=True, exist_ok=True)
    try:
        asyncio.run(_run(config, settings))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped", file=sys.stderr)
    return 0


async def _run(config: LocalSystemConfig, settings: UpSettings) -> None:
    async with running_system(config, log_directory=settings.log_directory) as system:
        metrics = {
            server.name: server.metrics_address
            for server in system.servers
            if server is not system.gateway  # `top` shows only servers that decode
        }
        address = reachable(system.orchestrator_address)
        with record_metrics_addresses(address, metrics):
            _print_system(system, address, settings)
            try:
                ended = await system.wait_for_exit()
            except asyncio.CancelledError:
                print(f"\n{_STOPPING}", file=sys.stderr)
                raise
        raise ended.exit_error()


def _print_system(system: LocalSystem, address: str, settings: UpSettings) -> None:
    for server in system.servers:
        print(f"{server.name:14}{server.address:22}metrics http://{server.metrics_address}/metrics")
    for (role, word), count in system.not_used.items():
        words = word.replace("_", " ")
        print(f"NOT USED: {count} {role}{'s' if count > 1 else ''} ({words}): see `paceline info`")
    if not system.drafters:
        print("no drafter: drafts come from the text itself (Max-Gram)")
    options = "" if address == _DEFAULT_ADDRESS else f" --address {address}"
    if settings.asks_for_keys:
        options += " --api-key-file FILE"
    print(f"\nNow, in other terminals:\n  paceline generate{options} '{_example(settings)}'")
    print(f"  paceline top{options}")
    if system.gateway is not None:
        url = f"http://{reachable(system.gateway.address)}"
        asks = any(_names(each, "api-keys") for each in settings.gateway_option)
        header = " -H 'authorization: Bearer KEY'" if asks else ""
        print(f"  curl {url}/v1/models{header}\nand in a browser, to watch strategies race: {url}/")
    print("\nCtrl-C stops everything.", flush=True)


def _config(settings: UpSettings) -> LocalSystemConfig:
    target, drafter = settings.target_model, settings.drafter_model
    drafters = settings.drafters
    if settings.backend == "transformers" and (target is None or drafter is None):
        served = find_served_models(settings.models)
        target = target or str(served.target)
        if drafter is None and served.drafter is None:
            if "drafters" in settings.model_fields_set and drafters:
                raise InvalidFieldError.of(
                    "drafters", f"{settings.models} has no drafter: give --drafter-model"
                )
            drafters = 0
        drafter = drafter or str(served.drafter)
    return LocalSystemConfig(
        targets=settings.targets,
        drafters=drafters,
        target_arguments=(*settings.target_arguments(target), *_adapter_arguments(settings)),
        drafter_arguments=settings.drafter_arguments(drafter),
        orchestrator_arguments=(
            *(["--insecure"] if settings.insecure else []),
            *flags(settings.orchestrator_option),
        ),
        orchestrator_listen=settings.listen,
        gateway_listen=settings.http,
        gateway_arguments=(
            *(["--insecure"] if settings.insecure else []),
            *flags(settings.gateway_option),
        ),
    )


def _example(settings: UpSettings) -> str:
    """Return a prompt for the models: the bundled ones know Python alone."""
    target = settings.target_model
    if target is None and settings.backend == "transformers":
        target = str(find_served_models(settings.models).target)
    is_python = target is None or Path(target).name.startswith("python-")
    return "def fibonacci(n):" if is_python else "Once upon a time"


def _names(given: str, name: str) -> bool:
    return given.removeprefix("--").partition("=")[0] == name


def _adapter_arguments(settings: UpSettings) -> Iterator[str]:
    if settings.adapter:
        yield f"--adapter={settings.adapter}"
    if settings.prune_below is not None:
        yield f"--prune-below={settings.prune_below}"
