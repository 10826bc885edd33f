"""vLLM itself, by its public calls alone. Worker thread only."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from paceline_contract.limits import MOST_TOP_LOGPROBS
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.vllm_backend.leader_connection import connect_to_leader
from paceline_engine.vllm_backend.options import check_known
from paceline_engine.vllm_backend.row_tasks import FIELD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from paceline_engine.vllm_backend.requests import Request

# The least that its attention on a CPU takes; of its own it takes 128, and each call that goes on
# with a text computes up to a block less one again.
_CPU_BLOCK = 32
_MOST_REASON = 400  # characters
_DECIDER = "paceline_engine.vllm_backend.row_decider:RowDecider"


class Engine:
    """A running vLLM with one model.

    Attributes:
        cache_tokens: The tokens that its cache has room for.
        block_size: The tokens of a block of its cache: only whole blocks are found again.
        step_tokens: The most tokens that a step computes.
        context_length: The most tokens of a text; after them one more can be decided.
        layer_count: The model's layers.
        fingerprint: What all nodes that hold the model have to agree on.
        device: Where it computes, as torch names it.
    """

    def __init__(self, arguments: EngineArgs) -> None:
        """Load a model.

        Args:
            arguments: From `engine_arguments`.

        Raises:
            ModelLoadError: vLLM cannot serve it so.
        """
        with _refusals():
            self._engine = LLMEngine.from_engine_args(arguments)
        config = self._engine.vllm_config
        self.block_size: int = config.cache_config.block_size
        self.cache_tokens: int = (config.cache_config.num_gpu_blocks or 0) * self.block_size
        self.step_tokens: int = config.scheduler_config.max_num_batched_tokens
        # A request always decides one token more than its prompt has.
        self.context_length: int = config.model_config.max_model_len - 1
        self.layer_count: int = config.model_config.get_total_num_hidden_layers()
        self.fingerprint: str = config.additional_config[FIELD]["fingerprint"]
        self.device = torch.device(config.device_config.device_type)

    def add(self, name: str, request: Request, *, salt: str, row_task: Mapping[str, Any]) -> None:
        """Send a request.

        Args:
            name: Names its outputs.
            salt: Names its session in the cache.
            row_task: How its rows are decided.

        Raises:
            ValueError: vLLM refuses it.
        """
        params = SamplingParams(
            temperature=0.0,  # the token that the logits processor has made the largest
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=dict(row_task),
            **{"logprobs": 0, **request.settings},
        )
        prompt = {"prompt_token_ids": request.token_ids, "cache_salt": salt}
        self._engine.add_request(name, prompt, params)

    def abort(self, names: Sequence[str]) -> None:
        """Take back requests."""
        self._engine.abort_request([*names])

    def step(self) -> list[Any]:
        """Do one step of all requests, and return the outputs of those that it decided a row of."""
        outputs: list[Any] = self._engine.step()
        return outputs

    def forget_texts(self) -> None:
        """Forget all blocks of ended requests, as if others had needed the room."""
        self._engine.reset_prefix_cache()


class NodePart:
    """What a node has of a model that another node serves: as `vllm serve --headless`."""

    def __init__(self, arguments: EngineArgs) -> None:
        """Load it, which waits for the node that serves.

        Raises:
            ModelLoadError: vLLM cannot compute it so.
        """
        with _refusals():
            config = arguments.create_engine_config(headless=True)
            self._executor = MultiprocExecutor(config, monitor_workers=False)
            parallel = config.parallel_config
            # vLLM's processes would wait for ever for a node that is gone.
            self._leader = connect_to_leader(parallel.master_addr, parallel.master_port)

    def wait_for_leader(self) -> None:
        """Wait until the node that serves is gone."""
        with suppress(OSError):
            while self._leader.recv(1):
                pass

    def wait_for_processes(self) -> None:
        """Wait until one of this node's own processes ends, and end the others."""
        self._executor.start_worker_monitor(inline=True)


def engine_arguments(
    directory: Path,
    *,
    dtype: str,
    threads: int,
    capture: bool,
    vocabulary_size: int,
    fingerprint: str,
    options: Mapping[str, Any],
) -> EngineArgs:
    """Return what vLLM is told, alike on all nodes that hold one model; set its threads.

    Args:
        directory: A folder with nothing but checked files.
        dtype: What to compute in.
        threads: CPU threads of a forward.
        capture: Whether to compile the model, and on a GPU to record its forwards.
        vocabulary_size: The tokens that can be chosen.
        fingerprint: The model's, which has to be the same on all nodes.
        options: Further fields of vLLM's EngineArgs.

    Raises:
        ModelLoadError: vLLM does not know an option, or refuses its value.
    """
    check_known(options, (each.name for each in dataclasses.fields(EngineArgs)))
    torch.set_num_threads(threads)
    own: dict[str, Any] = {
        "model": str(directory),
        "dtype": dtype,
        "enforce_eager": not capture,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "load_format": "safetensors",
        "seed": 0,
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "logits_processors": [_DECIDER],
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": MOST_TOP_LOGPROBS,
        "additional_config": {
            FIELD: {"vocabulary_size": vocabulary_size, "fingerprint": fingerprint}
        },
    }
    usual: dict[str, Any] = {"disable_log_stats": True}
    if current_platform.is_cpu():
        usual["block_size"] = _CPU_BLOCK
    with _refusals():
        return EngineArgs(**{**usual, **options, **own})


@contextmanager
def _refusals() -> Iterator[None]:
    """Tell what vLLM refuses as an error of ours."""
    try:
        yield
    except Exception as error:  # of many kinds: vLLM's, pydantic's, torch's
        # Pydantic's first line only counts the errors.
        reason = str(error)[:_MOST_REASON] or type(error).__name__
        raise ModelLoadError(f"vLLM cannot serve the model: {reason}") from error
