"""Whole systems of real processes: the bundled models, or simulated ones."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import Client
from support.device import DEVICE
from support.evidence import Evidence
from support.processes import ServerProcess, running
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MODELS = Path(__file__).parents[2] / "models"


class System:
    """Drafters, targets and orchestrators, each a process; every orchestrator uses all of them.

    Args:
        drafters: Model servers.
        targets: Model servers.
        orchestrator_count: How many.
        orchestrator_flags: More of their flags.
        flags_of_one: More flags of one orchestrator, by its index.
        relayed: Where orchestrators find a server instead of at its own address, by its name.
        key: What clients show the orchestrators, if these ask for a key.
    """

    def __init__(
        self,
        *,
        drafters: list[ServerProcess],
        targets: list[ServerProcess],
        orchestrator_count: int = 1,
        orchestrator_flags: tuple[str, ...] = (),
        flags_of_one: Mapping[int, tuple[str, ...]] | None = None,
        relayed: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> None:
        self._token = (lambda: key) if key is not None else None
        self.drafters = drafters
        self.targets = targets
        flags = [f"--targets={_endpoints(targets, relayed or {})}", *orchestrator_flags]
        if drafters:
            flags.append(f"--drafters={_endpoints(drafters, relayed or {})}")
        own = flags_of_one or {}
        self.orchestrators = [
            ServerProcess("orchestrator", *flags, *own.get(index, ()), name=f"orchestrator-{index}")
            for index in range(orchestrator_count)
        ]

    @property
    def models(self) -> list[ServerProcess]:
        return [*self.drafters, *self.targets]

    @property
    def servers(self) -> list[ServerProcess]:
        return [*self.models, *self.orchestrators]

    @contextmanager
    def running(self) -> Iterator[System]:
        """Run those of its servers that do not run yet; orchestrators use all that go together.

        An orchestrator that serves has reached a target: of the others it may not know yet.
        """
        with running(*(it for it in self.servers if not it.is_running)):
            self.wait_until_whole()
            yield self

    def client(self, index: int = 0) -> Client:
        return Client(self.orchestrators[index].address, token=self._token)

    def wait_until_whole(self) -> None:
        """Wait until orchestrators use every server again: one that was late pauses for a while.

        One whose tokenizer is another is well when they say that.
        """
        for index, orchestrator in enumerate(self.orchestrators):
            with self.client(index) as client:
                eventually(
                    lambda client=client: all(
                        server.ready or server.standing == "other_tokenizer"
                        for server in client.info().servers
                    ),
                    what=f"{orchestrator.name} uses every server",
                )

    def mend(self) -> None:
        """Start what has ended, let run what is frozen, and wait until all of it is used."""
        for server in self.servers:
            server.revive()
        self.wait_until_whole()

    def watch(self) -> Evidence:
        return Evidence(targets=self.targets, drafters=self.drafters)


def bundled_model(role: str, index: int = 0, *, directory: Path | None = None) -> ServerProcess:
    """Return a server of a bundled model, in fp32 on one thread; or of another directory's."""
    flags = (f"--model={directory or MODELS / f'python-{role}'}", "--dtype=float32", "--threads=1")
    return ServerProcess(
        role, *flags, f"--device={DEVICE}", "--debug-calls", name=f"{role}-{index}"
    )


def bundled_system(*, target_count: int) -> System:
    return System(
        drafters=[bundled_model("drafter")],
        targets=[bundled_model("target", index) for index in range(target_count)],
    )


def simulated_model(
    role: str,
    index: int = 0,
    *,
    seconds: float = 0.005,
    tls: bool = False,
    descriptor_limit: int | None = None,
    **settings: Any,
) -> ServerProcess:
    """Return a server of a model that waits; settings are named as the server's flags."""
    latencies = {"simulated_ttft_seconds": seconds, "simulated_tpot_seconds": seconds}
    flags = {"backend": "simulated", **latencies, **settings}
    arguments = (f"--{name.replace('_', '-')}={value}" for name, value in flags.items())
    return ServerProcess(
        role,
        *arguments,
        "--debug-calls",
        name=f"{role}-{index}",
        tls=tls,
        descriptor_limit=descriptor_limit,
    )


def simulated_system(
    *,
    drafter_count: int = 1,
    target_count: int = 2,
    orchestrator_count: int = 1,
    acceptance_rate: float = 0.8,
) -> System:
    return System(
        drafters=[
            simulated_model(
                "drafter", index, seconds=0.001, simulated_acceptance_rate=acceptance_rate
            )
            for index in range(drafter_count)
        ],
        targets=[simulated_model("target", index) for index in range(target_count)],
        orchestrator_count=orchestrator_count,
    )


def _endpoints(servers: list[ServerProcess], relayed: Mapping[str, str]) -> str:
    return ",".join(f"{it.name}={relayed.get(it.name, it.address)}" for it in servers)
