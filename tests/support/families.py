"""Tiny random models of the families that people serve, on disk.

Their text is nonsense, but sharp: attention picks few tokens, and the two best logits are far
apart, so that rounding does not decide a token. Windows and soft caps are such that they matter in
texts of 40 tokens, and not yet in the 16 that a model is tried with when it is loaded.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig

from support.tiny_models import build_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY_SIZE = 300
ORIGINAL_LENGTH = 48
"""Where rotations become others in the families where they do."""
_WINDOW = 20
_CONTEXT_LENGTH = 256
_SPREAD = 0.3
_SHARPNESS = 4.0

# What most families call their sizes, and what the older ones do.
_USUAL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": _CONTEXT_LENGTH,
    "initializer_range": _SPREAD,
}
_ONE_EACH = {key: value for key, value in _USUAL.items() if key != "num_key_value_heads"}
_OLD: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": _CONTEXT_LENGTH,
    "initializer_range": _SPREAD,
}
_FALCON = {key: value for key, value in _USUAL.items() if key != "intermediate_size"}
_RECURRENT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": _SPREAD,
}
_DELTA_NETS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
}
_HALF_WINDOWED = {
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 8,
}


@dataclass(frozen=True)
class Family:
    """How to make a model of it.

    Attributes:
        config: The name of its configuration's class.
        settings: What its sizes are, and what is special.
    """

    config: str
    settings: dict[str, Any]


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


FAMILIES = {
    "llama": Family(
        "LlamaConfig",
        {
            **_USUAL,
            **_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "qwen2": Family("Qwen2Config", _USUAL),
    "qwen3": Family("Qwen3Config", {**_USUAL, "head_dim": 8}),
    "phi": Family("PhiConfig", _USUAL),
    "phi3": Family("Phi3Config", _USUAL),
    "mistral": Family("MistralConfig", {**_USUAL, "sliding_window": _WINDOW}),
    "gemma2": Family(
        "Gemma2Config",
        {
            **_USUAL,
            **_HALF_WINDOWED,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Family("Gemma3TextConfig", {**_USUAL, **_HALF_WINDOWED, "query_pre_attn_scalar": 8}),
    "mixtral": Family("MixtralConfig", {**_USUAL, "num_local_experts": 4}),
    "olmo2": Family("Olmo2Config", _USUAL),
    "granite": Family(
        "GraniteConfig", {**_USUAL, "attention_multiplier": 0.2, "residual_multiplier": 0.5}
    ),
    "starcoder2": Family("Starcoder2Config", {**_USUAL, "sliding_window": _WINDOW}),
    "gpt2": Family("GPT2Config", _OLD),
    "gpt-neox": Family("GPTNeoXConfig", _ONE_EACH),
    "gpt-bigcode": Family("GPTBigCodeConfig", _OLD),
    "opt": Family(
        "OPTConfig",
        {
            "hidden_size": 32,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": _CONTEXT_LENGTH,
            "init_std": _SPREAD,
        },
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {
            **_USUAL,
            **_HALF_WINDOWED,
            **_rope("default"),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        {
            **_USUAL,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4-moe": Family(
        "Glm4MoeConfig",
        {
            **_USUAL,
            "head_dim": 8,
            "use_qk_norm": True,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "bloom": Family(
        "BloomConfig",
        {
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "seq_length": _CONTEXT_LENGTH,
            "initializer_range": _SPREAD,
        },
    ),
    "falcon": Family("FalconConfig", _FALCON),
    "falcon with alibi": Family("FalconConfig", {**_FALCON, "alibi": True}),
    "gpt-j": Family("GPTJConfig", {**_OLD, "rotary_dim": 8}),
    "mpt": Family(
        "MptConfig",
        {
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": _CONTEXT_LENGTH,
            "initializer_range": _SPREAD,
        },
    ),
    "dynamic": Family(
        "LlamaConfig",
        {**_USUAL, "max_position_embeddings": ORIGINAL_LENGTH, **_rope("dynamic", factor=4.0)},
    ),
    "longrope": Family(
        "Phi3Config",
        {
            **_USUAL,
            **_rope(
                "longrope",
                short_factor=[1.0] * 4,
                long_factor=[1.5, 2.0, 3.0, 4.0],
                original_max_position_embeddings=ORIGINAL_LENGTH,
            ),
        },
    ),
    "qwen3-next": Family("Qwen3NextConfig", {**_USUAL, **_DELTA_NETS, **_EXPERTS}),
    "qwen3.5": Family("Qwen3_5TextConfig", {**_USUAL, **_DELTA_NETS}),
    "qwen3.5-moe": Family("Qwen3_5MoeTextConfig", {**_USUAL, **_DELTA_NETS, **_EXPERTS}),
    "olmo hybrid": Family(
        "OlmoHybridConfig", {**_USUAL, **_DELTA_NETS, "linear_allow_neg_eigval": True}
    ),
    "mamba 2": Family(
        "Mamba2Config",
        {**_RECURRENT, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    ),
    "falcon-h1": Family("FalconH1Config", {**_USUAL, **_MAMBA2, "mamba_d_ssm": 64}),
    "granite 4 hybrid": Family(
        "GraniteMoeHybridConfig",
        {
            **_USUAL,
            **_MAMBA2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "granite 4 dense": Family(
        "GraniteMoeHybridConfig",
        {
            **_USUAL,
            **_MAMBA2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 32,
        },
    ),
    "bamba": Family("BambaConfig", {**_USUAL, **_MAMBA2, "attn_layer_indices": [1]}),
    "nemotron-h": Family(
        "NemotronHConfig",
        {
            **{key: value for key, value in _USUAL.items() if key != "num_hidden_layers"},
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "head_dim": 8,
        },
    ),
    "lfm2": Family("Lfm2Config", {**_USUAL, "layer_types": ["conv", "full_attention"]}),
    "mamba": Family("MambaConfig", {**_RECURRENT, "state_size": 4}),
    "jamba": Family(
        "JambaConfig",
        {
            **_USUAL,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "num_experts": 2,
        },
    ),
    "recurrent gemma": Family(
        "RecurrentGemmaConfig",
        {
            **{key: value for key, value in _USUAL.items() if key != "initializer_range"},
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "lru_width": 32,
            "attention_window_size": _WINDOW,
        },
    ),
    "rwkv": Family("RwkvConfig", {**_RECURRENT, "context_length": _CONTEXT_LENGTH}),
    "t5": Family(
        "T5Config", {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    ),
}


def build_family(name: str, directory: Path, *, seed: int = 1) -> Path:
    """Write a model of a family with a tokenizer, and return its directory."""
    family = FAMILIES[name]
    config: PretrainedConfig = getattr(transformers, family.config)(
        vocab_size=VOCABULARY_SIZE,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **family.settings,
    )
    torch.manual_seed(seed)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: Any = kind.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
        # Else a token says more of what follows it than all before it.
        model.get_input_embeddings().weight *= 0.3
        head = model.get_output_embeddings().weight
        head.normal_(std=_SHARPNESS / head.shape[1] ** 0.5)
    model.save_pretrained(directory)
    build_tokenizer(VOCABULARY_SIZE).save(str(directory / "tokenizer.json"))
    return directory


def build_noisy_twin(directory: Path, to: Path) -> Path:
    """Write a drafter that guesses well what a model says, and wrong often enough."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    head = model.get_output_embeddings().weight
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        head += 0.2 * head.std() * noise
    model.save_pretrained(to)
    shutil.copy(directory / "tokenizer.json", to)
    return to
