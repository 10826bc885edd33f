"""The settings of a drafter or a target."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.channel import is_loopback
from paceline_contract.limits import MOST_MODEL_NAME_CHARACTERS
from paceline_engine.deciding.cascade import MAX_GRAM, MatrixError, parse_matrix
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.validation import MOST_TREE_TOKENS
from paceline_engine.vllm_backend.options import node_rank, parse_options
from paceline_serving.server_settings import ServerSettings
from paceline_serving.settings import OneOrMore, RateList, Settings, StringList

MOST_DERIVED_TOKENS = 1 << 20
"""The largest token budget that is derived from memory; a larger one has to be set."""


class ModelSettings(Settings):
    """The model."""

    backend: Literal["transformers", "vllm", "simulated"] = Field(
        "transformers",
        description="what computes a real model: transformers, Paceline's own engine, or vLLM, in"
        " its own environment; simulated: a stand-in that waits as long as a real forward takes",
    )
    engine_option: OneOrMore = Field(
        (),
        description="with --backend vllm: an engine argument of vLLM as KEY=VALUE, such as"
        " tensor_parallel_size=4, quantization=fp8 or max_model_len=32768",
    )
    model: str = Field(
        "",
        description="decoder-only model: a directory with safetensors, a GGUF file, or a hub id",
    )
    model_revision: str = Field("", description="revision of a hub id; empty: its default branch")
    model_name: str = Field(
        "",
        max_length=MOST_MODEL_NAME_CHARACTERS,
        description="the model's name for people; empty: after --model",
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = Field(
        "float32", description="dtype of the computation"
    )
    weights: Literal["plain", "int8", "int4"] = Field(
        "plain",
        description="plain: products in --dtype, or as a quantised model's files have them; int8:"
        " in whole numbers of eight bits, faster on a CPU with VNNI, with a quarter of the memory,"
        " and other tokens now and then; int4: in four bits, or as a GGUF or quantised file has"
        " them in groups, compiled on a CPU with AVX-512 and VNNI, with fewer other tokens from"
        " such files",
    )
    device: str = Field("cpu", description="device of the computation: cpu, cuda, cuda:1, ...")
    lora: OneOrMore = Field(
        (),
        description="LoRA adapter of the model as NAME=DIR, a folder of PEFT with safetensors; a"
        " request chooses one of several by its name",
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of a forward")
    capture: bool = Field(
        True,
        description="on CUDA, record forwards of few rows and replay them, so that they wait for no"
        " launches; a cancelled forward then runs to its end; with --backend vllm: compile the"
        " model, too",
    )
    compile_steps: bool = Field(
        True,
        description="on a CPU with AVX-512, compile what a layer computes between its products, if"
        " there is a C compiler (cc, gcc or clang); in float32, eight bits and four; with one"
        " thread no bit of a logit changes; --weights int4 needs it",
    )
    invariant: bool = Field(
        False,
        description="make a text's logits depend on this text alone, bit by bit, whatever else a"
        " forward computes: on a CPU, with one thread, or two with --weights int8 or int4; with"
        " --backend vllm on the GPUs whose kernels can",
    )
    adapter: str = Field(
        "",
        description="directory with an adapter, with which a target drafts for itself; paceline"
        " train makes adapters; or mtp: the module inside the model's own checkpoint",
    )
    guesses: int = Field(
        0,
        ge=0,
        le=MOST_TREE_TOKENS,
        description="with an adapter: how many tokens to guess after each verdict, the likeliest"
        " ones. Use few where further rows of a forward take time, as on a CPU. From 16 on an EAGLE"
        " head or a module makes a tree. 0: the number on the adapter's card, or 3 of a module",
    )
    prune_below: float = Field(
        0.001,
        ge=0,
        le=1,
        description="drop guesses whose probability by the adapter's early exit is below this,"
        " before the upper layers are computed; with an EAGLE head or a module: end a chain, or a"
        " path of a tree, where its guesses together are less likely than this; 0: drop none",
    )


class StackSettings(Settings):
    """A drafter's stack."""

    then: StringList = Field(
        (),
        description="models that also draft, on the same device: smaller models with the same"
        f" tokenizer, largest first, and at last {MAX_GRAM}, the text itself",
    )
    cascade: str = Field(
        "auto",
        description="how many tokens each stage drafts, a row for the target and each model:"
        ' "[[5,14,10],[0,1,10],[0,0,10]]"; auto: by measured costs and acceptances',
    )
    leniency: float = Field(
        1.0,
        ge=1,
        le=1000,
        description="how many times too likely a token may be for a model of the stack still to"
        " accept it; above 1 drafts may differ, outputs never",
    )
    max_gram_tie: Literal["earliest", "latest"] = Field(
        "earliest", description=f"which of several earlier places in a text {MAX_GRAM} copies from"
    )
    max_gram_bigrams: str = Field(
        "",
        description=f"file with the most frequent successor of each token, for {MAX_GRAM}; see make"
        " bigrams",
    )


class SpeakingSettings(Settings):
    """A drafter of another vocabulary."""

    speak: str = Field(
        "",
        description="let a drafter draft for a target with another tokenizer: the folder of the"
        " target, or its tokenizer.json with the small files beside it, or its GGUF file",
    )


