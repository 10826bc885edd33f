"""Put together the drafter for SmolLM2: `python models/smollm2_drafter.py --help`.

Stored are the weights that are not the target's: a few layers and the last norm. The embeddings,
the head (their rows again, tied) and the tokenizer come from the target. What is written is a model
like any other, with a draft vocabulary.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from distillation import embeddings_digest, load_target, shallow
from paceline_engine.model_files.files import find_model_files
from paceline_engine.model_files.small_files import CONFIG, DRAFT_VOCABULARY, GENERATION_CONFIG
from paceline_engine.terms.backend import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

SHIPPED = Path(__file__).resolve().parent / "smollm2-drafter"
WEIGHTS = "drafter.safetensors"
CARD = "card.json"


class OtherTargetError(Exception):
    """The drafter was trained for another target; the text is one line."""


def lay_out(target: str, output: Path, *, own: Path = SHIPPED) -> None:
    """Write a drafter's folder, whole or not at all; one that is there is replaced.

    Args:
        target: As a server's --model.
        output: Where the drafter goes.
        own: The folder of the weights that are not the target's.

    Raises:
        OtherTargetError: The weights were trained with other embeddings.
        ModelLoadError: The target cannot be loaded.
    """
    files = find_model_files(target)
    whole = load_target(target)
    card = json.loads((own / CARD).read_text())
    if embeddings_digest(whole) != card["embeddings"]:
        raise OtherTargetError(f"{own}: was trained for another target than {target}")
    drafter = shallow(whole, card["layers"])
    drafter.model.load_state_dict(load_file(own / WEIGHTS), strict=False)
    torch.nn.Module.to(drafter, dtype=torch.bfloat16)
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output.parent) as folder:
        made = Path(folder) / output.name
        drafter.save_pretrained(made)
        for path in made.glob("*.safetensors"):
            path.chmod(0o644)  # Written readable by its owner alone.
        for name, content in files.small.contents.items():
            if name not in {CONFIG, GENERATION_CONFIG}:
                (made / name).parent.mkdir(exist_ok=True)
                (made / name).write_bytes(content)
        (made / DRAFT_VOCABULARY).write_bytes((own / DRAFT_VOCABULARY).read_bytes())
        if output.exists():
            shutil.rmtree(output)
        made.replace(output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder; return 1 if that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="as a server's --model")
    parser.add_argument("--output", type=Path, required=True, help="the drafter's folder")
    parser.add_argument("--own", type=Path, default=SHIPPED, help="its own weights")
    options = parser.parse_args(arguments)
    try:
        lay_out(options.target, options.output, own=options.own)
    except (OtherTargetError, ModelLoadError, FileNotFoundError) as error:
        print(f"the drafter cannot be put together: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
