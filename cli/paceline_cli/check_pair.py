"""`paceline check-pair`: do a drafter and a target fit together, and does it pay?"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field, model_validator
from rich.console import Console

from paceline import AsyncClient
from paceline.channel import open_async_channel
from paceline.errors import InvalidFieldError, LoadingError, UnsupportedError
from paceline.plain_files import read_plain_text
from paceline.status import decode
from paceline.v1 import model_service_pb2, model_service_pb2_grpc
from paceline.v1.model_service_pb2 import (
    MODEL_ROLE_DRAFTER,
    MODEL_ROLE_TARGET,
    MODEL_ROLE_UNSPECIFIED,
)
from paceline_cli.comparison import STRATEGIES, Asked, compare
from paceline_cli.connection import tls_of
from paceline_cli.other_vocabulary import tokens_in_folder, tokens_of_server, translation_of
from paceline_cli.server_kind import ROLE_NAMES, kind_of_server
from paceline_cli.stack_worth import stack_table
from paceline_contract.limits import MOST_TARGETS
from paceline_engine.terms.backend import ModelLoadError
from paceline_local.models import LocalModelSettings
from paceline_local.options import ClientTlsSettings, read_options
from paceline_local.running import running_system
from paceline_local.screen import diagnostics, progress, table
from paceline_local.system import LocalSystemConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.v1.model_service_pb2 import GetModelInfoResponse
    from paceline_cli.other_vocabulary import Translation

_EXAMPLES = """
paceline check-pair --drafter models/python-drafter --target models/python-target
paceline check-pair --drafter ~/small --target 127.0.0.1:50061
paceline check-pair --drafter ~/small --target ~/big --prompts my-prompts.txt
paceline check-pair --drafter ~/small --target ~/big --drafter-option then=max-gram
paceline check-pair --drafter ~/small --target ~/big --target-option device=cuda:0
"""
_PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    'class Point:\n    """A point in the plane."""\n\n    def __init__(self, ',
    "The quick brown fox",
)
_MOST_PROMPT_BYTES = 64 << 20  # of the file of prompts
_INFO_SECONDS = 30.0
_CONNECT_SECONDS = 10.0  # a server that was started just now does not listen yet


class CheckPairSettings(LocalModelSettings, ClientTlsSettings):
    """Check that a drafter and a target fit together, and measure how much the drafter helps.

    Compares tokenizers, vocabularies and end-of-text tokens, then decodes some prompts greedily
    with and without the drafter. A drafter with another tokenizer that is started here speaks the
    target's, and the output says how. If the drafter is a stack, the output also has how often its
    stages accept each other's tokens, and the gain of each stage. The exit code is 0 if the pair
    fits and every output is identical.
    """

    drafter: str = Field(
        "", description="directory, GGUF file or hub id of the small model, or HOST:PORT"
    )
    target: str = Field(
        "", description="directory, GGUF file or hub id of the large model, or HOST:PORT"
    )
    targets: int = Field(
        1,
        ge=1,
        le=MOST_TARGETS,
        description="copies of the target to start; DSI gains from two or more",
    )
    prompts: Path | None = Field(
        None, description="file with one prompt a line; without it some built-in prompts"
    )
    max_tokens: int = Field(48, ge=2, description="tokens of each completion")
    timeout_seconds: float = Field(
        600, gt=0, description="seconds to wait for a server that is still loading"
    )

    @property
    def target_folder(self) -> str:
        """Where a drafter finds the target's tokenizer, for a command that is shown."""
        return "TARGET" if _address(self.target) else self.target

    @model_validator(mode="after")
    def _is_a_pair(self) -> Self:
        if not self.drafter or not self.target:
            raise ValueError("--drafter and --target are needed")
        if self.tls_authority is None and self.tls_certificate is None:
            return self
        if self.tls_authority is None:
            raise ValueError("--tls-certificate needs --tls-authority")
        if not (_address(self.drafter) and _address(self.target)):
            raise ValueError("TLS is for servers that run already: give both as HOST:PORT")
        return self


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact of the drafter and of the target, and whether the two fit."""

    what: str
    drafter: str
    target: str
    fits: bool


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        CheckPairSettings, arguments, program="paceline check-pair", examples=_EXAMPLES
    )
    return asyncio.run(_check(settings, _prompts(settings)))


async def _check(settings: CheckPairSettings, prompts: Sequence[str]) -> int:
    # Servers that should run already are asked first, before a model is loaded in vain.
    running = {
        word: await _model_info(word, settings)
        for word in (settings.drafter, settings.target)
        if _address(word)
    }
    _expect_roles(settings, running)
    with TemporaryDirectory(prefix="paceline-tokens-") as folder:
        translation = await _translation(settings, running, Path(folder))
        if translation is not None:
            print(translation.told(), flush=True)
            if not translation.overlap.suffices:
                return 1
            if _address(settings.drafter):
                print(f"Start the drafter with --speak {settings.target_folder}.")
                return 1
        return await _check_running(settings, running, prompts, translation)


async def _translation(
    settings: CheckPairSettings, running: Mapping[str, GetModelInfoResponse], folder: Path
) -> Translation | None:
    """Compare the tokens of models before these are loaded; None: they are alike, or unknown."""
    if any(each.removeprefix("--").startswith("speak=") for each in settings.drafter_option):
        return None
    found = []
    for index, word in enumerate((settings.drafter, settings.target)):
        if word not in running:
            found.append(tokens_in_folder(word))
            continue
        (own := folder / str(index)).mkdir()
        channel = open_async_channel(word, tls=tls_of(settings), insecure=settings.insecure)
        async with channel:
            found.append(await tokens_of_server(channel, running[word], own))
    drafter, target = found
    if drafter is None or target is None:
        return None
    try:
        return translation_of(drafter, target)
    except ModelLoadError as error:
        raise InvalidFieldError(f"the tokenizers differ, and {error}") from None


async def _check_running(
    settings: CheckPairSettings,
    running: Mapping[str, GetModelInfoResponse],
    prompts: Sequence[str],
    translation: Translation | None,
) -> int:
    config = local_config(settings, speak=translation.speak if translation else None)
    async with running_system(config) as system:
        drafter = running.get(settings.drafter) or await _model_info(
            system.drafters[0].address, settings
        )
        target = running.get(settings.target) or await _model_info(
            system.targets[0].address, settings
        )
        findings = list(compare_models(drafter, target))
        Console(highlight=False).print(_table(findings))
        if not all(finding.fits for finding in findings):
            print("\nThe pair does not fit: speculation needs one tokenizer for both.")
            return 1
        code = await _compare_outputs(system.orchestrator_address, prompts, settings.max_tokens)
        if translation is not None:
            print(
                "\nMeasured with, and to be started as: paceline serve drafter --model"
                f" {settings.drafter} --speak {settings.target_folder}"
            )
        if drafter.stages:
            address = _address(settings.drafter) or system.drafters[0].address
            stages = (await _model_info(address, settings)).stages
            print("\nThe drafter's stages, as measured while it drafted:")
            Console(highlight=False).print(stack_table(stages))
        return code


async def _compare_outputs(address: str, prompts: Sequence[str], max_tokens: int) -> int:
    async with AsyncClient(address) as client:
        runs = len(prompts) * len(STRATEGIES)
        with progress(f"{len(prompts)} prompts x {max_tokens} tokens", total=runs) as step:
            asked = [*map(Asked.to_continue, prompts)]
            comparison = await compare(client, asked, max_tokens=max_tokens, on_run=step)
    print()
    Console(highlight=False).print(comparison.table())
    if not comparison.drafted_token_count:
        print("\nNothing was drafted, so this does not tell whether the pair fits.")
        return 1
    if comparison.all_identical:
        print("\nThe pair fits, and every output was identical to plain decoding.")
        return 0
    print(
        "\nThe pair fits, but an output differed from plain decoding. In 16 bits rounding"
        " can decide near-ties differently in a larger forward; in float32 it hardly ever does."
    )
    return 1


def compare_models(
    drafter: GetModelInfoResponse, target: GetModelInfoResponse
) -> Iterator[Finding]:
    """Compare the facts that must be equal, and list further ones that help to judge a pair."""

    def finding(what: str, ours: object, theirs: object) -> Finding:
        return Finding(what, str(ours), str(theirs), fits=ours == theirs)

    yield Finding("model", drafter.model_name, target.model_name, fits=True)
    yield finding(
        "tokenizer", drafter.tokenizer_fingerprint[:16], target.tokenizer_fingerprint[:16]
    )
    yield finding("vocabulary", drafter.vocabulary_size, target.vocabulary_size)
    yield finding("end of text", [*drafter.eos_token_ids], [*target.eos_token_ids])
    steps = (f"{_step_ms(drafter):.2f}", f"{_step_ms(target):.2f}")
    yield Finding("ms per token", *steps, fits=True)


def _step_ms(model: GetModelInfoResponse) -> float:
    return model.forward_latencies[0].median_ns / 1e6 if model.forward_latencies else 0.0


def _table(findings: Sequence[Finding]) -> object:
    rows = [
        (each.what, each.drafter, each.target, "" if each.fits else "[bold red]differs[/]")
        for each in findings
    ]
    return table(("", "drafter", "target", ""), rows)


async def _model_info(address: str, settings: CheckPairSettings) -> GetModelInfoResponse:
    channel = open_async_channel(address, tls=tls_of(settings), insecure=settings.insecure)
    async with channel:
        with suppress(TimeoutError):  # the call below reports why there is no connection
            async with asyncio.timeout(_CONNECT_SECONDS):
                await channel.channel_ready()
        try:
            with suppress(LoadingError):
                return await _ask_model_info(channel)
            await _wait_until_serving(channel, address, settings)
            return await _ask_model_info(channel)
        except UnsupportedError:
            pass
    kind = await kind_of_server(address, settings)
    raise UnsupportedError(f"{address} is {kind}, not a drafter or a target")


async def _ask_model_info(channel: grpc.aio.Channel) -> GetModelInfoResponse:
    stub = model_service_pb2_grpc.ModelServiceStub(channel)
    request = model_service_pb2.GetModelInfoRequest()
    try:
        return await stub.GetModelInfo(request, timeout=_INFO_SECONDS)
    except grpc.RpcError as broken:
        raise decode(broken) from broken


def _expect_roles(settings: CheckPairSettings, running: Mapping[str, GetModelInfoResponse]) -> None:
    """Refuse a running server of another kind than its option says.

    Raises:
        InvalidFieldError: A server is of the other kind.
    """
    roles = {
        "drafter": (settings.drafter, MODEL_ROLE_DRAFTER),
        "target": (settings.target, MODEL_ROLE_TARGET),
    }
    wrong = {
        option: ROLE_NAMES[running[address].role]
        for option, (address, role) in roles.items()
        if address in running and running[address].role not in {role, MODEL_ROLE_UNSPECIFIED}
    }
    if not wrong:
        return
    faults = [f"--{option} {roles[option][0]} is {kind}" for option, kind in wrong.items()]
    swapped = ": swap them" if len(wrong) == len(roles) else f", not a {next(iter(wrong))}"
    raise InvalidFieldError(" and ".join(faults) + swapped)


async def _wait_until_serving(
    channel: grpc.aio.Channel, address: str, settings: CheckPairSettings
) -> None:
    diagnostics().print(f"waiting for {address}, which is still loading ...", markup=False)
    request = health_pb2.HealthCheckRequest()
    watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=settings.timeout_seconds)
    try:
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return
    except grpc.RpcError as broken:
        raise decode(broken) from broken
    finally:
        watch.cancel()


def local_config(settings: CheckPairSettings, *, speak: str | None = None) -> LocalSystemConfig:
    """Configure the system to start: models given as directories, and an orchestrator.

    Args:
        speak: Where a drafter of another vocabulary finds the target's; None: it is its own.
    """
    target, drafter = _address(settings.target), _address(settings.drafter)
    return LocalSystemConfig(
        targets=0 if target else settings.targets,
        drafters=0 if drafter else 1,
        target_arguments=settings.target_arguments(settings.target),
        drafter_arguments=(
            *settings.drafter_arguments(settings.drafter),
            *(() if speak is None else (f"--speak={speak}",)),
        ),
        orchestrator_arguments=tuple(_pool_flags(settings)),
        more_targets=(target,) if target else (),
        more_drafters=(drafter,) if drafter else (),
    )


def _pool_flags(settings: CheckPairSettings) -> Iterator[str]:
    """Return the orchestrator's options for connections to running servers."""
    for name in ("tls_authority", "tls_certificate", "tls_key"):
        if (file := getattr(settings, name)) is not None:
            yield f"--pool-{name.replace('_', '-')}={file}"
    if settings.insecure:
        yield "--insecure"


def _address(word: str) -> str | None:
    """Return the word if it is HOST:PORT and not a directory."""
    host, _, port = word.rpartition(":")
    return word if host and port.isdecimal() and not Path(word).exists() else None


def _prompts(settings: CheckPairSettings) -> Sequence[str]:
    if settings.prompts is None:
        return _PROMPTS
    text = read_plain_text(settings.prompts, most_bytes=_MOST_PROMPT_BYTES, allow_pipe=True)
    return [line for line in text.split("\n") if line]
