"""Write a GGUF file with its weights in another form: `make_gguf.py LIBRARIES FROM TO FORM`."""

from __future__ import annotations

import sys

from peer_engines.runners.llama_library import open_library

# llama_ftype
_FORMS = {"float32": 0, "float16": 1}


def main() -> int:
    """Run the command line."""
    folder, source, output, form = sys.argv[1:]
    _, library = open_library(folder)
    asked = library.llama_model_quantize_default_params()
    asked.ftype, asked.allow_requantize = _FORMS[form], True
    return int(library.llama_model_quantize(source.encode(), output.encode(), [asked]))


if __name__ == "__main__":
    sys.exit(main())
