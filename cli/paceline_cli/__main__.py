"""`paceline COMMAND`: runs the command's module, and prints an error as one line.

Commands are imported when they run: `paceline --help` loads none of them.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from paceline.errors import PacelineError

_COMMANDS = {
    "demo": "see it work: the bundled models, every strategy, a timeline picture",
    "up": "run a whole system on this machine until Ctrl-C",
    "generate": "continue a prompt, and stream the text",
    "info": "describe the models and servers behind an orchestrator",
    "top": "watch servers, sessions, acceptance, queues and waste, live",
    "health": "ask servers whether they serve; the exit code tells",
    "check-pair": "check that a drafter and a target fit together",
    "simulate": "the DSI paper's figures, from the protocols on a virtual clock",
    "plan": "forecast every strategy's time for your own latencies and GPUs",
    "bench": "measure: your own pair of models, load, Table 2 of the DSI paper, and more",
    "train": "train an adapter, with which a target drafts for itself",
    "serve": "run one server: a drafter, a target, an orchestrator or a gateway",
}

# The modules of the commands that paceline_bench brings. Each other command is a module here.
_MODULES = {
    "bench": "paceline_bench.commands",
    "plan": "paceline_bench.plan.command",
    "simulate": "paceline_bench.simulate.command",
}
# The extras that commands need besides `cli`, and those of packages that few commands need.
_EXTRAS = {"bench": "bench", "plan": "bench", "simulate": "bench", "train": "server"}
_PACKAGE_EXTRAS = {
    "jinja2": "gateway",
    **dict.fromkeys(("gguf", "safetensors", "torch", "transformers"), "server"),
}

_HELP = """\
usage: paceline COMMAND [options]

A large model's exact output, faster, by spending more machines on one request.

commands:
{commands}

  paceline COMMAND --help has the command's options, with examples.

start here:
  paceline demo                             everything once, in a few minutes
  paceline up                               start a system, and in a second terminal:
  paceline generate "def fibonacci(n):"     stream a completion

Options come from flags, then PACELINE_* variables, then a YAML file (--config), then defaults.
"""

_NO_CONNECTION = "`paceline up` starts a system on this machine; --address names another one"
_TLS = (
    "it closes connections: it may speak TLS (--tls-authority), or want to see a certificate"
    " (--tls-certificate, --tls-key)"
)
_CLOSED = ("failed to connect", "Socket closed")  # gRPC's own words, like the next ones
_NO_METHOD = "Method not found!"
_OTHER_KIND = "the server there is of another kind; `paceline info` with that --address names it"
_NO_TIME = "--timeout-seconds allows more time"
_OTHER_TOKENIZER = (
    "--drafter max-gram drafts from the text itself; `paceline serve drafter --speak TARGET` lets a"
    " drafter\nspeak the target's vocabulary, and `paceline check-pair` says whether it can"
)
_NO_KEY = "--api-key-file names the file with your key"
_USAGE_ERROR = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_TERMINATED = 143  # 128 + SIGTERM
_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in {"-h", "--help", "help"}:
        width = max(map(len, _COMMANDS)) + 2
        lines = [f"  {command:{width}}{words}" for command, words in _COMMANDS.items()]
        print(_HELP.format(commands="\n".join(lines)), end="")
        return 0
    if name == "--version":
        print(f"paceline {metadata.version('paceline')}")
        return 0
    if name not in _COMMANDS:
        return _fail(f"there is no command {name!r}{_nearest(name)}", code=_USAGE_ERROR)
    return _run(name, rest)


def _run(name: str, arguments: Sequence[str]) -> int:
    import asyncio

    from paceline.errors import PacelineError

    # Else gRPC's core writes lines between ours that are no JSON: of each handshake that fails, and
    # of each idle connection that ends. It reads this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        command = import_module(_MODULES.get(name, f"paceline_cli.{name.replace('-', '_')}"))
        if name != "serve" and not {"-h", "--help"}.intersection(arguments):
            from paceline_cli.variables import unknown_variable

            if unknown := unknown_variable(command, os.environ):
                return _fail(unknown, code=_USAGE_ERROR)
        code: int = command.main(arguments)
        sys.stdout.flush()
    except PacelineError as error:
        return _fail(_words(error, command))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except asyncio.CancelledError:
        return _TERMINATED
    except BrokenPipeError:
        # The reader left, as in `paceline generate | head`; the exit must not write to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("paceline"):
            raise
        extra = _PACKAGE_EXTRAS.get(package, _EXTRAS.get(name, "cli"))
        return _fail(f"{package} is not installed: pip install 'paceline[{extra}]'")
    return code


def _words(error: PacelineError, command: ModuleType) -> str:
    """Describe an error of a command, with the option that helps."""
    from paceline.errors import (
        ConnectionLostError,
        DeadlineError,
        InvalidFieldError,
        TokenizerMismatchError,
        UnauthenticatedError,
    )
    from paceline_local.early_exit import ServerExitedError
    from paceline_serving.one_line import on_one_line

    if isinstance(error, ServerExitedError):
        return error.message  # our own lines; it has escaped what the server wrote
    if isinstance(error, InvalidFieldError):
        from paceline_cli.option_names import told_with_options

        return on_one_line(told_with_options(error, command))
    told = on_one_line(error.message)
    if isinstance(error, ConnectionLostError):
        is_closed = all(words in told for words in _CLOSED)
        return f"no connection: {told}\n{_TLS if is_closed else _NO_CONNECTION}"
    if isinstance(error, DeadlineError):
        return f"{told}\n{_NO_TIME}"
    if isinstance(error, TokenizerMismatchError):
        return f"{told}\n{_OTHER_TOKENIZER}"
    if isinstance(error, UnauthenticatedError):
        return f"{told}\n{_NO_KEY}"
    return _OTHER_KIND if error.message == _NO_METHOD else told


def _nearest(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "paceline --help lists them"
    return f"; {hint}"


def _fail(message: str, *, code: int = 1) -> int:
    print(f"paceline: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
