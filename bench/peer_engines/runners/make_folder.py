"""Write a GGUF model as a folder for transformers, in float32: `make_folder.py FROM TO`.

The weights are those of the file, and the tokenizer is what Paceline reads in it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.model_loading import load_model


def main() -> None:
    """Run the command line."""
    source, output = sys.argv[1], Path(sys.argv[2])
    files = find_model_files(source)
    load_model(files, dtype="float32").save_pretrained(output)
    for name, content in files.small.contents.items():
        if not (output / name).exists():
            (output / name).write_bytes(content)


if __name__ == "__main__":
    main()
