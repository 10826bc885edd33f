#include "responses.hpp"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <string>

namespace paceline::detail {
namespace {

static_assert(int{v1::STRATEGY_SELF_SPECULATIVE} ==
              static_cast<int>(Strategy::SelfSpeculative));
static_assert(int{v1::VERIFICATION_RULE_REJECTION} ==
              static_cast<int>(VerificationRule::Rejection));
static_assert(int{v1::DISPATCH_POLICY_BLOCKS} == static_cast<int>(DispatchPolicy::Blocks));
static_assert(int{v1::FINISH_REASON_STOP_STRING} == static_cast<int>(FinishReason::StopString));
static_assert(int{v1::TOKEN_ORIGIN_TARGET} == static_cast<int>(TokenOrigin::Target));
static_assert(int{v1::TIMELINE_EVENT_KIND_CANCELLED} ==
              static_cast<int>(TimelineEventKind::Cancelled));

// Proto3 keeps numbers that no word exists for.
template <class Enum>
Enum word(int number) {
  const bool known = number > 0 && static_cast<std::size_t>(number) < words<Enum>.size();
  return known ? static_cast<Enum>(number) : Enum::Unknown;
}

// The number's name without its prefix, in small letters; "role 12" if this client has none.
std::string word_or_number(const google::protobuf::EnumDescriptor& names, int number,
                           const std::string& noun) {
  const auto* found = number == 0 ? nullptr : names.FindValueByNumber(number);
  if (found == nullptr) return noun + " " + std::to_string(number);
  const auto prefix = names.value(0)->name().size() - std::string("UNSPECIFIED").size();
  auto word = std::string(found->name()).substr(prefix);
  std::transform(word.begin(), word.end(), word.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return word;
}

// Times are unsigned on the wire; 2^63 ns are 292 years.
std::int64_t nanoseconds(std::uint64_t value) { return static_cast<std::int64_t>(value); }

std::vector<TokenLogprob> read_likeliest(const v1::LikeliestTokens& message) {
  std::vector<TokenLogprob> likeliest;
  for (int rank = 0; rank < std::min(message.token_ids_size(), message.logprobs_size()); ++rank) {
    TokenLogprob told{message.token_ids(rank), message.logprobs(rank), {}};
    if (rank < message.token_bytes_size()) told.token_bytes = message.token_bytes(rank);
    likeliest.push_back(std::move(told));
  }
  return likeliest;
}

Statistics read_statistics(const v1::GenerationStatistics& message) {
  Statistics statistics;
  statistics.target_forward_count = message.target_forward_count();
  statistics.drafter_forward_count = message.drafter_forward_count();
  statistics.drafted_token_count = message.drafted_token_count();
  statistics.accepted_token_count = message.accepted_token_count();
  statistics.rejected_token_count = message.rejected_token_count();
  statistics.discarded_token_count = message.discarded_token_count();
  statistics.acceptance_rate = message.acceptance_rate();
  statistics.cancelled_rpc_count = message.cancelled_rpc_count();
  for (const auto& fallback : message.fallbacks()) {
    const auto kind = word_or_number(*v1::FallbackKind_descriptor(), fallback.kind(), "fallback");
    statistics.fallbacks[kind] = fallback.count();
  }
  statistics.queue_ns = nanoseconds(message.queue_ns());
  statistics.forward_ns = nanoseconds(message.forward_ns());
  statistics.network_ns = nanoseconds(message.network_ns());
  statistics.time_to_first_token_ns = nanoseconds(message.time_to_first_token_ns());
  statistics.total_ns = nanoseconds(message.total_ns());
  statistics.corrections_ahead_count = message.corrections_ahead_count();
  statistics.branch_token_count = message.branch_token_count();
  statistics.branch_accepted_count = message.branch_accepted_count();
  statistics.max_gram_drafted_token_count = message.max_gram_drafted_token_count();
  statistics.max_gram_accepted_token_count = message.max_gram_accepted_token_count();
  for (const auto& model : message.drafter_models()) {
    statistics.drafter_models.push_back(
        {model.model_name(), model.forward_count(), nanoseconds(model.forward_ns())});
  }
  statistics.walltime_improvement = message.walltime_improvement();
  statistics.predicted_token_count = message.predicted_token_count();
  statistics.predicted_accepted_token_count = message.predicted_accepted_token_count();
  statistics.forced_drafted_token_count = message.forced_drafted_token_count();
  statistics.forced_accepted_token_count = message.forced_accepted_token_count();
  return statistics;
}

ServerInfo read_server_info(const v1::ServerInfo& message) {
  ServerInfo server;
  server.name = message.name();
  server.address = message.address();
  server.role = word_or_number(*v1::ModelRole_descriptor(), message.role(), "role");
  server.ready = message.ready();
  server.status = message.status();
  server.model_fingerprint = message.model_fingerprint();
  server.decode_step_ns = nanoseconds(message.decode_step_ns());
  server.self_draft_kind = message.self_draft_kind();
  server.is_invariant = message.is_invariant();
  if (message.standing() != v1::SERVER_STANDING_UNSPECIFIED) {
    server.standing =
        word_or_number(*v1::ServerStanding_descriptor(), message.standing(), "standing");
  }
  server.standing_detail = message.standing_detail();
  return server;
}

}  // namespace

Started read_started(const v1::GenerationStarted& message) {
  Started started;
  started.request_id = message.request_id();
  started.seed = message.seed();
  started.model_fingerprint = message.model_fingerprint();
  started.strategy = word<Strategy>(message.strategy());
  started.promise = word<VerificationRule>(message.promise());
  started.prompt_token_count = message.prompt_token_count();
  started.lookahead = message.lookahead();
  started.target_count = message.target_count();
  started.plan_note = message.plan_note();
  started.width = message.width();
  started.branches = message.branches();
  return started;
}

Chunk read_chunk(const v1::GenerationChunk& message) {
  Chunk chunk;
  chunk.position = message.position();
  chunk.token_ids.assign(message.token_ids().begin(), message.token_ids().end());
  chunk.text = message.text();
  chunk.logprobs.assign(message.logprobs().begin(), message.logprobs().end());
  for (const auto& place : message.top_logprobs()) {
    chunk.top_logprobs.push_back(read_likeliest(place));
  }
  chunk.token_bytes.assign(message.token_bytes().begin(), message.token_bytes().end());
  for (const int origin : message.origins()) chunk.origins.push_back(word<TokenOrigin>(origin));
  chunk.text_lengths.assign(message.text_lengths().begin(), message.text_lengths().end());
  return chunk;
}

PromptChunk read_prompt_chunk(const v1::PromptChunk& message) {
  PromptChunk chunk;
  chunk.position = message.position();
  chunk.token_ids.assign(message.token_ids().begin(), message.token_ids().end());
  chunk.logprobs.assign(message.logprobs().begin(), message.logprobs().end());
  for (const auto& place : message.top_logprobs()) {
    chunk.top_logprobs.push_back(read_likeliest(place));
  }
  chunk.token_bytes.assign(message.token_bytes().begin(), message.token_bytes().end());
  return chunk;
}

TimelineEvent read_timeline_event(const v1::TimelineEvent& message) {
  TimelineEvent event;
  event.kind = word<TimelineEventKind>(message.kind());
  event.server = message.server();
  event.start_ns = nanoseconds(message.start_ns());
  event.end_ns = nanoseconds(message.end_ns());
  event.position = message.position();
  event.token_ids.assign(message.token_ids().begin(), message.token_ids().end());
  event.call_id = message.call_id();
  event.speculation_depth = message.speculation_depth();
  event.branch_token_count = message.branch_token_count();
  event.is_branch = message.is_branch();
  return event;
}

Finished read_finished(const v1::GenerationFinished& message) {
  Finished finished;
  finished.finish_reason = word<FinishReason>(message.finish_reason());
  finished.stop_string = message.stop_string();
  finished.promise = word<VerificationRule>(message.promise());
  finished.lookahead = message.lookahead();
  finished.targets_used = message.targets_used();
  finished.usage = {message.prompt_token_count(), message.completion_token_count(),
                    message.cached_prompt_token_count()};
  finished.statistics = read_statistics(message.statistics());
  for (const auto& event : message.timeline()) {
    finished.timeline.push_back(read_timeline_event(event));
  }
  return finished;
}

SystemInfo read_system_info(const v1::GetSystemInfoResponse& message) {
  SystemInfo info;
  info.version = message.version();
  info.model_name = message.model_name();
  info.model_fingerprint = message.model_fingerprint();
  info.tokenizer_fingerprint = message.tokenizer_fingerprint();
  info.vocabulary_size = message.vocabulary_size();
  info.context_length = message.context_length();
  for (const auto& server : message.servers()) info.servers.push_back(read_server_info(server));
  info.running_request_count = message.running_request_count();
  return info;
}

}  // namespace paceline::detail
