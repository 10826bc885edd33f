// When a client tries again, and when it gives up: deadlines, delays and their budget, no I/O.

#ifndef PACELINE_SRC_CALL_PLAN_HPP_
#define PACELINE_SRC_CALL_PLAN_HPP_

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "endpoints.hpp"
#include "paceline/errors.hpp"

namespace paceline::detail {

using SteadyClock = std::chrono::steady_clock;

/// A timeout of 0 or more; more than a week counts as a week. Throws InvalidFieldError if it is
/// negative or no number.
Seconds checked_timeout(Seconds timeout);

/// Throws InvalidFieldError if it is negative.
std::optional<int> checked_attempts(std::optional<int> resume_attempts);

/// Whether the server refused a stream unread, on a connection that works.
bool is_refused_stream(const PacelineError& error);

/// Limits how often a client's generations retry, all of them together.
///
/// A generation over the limit waits and does not fail: when an orchestrator ends, all its streams
/// may continue at another one, but not all at the same moment. Any thread may use it.
class RetryBudget {
 public:
  /// `chance` draws from [0, 1).
  explicit RetryBudget(std::function<double()> chance);
  RetryBudget();

  /// Take the next place, and return the time until it; nothing, without a place, if that is too
  /// long.
  std::optional<Seconds> take(Seconds within, SteadyClock::time_point now);

  /// A delay, longer by chance.
  Seconds jittered(Seconds delay);

  /// By chance from half a delay to one and a half.
  Seconds around(Seconds delay);

 private:
  std::mutex mutex_;  // guards the fields below
  std::function<double()> chance_;
  std::optional<SteadyClock::time_point> next_;  // when one a time, without pause, would be due
};

/// The deadline and the attempts of one generation.
class CallPlan {
 public:
  using Clock = SteadyClock;

  /// Without a number of attempts it continues until all endpoints have failed several times.
  CallPlan(Seconds timeout, std::optional<int> resume_attempts, std::shared_ptr<RetryBudget> budget,
           std::size_t endpoint_count = 1, Clock::time_point now = Clock::now());

  /// The time left for the next call.
  Seconds remaining(Clock::time_point now = Clock::now()) const;

  /// The endpoints that failed since the last text.
  const Asked& asked() const { return asked_; }

  /// Note that text has come: endpoints that failed earlier may be asked again.
  void hear();

  /// The time to wait after an error of `at`; nothing if another endpoint is left. Throws that
  /// error if another attempt is not useful.
  ///
  /// `was_refused`: the call ended before any message. If the orchestrator is shutting down, the
  /// next call is then not counted as a resumption.
  Seconds delay(const PacelineError& error, const Endpoint* at, bool was_refused,
                Clock::time_point now = Clock::now());

  /// The time to wait before a refused stream is sent again, which is not a resumption. Nothing if
  /// the stream was not refused, was refused too often, or no time is left.
  ///
  /// The pauses are random, so that refused streams return one by one; the server works, so the
  /// budget is not used.
  std::optional<Seconds> resend(const PacelineError& error, const Endpoint* at,
                                Clock::time_point now = Clock::now());

 private:
  bool may_go_on(const PacelineError& error, bool was_refused, bool is_another_left);
  bool begin_round(const PacelineError& error);
  Seconds round_delay(const PacelineError& error);

  Clock::time_point start_;
  Seconds timeout_;
  std::optional<int> resumptions_left_;
  std::shared_ptr<RetryBudget> budget_;
  std::size_t endpoint_count_;
  int refusals_left_;
  int resend_count_ = 0;
  Seconds next_delay_;
  Asked asked_;
  int rounds_ = 0;  // in which all were asked in vain since the last text
  bool heard_ = false;
};

}  // namespace paceline::detail

#endif  // PACELINE_SRC_CALL_PLAN_HPP_
