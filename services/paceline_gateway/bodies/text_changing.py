"""Fields that would change the text, and are not supported in some request or in all.

A field that nobody knows is left out, and named in the answer's header. An answer without one of
these fields would answer another question, so these fields are refused by name.
"""

from __future__ import annotations

from paceline_gateway.bodies.completion_schemas import ChatBody, CompletionBody, Extension
from paceline_gateway.bodies.message_schemas import MessagesBody
from paceline_gateway.bodies.prompt_schemas import LiveBody
from paceline_gateway.bodies.response_schemas import InputItem, ResponseBody

_BODIES = (ChatBody, CompletionBody, Extension, InputItem, LiveBody, MessagesBody, ResponseBody)
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
