// The options of a client and of a generation. An option left out has the server's default.
//
// Numbers are signed, so that a negative one is refused by name instead of wrapping around.

#ifndef PACELINE_OPTIONS_HPP_
#define PACELINE_OPTIONS_HPP_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "paceline/errors.hpp"
#include "paceline/words.hpp"

namespace paceline {

/// Text in UTF-8, or token ids.
using Prompt = std::variant<std::string, std::vector<std::int64_t>>;

/// The certificates of TLS and mTLS: PEM, in files or as text.
struct Tls {
  std::optional<std::string> ca_file;           ///< Trusted authorities. Default: the system's.
  std::optional<std::string> certificate_file;  ///< The client's own certificate, for mTLS.
  std::optional<std::string> key_file;          ///< Its private key.
  std::optional<std::string> server_name;       ///< In the certificate, if not the address's.
  std::optional<std::string> ca;                ///< The content of a ca_file.
  std::optional<std::string> certificate;       ///< The content of a certificate_file.
  std::optional<std::string> key;               ///< The content of a key_file.
};

/// Metadata of calls: printable ASCII by name, or bytes if the name ends in "-bin".
using Metadata = std::map<std::string, std::string>;

/// Metadata, or a function that returns it for each call.
using MetadataSource = std::variant<Metadata, std::function<Metadata()>>;

/// A value of one of gRPC's channel arguments.
using ChannelOption = std::variant<int, std::string>;

/// How to reach orchestrators. The functions are called by the threads that call or read.
struct ClientOptions {
  std::optional<Tls> tls;   ///< Without it connections are plaintext.
  bool insecure = false;    ///< Allow plaintext to another machine.
  Seconds timeout{120};     ///< The default deadline of a call; more than a week is a week.
  MetadataSource metadata;  ///< Goes along with every call.
  /// Called for each call, resumptions included: its result is sent as "authorization: Bearer ...".
  /// Its exceptions become the call's.
  std::function<std::string()> token;
  std::map<std::string, ChannelOption> channel_options;  ///< gRPC's channel arguments, over ours.
};

/// The deadline, the attempts and the metadata of a call.
struct CallOptions {
  std::optional<Seconds> timeout;  ///< The deadline for all of it. Default: the client's.
  /// How often a generation resumes by itself after a TryAgainError, such as a broken connection.
  /// The text has no gap and no duplicate. Default: never with one orchestrator; with several,
  /// until all of them have failed several times. A request that is refused because the
  /// orchestrator is shutting down goes to the next one in any case.
  std::optional<int> resume_attempts{};
  Metadata metadata{};  ///< Goes along with this call, beside the client's.
};

/// A JSON schema, as JSON: the text is one JSON value. {"type": "object"} allows any object.
struct JsonSchema {
  std::string schema;
};

/// A regular expression in the syntax of Rust's crate regex, for the whole text.
struct Regex {
  std::string pattern;
};

/// A context-free grammar in llguidance's form of Lark, or in llama.cpp's (GBNF).
struct Lark {
  std::string grammar;
};

/// The text is one of these.
struct Choices {
  std::vector<std::string> texts;
};

/// What a text has to follow; std::monostate: nothing.
using Grammar = std::variant<std::monostate, JsonSchema, Regex, Lark, Choices>;

/// Every option of a generation. Limits are checked by the server.
struct GenerateOptions {
  std::optional<std::int64_t> max_tokens;  ///< Default 256, or fewer if the context has less room.
  std::vector<std::string> stop;           ///< End before the first of these strings.
  std::optional<double> temperature;       ///< 0 (the default) is greedy.
  std::optional<std::int64_t> top_k;       ///< Keep the k most likely tokens; 0 keeps all.
  std::optional<double> top_p;       ///< Keep the likeliest tokens that reach it; 1 keeps all.
  std::optional<double> min_p;       ///< Keep tokens this times as likely as the likeliest; 0: all.
  /// Numbers in [-100, 100] to add to the logits of token ids.
  std::map<std::int64_t, double> logit_bias;
  /// Taken once from the logit of each token that the answer has already.
  std::optional<double> presence_penalty;
  /// Taken from it for each time that the answer has the token.
  std::optional<double> frequency_penalty;
  /// Makes tokens of prompt and answer less likely if above 1, the default.
  std::optional<double> repetition_penalty;
  /// The text does not end by itself before it has so many tokens.
  std::optional<std::int64_t> min_tokens;
  /// What the text has to follow, from its first token to its end. Default: nothing.
  Grammar grammar;
  std::optional<std::int64_t> seed;  ///< Chosen, and told in `started`, if absent.
  std::optional<Strategy> strategy;  ///< Default Auto.
  std::optional<std::int64_t> lookahead;       ///< Draft tokens in a verification; or planned.
  std::optional<std::int64_t> targets;         ///< Most targets to use. Default: planned.
  std::optional<std::int64_t> drafters;        ///< Most drafters to use. Default 1.
  /// Number of tokens that drafters find at a position: with 2 or more, targets judge trees, and
  /// corrections are found ahead. Default 1.
  std::optional<std::int64_t> width;
  /// Number of runners-up that each drafter forward also extends. Default 0.
  std::optional<std::int64_t> branches;
  std::optional<DrafterKind> drafter;  ///< Default: servers, Max-Gram without one.
  std::optional<VerificationRule> rule;        ///< The promise about the output. Default Exact.
  /// When blocks are sent, and whether SI drafts ahead. Default WorkConserving.
  std::optional<DispatchPolicy> dispatch;
  bool ignore_eos = false;                     ///< Continue after an end-of-text token.
  bool logprobs = false;                       ///< Return each token's log probability.
  std::optional<std::int64_t> top_logprobs;    ///< Likeliest tokens at each position, to 20.
  std::optional<std::int64_t> prompt_logprobs; ///< Of the prompt's tokens, and likeliest ones.
  bool include_token_bytes = false;            ///< Of each token that is told.
  bool include_prompt = false;                 ///< The prompt's tokens, without more.
  std::string predicted_text;                  ///< What the answer will probably be.
  std::string lora;                            ///< The LoRA adapter's name. Default: none.
  std::optional<bool> add_special_tokens;      ///< To a text prompt. Default true.
  std::optional<bool> parse_special_tokens;    ///< Written in a text prompt. Default false.
  bool include_timeline = false;               ///< Put everything into `finished.timeline`.
  bool stream_timeline = false;                ///< Tell of it live, in events().
  std::string request_id;                      ///< A name for logs. Chosen if empty.
  std::vector<std::int64_t> resume_token_ids;  ///< Received earlier; needs their seed.
};

/// The name of an option, and where it stands.
using SamplingNumber = std::pair<const char*, std::optional<double> GenerateOptions::*>;

/// The options that are numbers of the proto's SamplingParameters, by their names there.
inline constexpr SamplingNumber sampling_numbers[] = {
    {"temperature", &GenerateOptions::temperature},
    {"top_p", &GenerateOptions::top_p},
    {"min_p", &GenerateOptions::min_p},
    {"presence_penalty", &GenerateOptions::presence_penalty},
    {"frequency_penalty", &GenerateOptions::frequency_penalty},
    {"repetition_penalty", &GenerateOptions::repetition_penalty},
};

}  // namespace paceline

#endif  // PACELINE_OPTIONS_HPP_
