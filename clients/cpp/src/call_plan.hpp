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

/// A timeout of 0 or more, of which more than a week is a week. Throws InvalidFieldError if it is
/// negative or no number.
Seconds checked_timeout(Seconds timeout);

/// Throws InvalidFieldError if it is negative.
std::optional<int> checked_attempts(std::optional<int> resume_attempts);

/// Whether the server refused a stream unread, on a connection that works.
bool is_refused_stream(const PacelineError& error);

/// Limits how often a client's generations retry, all of them together.
///
/// It makes them wait rather than fail: when an orchestrator dies, all its streams have a right to
/// go on elsewhere, but not to knock at a closed door in chorus. Any thread may use it.
class RetryBudget {
 public:
  /// `chance` draws from [0, 1).
  explicit RetryBudget(std::function<double()> chance);
  RetryBudget();

  /// Take the next place, and return how long until it; nothing, and no place, if that is too long.
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

/// One deadline for all streams of a generation, and how often and how soon the next one begins.
class CallPlan {
 public:
  using Clock = SteadyClock;

  /// Without a number of attempts it goes on until all of so many endpoints have been asked in
  /// vain, again and again.
  CallPlan(Seconds timeout, std::optional<int> resume_attempts, std::shared_ptr<RetryBudget> budget,
           std::size_t endpoint_count = 1, Clock::time_point now = Clock::now());

  /// The time left for the next call.
  Seconds remaining(Clock::time_point now = Clock::now()) const;

  /// The endpoints that failed since the last text.
  const Asked& asked() const { return asked_; }

  /// Note that text has come: endpoints that failed earlier may be asked again.
  void hear();

  /// How long to wait before going on after an error of `at`; nothing, where another endpoint is
  /// left. Throws that error, if going on makes no sense.
  ///
  /// `was_refused`: nothing had come. If the orchestrator is shutting down, asking another one is
  /// then no resumption, and not counted as one.
  Seconds delay(const PacelineError& error, const Endpoint* at, bool was_refused,
                Clock::time_point now = Clock::now());

  /// How long to wait before a refused stream is sent again: no resumption, nor counted as one.
  /// Nothing if it was not refused, or was too often, or there is no time.
  ///
  /// The pauses are random and no place of the budget is taken: the server is well, and those that
  /// it refused come back one by one.
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
