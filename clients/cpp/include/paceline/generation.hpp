// A generation's messages as plain data, without protobuf.
//
// Field names, units and meanings are those of orchestrator_service.proto. Positions are absolute:
// they count the prompt.

#ifndef PACELINE_GENERATION_HPP_
#define PACELINE_GENERATION_HPP_

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "paceline/words.hpp"

namespace paceline {

/// The first message of a generation, before any token.
struct Started {
  std::string request_id;
  std::uint64_t seed = 0;  ///< The seed in use; the same seed gives the same text again.
  std::string model_fingerprint;
  Strategy strategy = Strategy::Unknown;  ///< The strategy in use; never Auto.
  VerificationRule promise = VerificationRule::Unknown;
  std::int64_t prompt_token_count = 0;
  std::int64_t lookahead = 0;
  std::int64_t target_count = 0;
  std::string plan_note;      ///< The reason for Auto's choice; empty without Auto.
  std::int64_t width = 0;     ///< Number of tokens that drafters find at a position; 1: chains.
  std::int64_t branches = 0;  ///< Runners-up that each drafter forward also extends.
};

/// A token, and the natural logarithm of its probability.
struct TokenLogprob {
  std::int64_t token_id = 0;
  double logprob = 0;
  std::string token_bytes;  ///< If requested.
};

/// Tokens of the prompt, and if requested how likely the target thinks each of them. `logprobs`,
/// `top_logprobs` and `token_bytes` have one entry for each token, if they were requested. The
/// prompt's first token comes in a chunk of its own, without the first two.
struct PromptChunk {
  std::int64_t position = 0;
  std::vector<std::int64_t> token_ids;
  std::vector<double> logprobs;
  std::vector<std::vector<TokenLogprob>> top_logprobs;
  std::vector<std::string> token_bytes;
};

/// Final tokens and their text. `origins` and `text_lengths` (the characters that the token adds to
/// `text`) have one entry for each token. So have, if requested, `logprobs` and `top_logprobs`: the
/// likeliest tokens at the position, the likeliest first.
struct Chunk {
  std::int64_t position = 0;
  std::vector<std::int64_t> token_ids;
  std::string text;
  std::vector<double> logprobs;
  std::vector<std::vector<TokenLogprob>> top_logprobs;
  std::vector<TokenOrigin> origins;
  std::vector<std::int64_t> text_lengths;
  std::vector<std::string> token_bytes;  ///< If requested.
};

/// A draft, a verification or its result; times are ns since the request arrived.
struct TimelineEvent {
  TimelineEventKind kind = TimelineEventKind::Unknown;
  std::string server;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t position = 0;
  std::vector<std::int64_t> token_ids;
  std::int64_t call_id = 0;
  std::int64_t speculation_depth = 0;
  std::int64_t branch_token_count = 0;  ///< Tokens beside the chain that were found, or are judged.
  bool is_branch = false;  ///< A verification of tokens beside the chain.
};

/// What Generation::events() gives.
using Event = std::variant<Chunk, TimelineEvent>;

/// Tokens in the prompt, and tokens generated, resumed ones included.
struct Usage {
  std::int64_t prompt_token_count = 0;
  std::int64_t completion_token_count = 0;
  /// Prompt tokens that a target had computed for an earlier request of this client.
  std::int64_t cached_prompt_token_count = 0;
};

/// The forwards of one of the drafters' models.
struct ModelForwards {
  std::string model_name;
  std::int64_t forward_count = 0;
  std::int64_t forward_ns = 0;  ///< Time in these forwards.
};

/// Times and counts of a generation; of a resumed generation, of its last part.
struct Statistics {
  std::int64_t target_forward_count = 0;
  std::int64_t drafter_forward_count = 0;
  std::int64_t drafted_token_count = 0;
  std::int64_t accepted_token_count = 0;
  std::int64_t rejected_token_count = 0;
  std::int64_t discarded_token_count = 0;
  double acceptance_rate = 0;
  std::int64_t cancelled_rpc_count = 0;
  /// Counts by kind, such as "target_lost"; a newer kind is "fallback 12".
  std::map<std::string, std::int64_t> fallbacks;
  std::int64_t queue_ns = 0;
  std::int64_t forward_ns = 0;
  std::int64_t network_ns = 0;
  std::int64_t time_to_first_token_ns = 0;
  std::int64_t total_ns = 0;
  std::int64_t corrections_ahead_count = 0;  ///< Corrections found beside a drafter's chain.
  std::int64_t branch_token_count = 0;       ///< Tokens beside chains that targets judged.
  std::int64_t branch_accepted_count = 0;    ///< The ones that became output.
  std::int64_t max_gram_drafted_token_count = 0;   ///< Draft tokens that Max-Gram found.
  std::int64_t max_gram_accepted_token_count = 0;  ///< The ones that became output.
  std::vector<ModelForwards> drafter_models;  ///< By model, of a stack the largest first.
  /// SWI: the new tokens at the mean time of a target's forward, over the time in all forwards; 0
  /// if calls were withdrawn, so that it is not known.
  double walltime_improvement = 0;
  std::int64_t predicted_token_count = 0;           ///< Of `predicted_text`.
  std::int64_t predicted_accepted_token_count = 0;  ///< Of the answer, drafted from it.
  std::int64_t forced_drafted_token_count = 0;   ///< Draft tokens that a grammar forced.
  std::int64_t forced_accepted_token_count = 0;  ///< Tokens of the answer that were such.
};

/// The end of a generation; `timeline` is empty unless it was requested.
struct Finished {
  FinishReason finish_reason = FinishReason::Unknown;
  std::string stop_string;
  VerificationRule promise = VerificationRule::Unknown;
  std::int64_t lookahead = 0;
  std::int64_t targets_used = 0;
  Usage usage;
  Statistics statistics;
  std::vector<TimelineEvent> timeline;
};

/// A whole generation.
struct Completion {
  Started started;
  std::vector<Chunk> chunks;
  Finished finished;
  std::int64_t resumed_token_count = 0;  ///< If resumed: tokens from before its last part.
  std::vector<PromptChunk> prompt_chunks;  ///< With prompt_logprobs or include_prompt.

  std::string text() const;
  std::vector<std::int64_t> token_ids() const;
};

/// A model server, as the orchestrator describes it.
struct ServerInfo {
  std::string name;
  std::string address;
  std::string role;  ///< "drafter" or "target"; a newer one is "role 12".
  bool ready = false;
  std::string status;
  std::string model_fingerprint;
  std::int64_t decode_step_ns = 0;
  std::string self_draft_kind;  ///< Its kind of adapter, such as "medusa"; or empty.
  bool is_invariant = false;    ///< Its logits depend on one sequence alone.
  /// "used", "resting", or in one word why the server is not used, such as "other_dtype"; a newer
  /// word is "standing 99". Empty: the orchestrator is older than this field.
  std::string standing;
  std::string standing_detail;  ///< More on that, for people; may be empty.
};

/// The models and servers of an orchestrator.
struct SystemInfo {
  std::string version;
  std::string model_name;
  std::string model_fingerprint;
  std::string tokenizer_fingerprint;
  std::int64_t vocabulary_size = 0;
  std::int64_t context_length = 0;
  std::vector<ServerInfo> servers;
  std::int64_t running_request_count = 0;
};

}  // namespace paceline

#endif  // PACELINE_GENERATION_HPP_
