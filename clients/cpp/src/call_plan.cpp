#include "call_plan.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <regex>
#include <string>
#include <utility>

namespace paceline::detail {
namespace {

constexpr Seconds kFirstDelay{0.1};
constexpr Seconds kLongestDelay{2.0};

// A delay is lengthened by a random part, at most half of it and at most a second, so that clients
// that were refused at the same time do not return at the same time.
constexpr Seconds kLongestJitter{1.0};

// More than any generation takes. Much longer times overflow the clocks on the way.
constexpr Seconds kLongestTimeout = std::chrono::hours(24 * 7);

// A draining orchestrator refuses for moments, until its name leads to another one.
constexpr int kRefusals = 3;

// A stream that a server refused unread is sent again so often (REFUSED_STREAM: too many streams on
// one connection): 13 s in all.
constexpr int kResends = 10;

// Rounds over all orchestrators that bring no text, before a generation gives up. A generation that
// has begun tries longer, since its user would lose the text so far.
constexpr int kRounds = 30;
constexpr int kRoundsUnheard = 2;

// All streams of one connection can break at once, and resume at once. After that a client retries
// at most ten times a second, all its generations together.
constexpr int kRetriesAtOnce = 100;
constexpr std::chrono::milliseconds kRetryInterval{100};

template <class Error>
bool is(const PacelineError& error) {
  return dynamic_cast<const Error*>(&error) != nullptr;
}

}  // namespace

bool is_refused_stream(const PacelineError& error) {
  // REFUSED_STREAM, HTTP/2's error 7, in the messages of gRPC's libraries and of proxies.
  static const std::regex words(R"(refused[ _]stream|stream refused|RST_STREAM.*error code:? 7\b)",
                                std::regex::icase);
  return is<ConnectionLostError>(error) && std::regex_search(error.what(), words);
}

Seconds checked_timeout(Seconds timeout) {
  if (!(timeout.count() >= 0)) {  // NaN, too, of which a duration says that it is not less
    throw InvalidFieldError::of("timeout", "must be a number of seconds >= 0, not " +
                                               std::to_string(timeout.count()));
  }
  return std::min(timeout, kLongestTimeout);
}

std::optional<int> checked_attempts(std::optional<int> resume_attempts) {
  if (resume_attempts.value_or(0) < 0) {
    throw InvalidFieldError::of("resume_attempts",
                                "must be >= 0, not " + std::to_string(*resume_attempts));
  }
  return resume_attempts;
}

RetryBudget::RetryBudget(std::function<double()> chance) : chance_(std::move(chance)) {}

RetryBudget::RetryBudget()
    : RetryBudget([engine = std::mt19937(std::random_device()())]() mutable {
        return std::uniform_real_distribution<double>()(engine);
      }) {}

std::optional<Seconds> RetryBudget::take(Seconds within, SteadyClock::time_point now) {
  const std::lock_guard lock(mutex_);
  const auto earliest = now - (kRetriesAtOnce - 1) * kRetryInterval;
  const auto at = std::max(next_.value_or(earliest), earliest);
  const auto wait = std::max(Seconds(0), Seconds(at - now));
  if (wait >= within) return std::nullopt;
  next_ = at + kRetryInterval;
  return wait;
}

Seconds RetryBudget::jittered(Seconds delay) {
  const std::lock_guard lock(mutex_);
  return delay + chance_() * std::min(delay / 2, kLongestJitter);
}

Seconds RetryBudget::around(Seconds delay) {
  const std::lock_guard lock(mutex_);
  return (0.5 + chance_()) * delay;
}

CallPlan::CallPlan(Seconds timeout, std::optional<int> resume_attempts,
                   std::shared_ptr<RetryBudget> budget, std::size_t endpoint_count,
                   Clock::time_point now)
    : start_(now),
      timeout_(timeout),
      resumptions_left_(resume_attempts),
      budget_(std::move(budget)),
      endpoint_count_(endpoint_count),
      refusals_left_(kRefusals),
      next_delay_(kFirstDelay) {}

Seconds CallPlan::remaining(Clock::time_point now) const {
  const Seconds left = timeout_ - (now - start_);
  return std::max(Seconds(0), left);
}

void CallPlan::hear() {
  heard_ = true;
  rounds_ = 0;
  resend_count_ = 0;
  asked_.clear();
  if (!resumptions_left_) next_delay_ = kFirstDelay;
}

Seconds CallPlan::delay(const PacelineError& error, const Endpoint* at, bool was_refused,
                        Clock::time_point now) {
  if (was_refused) {
    if (const auto pause = resend(error, at, now)) return *pause;
  }
  asked_.insert(at);
  const bool is_another_left = asked_.size() < endpoint_count_;
  if (!may_go_on(error, was_refused, is_another_left)) error.raise();
  const auto delay = budget_->jittered(is_another_left ? Seconds(0) : round_delay(error));
  const auto left = remaining(now);
  const auto wait = delay < left ? budget_->take(left, now) : std::nullopt;
  if (!wait) error.raise();
  return std::max(delay, *wait);
}

std::optional<Seconds> CallPlan::resend(const PacelineError& error, const Endpoint* at,
                                        Clock::time_point now) {
  if (resend_count_ == kResends || !is_refused_stream(error)) return std::nullopt;
  const auto delay = std::min(kFirstDelay * std::ldexp(1.0, resend_count_), kLongestDelay);
  const auto pause = budget_->around(delay);
  if (pause >= remaining(now)) return std::nullopt;
  ++resend_count_;
  asked_.insert(at);
  if (asked_.size() < endpoint_count_) return Seconds(0);
  asked_.clear();
  return pause;
}

bool CallPlan::may_go_on(const PacelineError& error, bool was_refused, bool is_another_left) {
  if (is<DrainingError>(error) && was_refused && refusals_left_ > 0) {
    --refusals_left_;
    return true;
  }
  if (!is<TryAgainError>(error)) return false;
  if (!resumptions_left_) return is_another_left || begin_round(error);
  if (*resumptions_left_ == 0) return false;
  --*resumptions_left_;
  return true;
}

// Whether another round over all orchestrators is allowed.
bool CallPlan::begin_round(const PacelineError& error) {
  ++rounds_;
  if (heard_) return rounds_ < kRounds;
  return rounds_ < kRoundsUnheard && !is<OverloadedError>(error);
}

// The server's own delay; without one, a delay that doubles each time.
Seconds CallPlan::round_delay(const PacelineError& error) {
  asked_.clear();
  const auto own = next_delay_;
  next_delay_ = std::min(2 * own, kLongestDelay);
  const auto told = error.retry_after().value_or(Seconds(0));
  return told > Seconds(0) ? told : own;
}

}  // namespace paceline::detail
