#include "request.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "utf8.hpp"

namespace paceline::detail {
namespace {

constexpr auto kLargest = std::numeric_limits<std::uint32_t>::max();

std::uint32_t count(const std::string& option, std::int64_t value) {
  if (value < 0 || value > kLargest) {
    throw InvalidFieldError::of(
        option, "must be in [0, " + std::to_string(kLargest) + "], not " + std::to_string(value));
  }
  return static_cast<std::uint32_t>(value);
}

double finite(const std::string& option, double value) {
  if (!std::isfinite(value)) {
    throw InvalidFieldError::of(option, "must be finite, not " + std::to_string(value));
  }
  return value;
}

const std::string& text(const std::string& option, const std::string& value) {
  if (!is_utf8(value)) throw InvalidFieldError::of(option, "must be UTF-8");
  return value;
}

template <class Wire, class Enum>
Wire word(const std::string& option, Enum value) {
  if (value != Enum::Unknown) return static_cast<Wire>(value);
  std::string choices;
  for (const auto choice : words<Enum>) {
    if (choice != to_string(Enum::Unknown)) {
      choices += (choices.empty() ? "" : ", ") + std::string(choice);
    }
  }
  throw InvalidFieldError::of(option, "must be one of " + choices);
}

template <class Field>
void append_tokens(const std::string& option, const std::vector<std::int64_t>& ids, Field& field) {
  field.Reserve(static_cast<int>(ids.size()));
  for (const auto id : ids) field.Add(count(option, id));
}

void set_prompt(const Prompt& prompt, v1::GenerateRequest& request) {
  if (const auto* words = std::get_if<std::string>(&prompt)) {
    request.set_text(text("text", *words));
  } else {
    append_tokens("ids", std::get<1>(prompt), *request.mutable_token_ids()->mutable_ids());
  }
}

void set_numbers(const GenerateOptions& options, v1::SamplingParameters& sampling) {
  for (const auto& [name, member] : sampling_numbers) {
    if (const auto& given = options.*member) {
      const auto* field = sampling.GetDescriptor()->FindFieldByName(name);
      sampling.GetReflection()->SetDouble(&sampling, field, finite(name, *given));
    }
  }
}

void set_grammar(const Grammar& grammar, v1::SamplingParameters& sampling) {
  if (const auto* schema = std::get_if<JsonSchema>(&grammar)) {
    sampling.mutable_grammar()->set_json_schema(text("grammar", schema->schema));
  } else if (const auto* regex = std::get_if<Regex>(&grammar)) {
    sampling.mutable_grammar()->set_regex(text("grammar", regex->pattern));
  } else if (const auto* lark = std::get_if<Lark>(&grammar)) {
    sampling.mutable_grammar()->set_lark(text("grammar", lark->grammar));
  } else if (const auto* choices = std::get_if<Choices>(&grammar)) {
    auto& texts = *sampling.mutable_grammar()->mutable_choices();
    for (const auto& choice : choices->texts) texts.add_texts(text("grammar", choice));
  }
}

void set_sampling(const GenerateOptions& options, v1::GenerateRequest& request) {
  v1::SamplingParameters sampling;
  set_numbers(options, sampling);
  if (options.top_k) sampling.set_top_k(count("top_k", *options.top_k));
  if (options.min_tokens) sampling.set_min_tokens(count("min_tokens", *options.min_tokens));
  for (const auto& [id, bias] : options.logit_bias) {
    (*sampling.mutable_logit_bias())[count("logit_bias", id)] = finite("logit_bias", bias);
  }
  set_grammar(options.grammar, sampling);
  if (sampling.ByteSizeLong() > 0) *request.mutable_sampling() = sampling;
}

void set_text_options(const GenerateOptions& options, v1::GenerateRequest& request) {
  for (const auto& stop : options.stop) request.add_stop_strings(text("stop", stop));
  if (options.add_special_tokens) request.set_add_special_tokens(*options.add_special_tokens);
  if (options.parse_special_tokens) {
    request.set_parse_special_tokens(*options.parse_special_tokens);
  }
  request.set_request_id(text("request_id", options.request_id));
}

void set_length(const GenerateOptions& options, v1::GenerateRequest& request) {
  if (options.max_tokens) request.set_max_tokens(count("max_tokens", *options.max_tokens));
  request.set_ignore_eos(options.ignore_eos);
  append_tokens("resume_token_ids", options.resume_token_ids, *request.mutable_resume_token_ids());
  if (!options.seed) return;
  if (*options.seed < 0) {
    throw InvalidFieldError::of("seed", "must be at least 0, not " + std::to_string(*options.seed));
  }
  request.set_seed(static_cast<std::uint64_t>(*options.seed));
}

void set_decoding(const GenerateOptions& options, v1::GenerateRequest& request) {
  if (options.strategy) request.set_strategy(word<v1::Strategy>("strategy", *options.strategy));
  if (options.lookahead) request.set_lookahead(count("lookahead", *options.lookahead));
  if (options.targets) request.set_target_count(count("targets", *options.targets));
  if (options.drafters) request.set_drafter_count(count("drafters", *options.drafters));
  if (options.width) request.set_width(count("width", *options.width));
  if (options.branches) request.set_branches(count("branches", *options.branches));
  if (options.drafter) request.set_drafter(word<v1::DrafterKind>("drafter", *options.drafter));
  if (options.rule) {
    request.set_verification_rule(word<v1::VerificationRule>("rule", *options.rule));
  }
  if (options.dispatch) {
    request.set_dispatch_policy(word<v1::DispatchPolicy>("dispatch", *options.dispatch));
  }
}

}  // namespace

v1::GenerateRequest build_request(const Prompt& prompt, const GenerateOptions& options) {
  v1::GenerateRequest request;
  set_prompt(prompt, request);
  set_sampling(options, request);
  set_text_options(options, request);
  set_length(options, request);
  set_decoding(options, request);
  request.set_logprobs(options.logprobs);
  if (options.top_logprobs) {
    request.set_top_logprobs(count("top_logprobs", *options.top_logprobs));
  }
  if (options.prompt_logprobs) {
    request.set_prompt_logprobs(count("prompt_logprobs", *options.prompt_logprobs));
  }
  request.set_include_token_bytes(options.include_token_bytes);
  request.set_include_prompt(options.include_prompt);
  if (!options.predicted_text.empty()) {
    request.set_predicted_text(text("predicted_text", options.predicted_text));
  }
  if (!options.lora.empty()) {
    request.set_lora(text("lora", options.lora));
  }
  request.set_include_timeline(options.include_timeline);
  request.set_stream_timeline(options.stream_timeline);
  return request;
}

}  // namespace paceline::detail
