"""Fetch what a server reads of a model: REPOSITORY REVISION DIRECTORY.

The weights are those that the index names. A repository may have them a second time, in another
format or below `original`, and pickles, which a server never opens.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
repository, revision, directory = sys.argv[1:]
# A container's first process gets no signal that it has no handler for: the pod of a rollout that
# was given up would keep its device for the whole grace period. At once, since threads download.
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
# One commit for both steps, whatever becomes of a branch meanwhile.
commit = HfApi().model_info(repository, revision=revision).sha


def fetch(*patterns, without=()):
    """Fetch the files whose names fit."""
    snapshot_download(
        repository,
        revision=commit,
        local_dir=directory,
        allow_patterns=list(patterns),
        ignore_patterns=list(without),
    )


fetch("*.json", "*.jinja", without=["*/*.json"])
index = Path(directory, INDEX)
parts = {ONE_FILE}
if index.exists():
    parts = set(json.loads(index.read_text())["weight_map"].values())
for part in parts:
    if not re.fullmatch(r"[\w.-]+\.safetensors", part):
        sys.exit(f"{repository}: {INDEX} names {part!r}, which is no .safetensors file beside it")
fetch(*parts)
print(f"{repository} at {commit}: {', '.join(sorted(parts))}")
