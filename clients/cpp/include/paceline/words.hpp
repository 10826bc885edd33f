// The enumerations and their words: "distributed" is Strategy::Distributed.
//
// Numbers are those of the wire. Unknown is a value of a newer server that this client does not
// know.

#ifndef PACELINE_WORDS_HPP_
#define PACELINE_WORDS_HPP_

#include <array>
#include <cstddef>
#include <string_view>

namespace paceline {

/// How a request is decoded. The output is the same with every strategy.
enum class Strategy { Unknown, Auto, Autoregressive, Speculative, Distributed, SelfSpeculative };

/// The rule by which draft tokens are accepted; it decides the promise about the output.
///
/// Exact promises the target's own tokens for the seed, Rejection the target's distribution.
enum class VerificationRule { Unknown, Exact, Rejection };

/// The drafter: servers, Max-Gram (the text itself, without a model), or both.
enum class DrafterKind { Unknown, Server, MaxGram, ServerAndMaxGram };

/// When draft tokens are sent to targets.
enum class DispatchPolicy { Unknown, WorkConserving, Blocks };

/// Why a generation ended.
enum class FinishReason { Unknown, Length, Eos, StopString };

/// The origin of a token: an accepted draft token, or the target's own token.
enum class TokenOrigin { Unknown, AcceptedDraft, Target };

/// The kind of a timeline event.
enum class TimelineEventKind {
  Unknown,
  Drafted,
  Verifying,
  Accepted,
  Corrected,
  Discarded,
  Cancelled
};

namespace detail {

template <class Enum>
inline constexpr std::array<std::string_view, 0> words{};
template <>
inline constexpr std::array<std::string_view, 6> words<Strategy>{
    "unknown", "auto", "autoregressive", "speculative", "distributed", "self_speculative"};
template <>
inline constexpr std::array<std::string_view, 3> words<VerificationRule>{"unknown", "exact",
                                                                         "rejection"};
template <>
inline constexpr std::array<std::string_view, 4> words<DrafterKind>{"unknown", "server", "max_gram",
                                                                    "server_and_max_gram"};
template <>
inline constexpr std::array<std::string_view, 3> words<DispatchPolicy>{"unknown", "work_conserving",
                                                                       "blocks"};
template <>
inline constexpr std::array<std::string_view, 4> words<FinishReason>{"unknown", "length", "eos",
                                                                     "stop_string"};
template <>
inline constexpr std::array<std::string_view, 3> words<TokenOrigin>{"unknown", "accepted_draft",
                                                                    "target"};
template <>
inline constexpr std::array<std::string_view, 7> words<TimelineEventKind>{
    "unknown", "drafted", "verifying", "accepted", "corrected", "discarded", "cancelled"};

}  // namespace detail

/// The word for a value, such as "distributed".
template <class Enum>
constexpr std::string_view to_string(Enum value) {
  return detail::words<Enum>[static_cast<std::size_t>(value)];
}

/// The value for a word; Unknown if there is none, which no request can carry.
template <class Enum>
constexpr Enum from_string(std::string_view word) {
  for (std::size_t number = 0; number < detail::words<Enum>.size(); ++number) {
    if (detail::words<Enum>[number] == word) return static_cast<Enum>(number);
  }
  return Enum::Unknown;
}

}  // namespace paceline

#endif  // PACELINE_WORDS_HPP_
