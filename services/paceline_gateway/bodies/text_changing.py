"""Fields that would change the text, and are not supported in some request or in all.

A field that nobody knows is left out, and named in the answer's header. An answer without one of
these fields would answer another question, so these fields are refused by name.
"""

from __future__ import annotations

from paceline_gateway.bodies.completion_schemas import ChatBody, CompletionBody
from paceline_gateway.bodies.message_schemas import MessagesBody
from paceline_gateway.bodies.prompt_schemas import LiveBody
from paceline_gateway.bodies.request_schemas import PacelineOptions
from paceline_gateway.bodies.response_schemas import InputItem, ResponseBody

_BODIES = (
    ChatBody,
    CompletionBody,
    PacelineOptions,
    InputItem,
    LiveBody,
    MessagesBody,
    ResponseBody,
)
# Fields of our own requests that change nothing in the text.
_HARMLESS = frozenset(
    {
        "annotations",
        "background",
        "cache_control",
        "call_id",
        "encrypted_content",
        "id",
        "include",
        "metadata",
        "model",
        "name",
        "parallel_tool_calls",
        "prompt_cache_key",
        "refusal",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "safety_identifier",
        "service_tier",
        "status",
        "store",
        "stream",
        "stream_options",
        "type",
        "user",
    }
)
# Fields that other servers have, and this one does not.
_OF_OTHERS = frozenset(
    {
        "allowed_token_ids",
        "audio",
        "bad_words",
        "chat_template",
        "chat_template_kwargs",
        "container",
        "conversation",
        "documents",
        "dry_allowed_length",
        "dry_base",
        "dry_multiplier",
        "dynatemp_exponent",
        "dynatemp_range",
        "enable_thinking",
        "epsilon_cutoff",
        "eta_cutoff",
        "function_call",
        "grammar",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "images",
        "include_stop_str_in_output",
        "json_schema",
        "length_penalty",
        "logits_processors",
        "lora_path",
        "max_new_tokens",
        "mirostat",
        "n_predict",
        "no_repeat_ngram_size",
        "num_predict",
        "parse_special_tokens",
        "partial",
        "prefix",
        "previous_response_id",
        "reasoning_effort",
        "regex",
        "repeat_penalty",
        "samplers",
        "skip_special_tokens",
        "smoothing_factor",
        "stop_regex",
        "stop_sequences",
        "stop_token_ids",
        "structural_tag",
        "system",
        "tfs_z",
        "thinking",
        "tool_call_id",
        "top_a",
        "truncate_prompt_tokens",
        "typical_p",
        "use_beam_search",
        "web_search_options",
        "xtc_probability",
        "xtc_threshold",
    }
)

TEXT_CHANGING = _OF_OTHERS | (
    frozenset(name for body in _BODIES for name in body.model_fields) - _HARMLESS
)

# The values with which they change nothing: front ends send each parameter that they know.
# Parameters with defaults of the model's are not here: where one is left out, the model's counts.
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "echo": (False,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "images": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "n": (1,),
    "no_repeat_ngram_size": (0,),
    "presence_penalty": (0,),
    "repeat_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "smoothing_factor": (0,),
    "stop": ([],),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tfs_z": (1,),
    "tools": ([],),
    "top_a": (0,),
    "top_logprobs": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}


def changes_text(name: object, value: object) -> bool:
    """Whether a field that is not supported would change the text with this value."""
    # True is 1 in Python, and no number in JSON.
    return name in TEXT_CHANGING and not any(
        value == it and isinstance(value, bool) == isinstance(it, bool)
        for it in _WITHOUT_EFFECT.get(str(name), ())
    )