class LimitSettings(Settings):
    """Limits."""

    session_limit: int = Field(
        64, ge=1, le=100_000, description="sessions that can be open at once"
    )
    token_budget: int | None = Field(
        None,
        ge=1,
        description="tokens that all sessions together can reserve. Not given: as many as fit into"
        " 0.8 of the memory that the loaded model leaves free on its device, 0.5 on a CPU, and at"
        f" most {MOST_DERIVED_TOKENS}",
    )
    queue_limit: int = Field(256, ge=1, le=100_000, description="calls that can wait for the model")
    keep_seconds: float = Field(
        300,
        ge=0,
        le=86_400,
        description="seconds to keep the keys and values of an ended session's text, in memory that"
        " no session reserves, for the same client's next text that begins alike; 0: none"
        " are kept",
    )
    hang_limit_seconds: float = Field(
        120,
        ge=0,
        le=86_400,
        description="seconds that a forward may hang before the process ends, so that its"
        " supervisor starts it anew; counted from the time when health says NOT_SERVING because of"
        " this forward; 0: for ever",
    )


class SimulatedSettings(Settings):
    """The simulated backend."""

    simulated_ttft_seconds: float = Field(
        0.03, ge=0, le=60, description="seconds of a session's first forward"
    )
    simulated_tpot_seconds: float = Field(
        0.03, ge=0, le=60, description="seconds of every other forward"
    )
    simulated_row_seconds: float = Field(
        0, ge=0, le=60, description="further seconds for each row of a forward beyond its first"
    )
    simulated_acceptance_rate: float = Field(
        0.8, ge=0, le=1, description="how often a drafter agrees with the target"
    )
    simulated_rank_decay: float = Field(
        0.4,
        gt=0,
        le=1,
        description="q of a drafter that disagrees: its n-th runner-up is the target's token with"
        " probability q (1 - q)^(n - 1)",
    )
    simulated_self_rates: RateList = Field(
        (),
        max_length=16,
        description="let a target draft for itself: how often its guess for the token after its own"
        ' next token is right, then for the token after that, and so on: "0.8,0.6,0.4".'
        " Wrong guesses have runners-up like a drafter's",
    )
    simulated_self_nodes: int = Field(
        16, ge=1, le=256, description="most tokens that such a target proposes"
    )
    simulated_salt: int = Field(
        0,
        ge=0,
        lt=1 << 53,
        description="number of the simulated text; the same for drafter and targets",
    )
    simulated_vocabulary_size: int = Field(2048, ge=2, le=1 << 20, description="number of tokens")
    simulated_context_length: int = Field(
        1 << 17, ge=1, le=1 << 24, description="most tokens of a session"
    )


class DebugSettings(Settings):
    """Debugging."""

    debug_calls: bool = Field(
        False,
        description="show the last calls (sizes and times) at /debug/calls of --metrics-listen,"
        " which has no TLS: off loopback it needs --insecure",
    )


class ModelServerSettings(
    ModelSettings,
    StackSettings,
    SpeakingSettings,
    LimitSettings,
    SimulatedSettings,
    ServerSettings,
    DebugSettings,
):
    """Serve one model on one device."""

    @model_validator(mode="after")
    def _has_model(self) -> Self:
        if self.backend != "simulated" and not self.model:
            raise ValueError("--model is needed: a directory, a GGUF file, or a hub id")
        if self.guesses and not self.adapter:
            raise ValueError("--guesses goes with --adapter")
        if self.adapter and self.backend != "transformers":
            raise ValueError("--adapter needs --backend transformers")
        if self.speak and self.backend != "transformers":
            raise ValueError("--speak needs --backend transformers")
        if self.backend == "vllm" and self.weights != "plain":
            raise ValueError("--weights needs --backend transformers: vLLM has quantization")
        if self.backend == "vllm" and self.device != "cpu":
            raise ValueError(
                "--device needs --backend transformers: vLLM computes on the GPUs that"
                " CUDA_VISIBLE_DEVICES shows it"
            )
        if self.engine_option and self.backend != "vllm":
            raise ValueError("--engine-option needs --backend vllm")
        try:
            node_rank(parse_options(self.engine_option))
        except ModelLoadError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def is_node_part(self) -> bool:
        """Whether another node serves the model, and this one has a part of it."""
        return node_rank(parse_options(self.engine_option)) > 0

    @model_validator(mode="after")
    def _has_a_model_for_its_lora_adapters(self) -> Self:
        if not self.lora:
            return self
        if self.backend != "transformers":
            raise ValueError("--lora needs --backend transformers")
        if self.adapter:
            raise ValueError("--lora and --adapter do not go together")
        if self.then:
            raise ValueError("--lora and --then do not go together: a stack has no LoRA adapters")
        if self.speak:
            raise ValueError(
                "--lora and --speak do not go together: a drafter of another vocabulary drafts"
                " with its model alone"
            )
        return self

    @model_validator(mode="after")
    def _has_a_stack_that_can_be(self) -> Self:
        if MAX_GRAM in self.then[:-1]:
            raise ValueError(f"--then {MAX_GRAM} comes last")
        if self.then and self.backend != "transformers":
            raise ValueError("--then needs --backend transformers")
        if not self.then and (self.cascade != "auto" or self.leniency != 1):
            raise ValueError("--cascade and --leniency need --then")
        if self.cascade != "auto":
            try:
                parse_matrix(self.cascade, stage_count=1 + len(self.then))
            except MatrixError as error:
                raise ValueError(f"--cascade {error}") from None
        return self

    @model_validator(mode="after")
    def _shows_calls_to_this_machine_only(self) -> Self:
        exposed = self.metrics_listen and not is_loopback(self.metrics_listen)
        if self.debug_calls and exposed and not self.insecure:
            raise ValueError(
                f"--debug-calls would show single calls, in plaintext, to all that can reach"
                f" {self.metrics_listen}; --insecure allows that"
            )
        return self
