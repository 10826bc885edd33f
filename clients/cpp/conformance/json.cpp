#include "json.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <deque>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace conformance {
namespace {

using paceline::GenerateOptions;
using Setter = std::function<void(GenerateOptions&, const Json&)>;

// A name as on the wire: "DISTRIBUTED".
template <class Enum>
std::string name(Enum value) {
  std::string word(to_string(value));
  std::transform(word.begin(), word.end(), word.begin(),
                 [](unsigned char c) { return std::toupper(c); });
  return word;
}

Json told(const std::vector<paceline::ModelForwards>& models) {
  Json list = Json::array();
  for (const auto& it : models) {
    list.push_back({{"model_name", it.model_name},
                    {"forward_count", it.forward_count},
                    {"forward_ns", it.forward_ns}});
  }
  return list;
}

Json told(const paceline::Statistics& it) {
  return {{"target_forward_count", it.target_forward_count},
          {"drafter_forward_count", it.drafter_forward_count},
          {"drafted_token_count", it.drafted_token_count},
          {"accepted_token_count", it.accepted_token_count},
          {"rejected_token_count", it.rejected_token_count},
          {"discarded_token_count", it.discarded_token_count},
          {"acceptance_rate", it.acceptance_rate},
          {"cancelled_rpc_count", it.cancelled_rpc_count},
          {"fallbacks", it.fallbacks},
          {"queue_ns", it.queue_ns},
          {"forward_ns", it.forward_ns},
          {"network_ns", it.network_ns},
          {"time_to_first_token_ns", it.time_to_first_token_ns},
          {"total_ns", it.total_ns},
          {"corrections_ahead_count", it.corrections_ahead_count},
          {"branch_token_count", it.branch_token_count},
          {"branch_accepted_count", it.branch_accepted_count},
          {"max_gram_drafted_token_count", it.max_gram_drafted_token_count},
          {"max_gram_accepted_token_count", it.max_gram_accepted_token_count},
          {"drafter_models", told(it.drafter_models)},
          {"walltime_improvement", it.walltime_improvement},
          {"predicted_token_count", it.predicted_token_count},
          {"predicted_accepted_token_count", it.predicted_accepted_token_count},
          {"forced_drafted_token_count", it.forced_drafted_token_count},
          {"forced_accepted_token_count", it.forced_accepted_token_count}};
}

// A C++ program cannot write these numbers, so the client never sees them; the refusal is the same.
std::int64_t integer(const char* option, const Json& value) {
  const auto refuse = [&] {
    return paceline::InvalidFieldError::of(option, value.dump() + " is out of range");
  };
  if (value.is_string()) {
    try {
      return std::stoll(value.get<std::string>());
    } catch (const std::logic_error&) {
      throw refuse();
    }
  }
  if (!value.is_number_integer()) throw refuse();
  if (value.is_number_unsigned() &&
      value.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max()) {
    throw refuse();
  }
  return value.get<std::int64_t>();
}

std::vector<std::int64_t> integers(const char* option, const Json& values) {
  std::vector<std::int64_t> read;
  for (const auto& value : values) read.push_back(integer(option, value));
  return read;
}

Setter set(const char* option, std::optional<std::int64_t> GenerateOptions::*field) {
  return [=](auto& options, const auto& value) { options.*field = integer(option, value); };
}

Setter set(const char*, std::optional<double> GenerateOptions::*field) {
  return [=](auto& options, const auto& value) {
    options.*field = value == "NaN" ? std::nan("") : value.template get<double>();
  };
}

template <class Enum>
Setter set(const char*, std::optional<Enum> GenerateOptions::*field) {
  return [=](auto& options, const auto& value) {
    options.*field = paceline::from_string<Enum>(value.template get<std::string>());
  };
}

Setter set(const char*, std::optional<bool> GenerateOptions::*field) {
  return [=](auto& options, const auto& value) { options.*field = value.template get<bool>(); };
}

template <class Plain>
Setter set(const char*, Plain GenerateOptions::*field) {
  return [=](auto& options, const auto& value) { options.*field = value.template get<Plain>(); };
}

void set_stop(GenerateOptions& options, const Json& value) {
  if (value.is_string()) {
    options.stop = {value.get<std::string>()};
  } else {
    options.stop = value.get<std::vector<std::string>>();
  }
}

std::map<std::string, Setter> setters() {
#define PACELINE_OPTION(name) \
  { #name, set(#name, &GenerateOptions::name) }
  std::map<std::string, Setter> found{
      PACELINE_OPTION(max_tokens),
      PACELINE_OPTION(top_k),
      PACELINE_OPTION(min_tokens),
      PACELINE_OPTION(seed),
      PACELINE_OPTION(strategy),
      PACELINE_OPTION(lookahead),
      PACELINE_OPTION(targets),
      PACELINE_OPTION(drafters),
      PACELINE_OPTION(width),
      PACELINE_OPTION(branches),
      PACELINE_OPTION(drafter),
      PACELINE_OPTION(rule),
      PACELINE_OPTION(dispatch),
      PACELINE_OPTION(ignore_eos),
      PACELINE_OPTION(logprobs),
      PACELINE_OPTION(top_logprobs),
      PACELINE_OPTION(prompt_logprobs),
      PACELINE_OPTION(include_token_bytes),
      PACELINE_OPTION(include_prompt),
      PACELINE_OPTION(predicted_text),
      PACELINE_OPTION(lora),
      PACELINE_OPTION(add_special_tokens),
      PACELINE_OPTION(parse_special_tokens),
      PACELINE_OPTION(include_timeline),
      PACELINE_OPTION(stream_timeline),
      PACELINE_OPTION(request_id),
      {"stop", set_stop},
      {"grammar",
       [](auto& options, const auto& value) {
         if (value.contains("json_schema")) {
           options.grammar = paceline::JsonSchema{value["json_schema"]};
         } else if (value.contains("regex")) {
           options.grammar = paceline::Regex{value["regex"]};
         } else if (value.contains("lark")) {
           options.grammar = paceline::Lark{value["lark"]};
         } else {
           options.grammar = paceline::Choices{value["choices"]};
         }
       }},
      {"logit_bias",
       [](auto& options, const auto& value) {
         for (const auto& [id, bias] : value.items()) {
           options.logit_bias[std::stoll(id)] = bias.template get<double>();
         }
       }},
      {"resume_token_ids",
       [](auto& options, const auto& value) {
         options.resume_token_ids = integers("resume_token_ids", value);
       }},
  };
#undef PACELINE_OPTION
  for (const auto& [name, member] : paceline::sampling_numbers) found[name] = set(name, member);
  return found;
}

using Text = std::optional<std::string>;

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Put a file's path, or what is in it, where the request says.
void set_pem(const Json& request, const char* key, Text& path, Text& content) {
  const auto& tls = request["tls"];
  if (!tls.contains(key) || tls[key].is_null()) return;
  if (request.value("tls_from_memory", false)) {
    content = content_of(tls[key].get<std::string>());
  } else {
    path = tls[key].get<std::string>();
  }
}

paceline::Tls read_tls(const Json& request) {
  paceline::Tls tls;
  set_pem(request, "ca", tls.ca_file, tls.ca);
  set_pem(request, "certificate", tls.certificate_file, tls.certificate);
  set_pem(request, "key", tls.key_file, tls.key);
  return tls;
}

// Tell one token after the other, and the last one again and again.
std::function<std::string()> read_tokens(const Json& tokens) {
  return [left = tokens.get<std::deque<std::string>>()]() mutable {
    auto told = left.front();
    if (left.size() > 1) left.pop_front();
    return told;
  };
}

std::string from_hexadecimal(const std::string& digits) {
  std::string bytes;
  for (std::size_t at = 0; at + 1 < digits.size(); at += 2) {
    bytes += static_cast<char>(std::stoi(digits.substr(at, 2), nullptr, 16));
  }
  return bytes;
}

bool is_binary(const std::string& name) {
  return name.size() >= 4 && name.substr(name.size() - 4) == "-bin";
}

// Read a number, also "NaN" and "Infinity", which JSON has none for.
paceline::Seconds seconds(const Json& value) {
  return paceline::Seconds(value.is_string() ? std::stod(value.get<std::string>())
                                             : value.get<double>());
}

}  // namespace

Json told(const std::vector<std::vector<paceline::TokenLogprob>>& top_logprobs) {
  Json places = Json::array();
  for (const auto& likeliest : top_logprobs) {
    Json place = Json::array();
    for (const auto& it : likeliest) {
      place.push_back({{"token_id", it.token_id}, {"logprob", it.logprob}});
    }
    places.push_back(place);
  }
  return places;
}

Json told(const paceline::PromptChunk& chunk) {
  return {{"position", chunk.position},
          {"token_ids", chunk.token_ids},
          {"logprobs", chunk.logprobs},
          {"top_logprobs", told(chunk.top_logprobs)}};
}

Json told(const paceline::Chunk& chunk) {
  Json origins = Json::array();
  for (const auto origin : chunk.origins) origins.push_back(name(origin));
  return {{"position", chunk.position},
          {"token_ids", chunk.token_ids},
          {"text", chunk.text},
          {"logprobs", chunk.logprobs},
          {"top_logprobs", told(chunk.top_logprobs)},
          {"origins", origins}};
}

Json told(const paceline::TimelineEvent& event) {
  return {{"kind", name(event.kind)},   {"server", event.server},
          {"start_ns", event.start_ns}, {"end_ns", event.end_ns},
          {"position", event.position}, {"token_ids", event.token_ids},
          {"call_id", event.call_id},   {"speculation_depth", event.speculation_depth},
          {"is_branch", event.is_branch}, {"branch_token_count", event.branch_token_count}};
}

Json told(const std::optional<paceline::Started>& started) {
  if (!started) return nullptr;
  return {{"request_id", started->request_id},
          {"seed", started->seed},
          {"model_fingerprint", started->model_fingerprint},
          {"strategy", name(started->strategy)},
          {"promise", name(started->promise)},
          {"prompt_token_count", started->prompt_token_count},
          {"lookahead", started->lookahead},
          {"target_count", started->target_count},
          {"plan_note", started->plan_note},
          {"width", started->width},
          {"branches", started->branches}};
}

Json told(const std::optional<paceline::Finished>& finished) {
  if (!finished) return nullptr;
  return {{"finish_reason", name(finished->finish_reason)},
          {"stop_string", finished->stop_string},
          {"promise", name(finished->promise)},
          {"lookahead", finished->lookahead},
          {"targets_used", finished->targets_used},
          {"usage",
           {{"prompt_token_count", finished->usage.prompt_token_count},
            {"completion_token_count", finished->usage.completion_token_count},
            {"cached_prompt_token_count", finished->usage.cached_prompt_token_count}}},
          {"statistics", told(finished->statistics)},
          {"timeline_length", finished->timeline.size()}};
}

Json told(const paceline::SystemInfo& system) {
  Json servers = Json::array();
  for (const auto& server : system.servers) {
    servers.push_back({{"name", server.name},
                       {"address", server.address},
                       {"role", server.role},
                       {"ready", server.ready},
                       {"status", server.status},
                       {"model_fingerprint", server.model_fingerprint},
                       {"decode_step_ns", server.decode_step_ns},
                       {"self_draft_kind", server.self_draft_kind},
                       {"is_invariant", server.is_invariant},
                       {"standing", server.standing},
                       {"standing_detail", server.standing_detail}});
  }
  return {{"version", system.version},
          {"model_name", system.model_name},
          {"model_fingerprint", system.model_fingerprint},
          {"tokenizer_fingerprint", system.tokenizer_fingerprint},
          {"vocabulary_size", system.vocabulary_size},
          {"context_length", system.context_length},
          {"servers", servers},
          {"running_request_count", system.running_request_count}};
}

Json told(const paceline::PacelineError& error) {
  Json violations = Json::array();
  for (const auto& [field, description] : error.violations()) {
    violations.push_back({{"field", field}, {"description", description}});
  }
  const auto& kind = error.kind();
  const auto retry = error.retry_after();
  return {{"kind", kind.name.substr(0, kind.name.rfind("Error"))},
          {"code", kind.code},
          {"reason", kind.reason},
          {"message", error.what()},
          {"metadata", error.metadata()},
          {"violations", violations},
          {"retry_after_seconds", retry ? Json(retry->count()) : Json()}};
}

std::string read_addresses(const Json& request) {
  if (!request.contains("addresses")) return request.at("address").get<std::string>();
  std::string addresses;
  for (const auto& address : request["addresses"]) {
    addresses += (addresses.empty() ? "" : ",") + address.get<std::string>();
  }
  return addresses;
}

paceline::ClientOptions read_client_options(const Json& request) {
  paceline::ClientOptions options;
  options.insecure = request.value("insecure", false);
  options.metadata = read_metadata(request, "client_metadata");
  if (request.contains("tokens")) options.token = read_tokens(request["tokens"]);
  if (request.contains("tls") && !request["tls"].is_null()) options.tls = read_tls(request);
  if (request.contains("client_timeout_seconds")) {
    options.timeout = seconds(request["client_timeout_seconds"]);
  }
  return options;
}

// Bytes are hexadecimal digits.
paceline::Metadata read_metadata(const Json& request, const char* key) {
  paceline::Metadata metadata;
  const auto told = request.value(key, Json::object());
  for (const auto& [name, value] : told.items()) {
    const auto text = value.get<std::string>();
    metadata[name] = is_binary(name) ? from_hexadecimal(text) : text;
  }
  return metadata;
}

paceline::Prompt read_prompt(const Json& prompt) {
  if (prompt.contains("text")) return prompt["text"].get<std::string>();
  return integers("ids", prompt.at("token_ids"));
}

paceline::GenerateOptions read_options(const Json& options) {
  static const auto known = setters();
  GenerateOptions read;
  for (const auto& [option, value] : options.items()) {
    const auto setter = known.find(option);
    if (setter == known.end()) throw Unsupported("option " + option);
    if (!value.is_null()) setter->second(read, value);
  }
  return read;
}

paceline::CallOptions read_call(const Json& request) {
  paceline::CallOptions call;
  if (request.contains("timeout_seconds") && !request["timeout_seconds"].is_null()) {
    call.timeout = seconds(request["timeout_seconds"]);
  }
  // Null is the client's default; without a word there are none.
  const auto attempts = request.value("resume_attempts", Json(0));
  if (!attempts.is_null()) call.resume_attempts = attempts.get<int>();
  call.metadata = read_metadata(request, "metadata");
  return call;
}

}  // namespace conformance
