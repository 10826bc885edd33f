"""`paceline bench load`: many streams at once on a fixed set of targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.load.settings import LoadSettings
from paceline_bench.load.simulated_command import run_simulated
from paceline_local.options import read_options

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMPLES = """
paceline bench load
paceline bench load --streams 1,4,16 --requests 20 --targets 2
paceline bench load --parts scaling                            one orchestrator and two
paceline bench load --acceptance 0.3 --strategies auto         beside plain decoding
paceline bench load --drafter-ms 20 --json load.json --chart load.svg
paceline bench load --backend transformers                     the bundled models, beside others
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        LoadSettings, arguments, program="paceline bench load", examples=_EXAMPLES
    )
    if settings.backend == "transformers":
        from paceline_bench.load.peers_command import run_beside_peers  # needs torch

        return run_beside_peers(settings)
    return run_simulated(settings)
