#include "call_plan.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

namespace paceline::detail {
namespace {

constexpr CallPlan::Clock::time_point kStart{};

std::shared_ptr<RetryBudget> budget(double chance = 0) {
  return std::make_shared<RetryBudget>([chance] { return chance; });
}

CallPlan plan(Seconds timeout, int attempts, double chance = 0) {
  return {timeout, attempts, budget(chance), 1, kStart};
}

TEST(CallPlan, WaitsTwiceAsLongEachTimeUpToTwoSeconds) {
  auto calls = plan(Seconds(100), 7);
  const ConnectionLostError error("broken");
  for (const double delay : {0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0}) {
    EXPECT_DOUBLE_EQ(calls.delay(error, nullptr, false, kStart).count(), delay);
  }
  EXPECT_THROW(calls.delay(error, nullptr, false, kStart), ConnectionLostError);
}

TEST(CallPlan, WaitsLongerByChanceUpToHalfAndUpToASecond) {
  auto calls = plan(Seconds(100), 2, 0.5);
  EXPECT_DOUBLE_EQ(calls.delay(LoadingError("later"), nullptr, false, kStart).count(), 0.125);
  const OverloadedError full("full", {{}, {}, Seconds(30)});
  EXPECT_DOUBLE_EQ(calls.delay(full, nullptr, false, kStart).count(), 30.5);
}

TEST(CallPlan, WaitsDifferently) {
  std::set<double> drawn;
  for (int count = 0; count < 10; ++count) {
    CallPlan calls(Seconds(100), 1, std::make_shared<RetryBudget>(), 1, kStart);
    drawn.insert(calls.delay(LoadingError("later"), nullptr, false, kStart).count());
  }
  EXPECT_GT(drawn.size(), 1u);
  EXPECT_GE(*drawn.begin(), 0.1);
  EXPECT_LE(*drawn.rbegin(), 0.15);
}

TEST(CallPlan, WaitsAsLongAsTheServerSays) {
  auto calls = plan(Seconds(100), 3);
  const auto wait = [&](double told) {
    const OverloadedError busy("busy", {{}, {}, Seconds(told)});
    return calls.delay(busy, nullptr, false, kStart).count();
  };
  EXPECT_EQ(wait(5), 5);
  EXPECT_DOUBLE_EQ(wait(0), 0.2);
  EXPECT_DOUBLE_EQ(wait(-1), 0.4);
}

TEST(CallPlan, GivesUpWhereGoingOnMakesNoSense) {
  auto calls = plan(Seconds(1), 9);
  EXPECT_THROW(calls.delay(InternalError("bug"), nullptr, false, kStart), InternalError);
  const LoadingError later("later", {{}, {}, Seconds(1)});
  EXPECT_THROW(calls.delay(later, nullptr, false, kStart), LoadingError);
  const auto late = kStart + std::chrono::seconds(2);
  EXPECT_THROW(calls.delay(LoadingError("late"), nullptr, false, late), LoadingError);
}

TEST(CallPlan, CountsThreeRefusalsOfADrainingOrchestratorAsNoResumptions) {
  auto calls = plan(Seconds(100), 1);
  const DrainingError leaving("leaving");
  for (int count = 0; count < 4; ++count) {
    EXPECT_NO_THROW(calls.delay(leaving, nullptr, true, kStart));
  }
  EXPECT_THROW(calls.delay(leaving, nullptr, true, kStart), DrainingError);
  EXPECT_THROW(plan(Seconds(100), 0).delay(leaving, nullptr, false, kStart), DrainingError);
}

// A plan without a number of attempts, among two endpoints that fail in turn.
struct Failover {
  Endpoint one{nullptr, true};
  Endpoint other{nullptr, true};
  CallPlan calls{Seconds(1000), std::nullopt, budget(), 2, kStart};
  int count = 0;

  double fail(const PacelineError& error) {
    const auto* at = count++ % 2 == 0 ? &one : &other;
    return calls.delay(error, at, true, kStart).count();
  }
};

TEST(CallPlan, WaitsForNothingWhileAnotherIsLeft) {
  Failover unheard;
  const ConnectionLostError lost("lost");
  for (const double delay : {0.0, 0.1, 0.0}) EXPECT_DOUBLE_EQ(unheard.fail(lost), delay);
  EXPECT_THROW(unheard.fail(lost), ConnectionLostError);  // would be a third round
}

TEST(CallPlan, AsksAllThirtyTimesWhereATextHasBegun) {
  Failover heard;
  const ConnectionLostError lost("lost");
  heard.fail(lost);
  heard.calls.hear();
  EXPECT_TRUE(heard.calls.asked().empty());
  heard.count = 0;
  for (int count = 0; count < 59; ++count) EXPECT_NO_THROW(heard.fail(lost)) << count;
  EXPECT_THROW(heard.fail(lost), ConnectionLostError);
}

TEST(CallPlan, BeginsWithShortDelaysAgainAfterAText) {
  Failover heard;
  const ConnectionLostError lost("lost");
  for (const double delay : {0.0, 0.1}) EXPECT_DOUBLE_EQ(heard.fail(lost), delay);
  heard.calls.hear();
  for (const double delay : {0.0, 0.1}) EXPECT_DOUBLE_EQ(heard.fail(lost), delay);
}

TEST(CallPlan, AsksEachOnceWhereAllAreFull) {
  Failover full;
  const OverloadedError busy("busy");
  EXPECT_DOUBLE_EQ(full.fail(busy), 0);
  EXPECT_THROW(full.fail(busy), OverloadedError);
}

TEST(CallPlan, SpendsAnAttemptAtTheOtherAtOnce) {
  const Endpoint one(nullptr, true);
  CallPlan calls(Seconds(100), 1, budget(), 2, kStart);
  const ConnectionLostError lost("lost");
  EXPECT_DOUBLE_EQ(calls.delay(lost, &one, true, kStart).count(), 0);
  EXPECT_THROW(calls.delay(lost, &one, true, kStart), ConnectionLostError);
}

TEST(CallPlan, HasOneDeadlineForAllStreams) {
  const auto calls = plan(Seconds(3), 0);
  EXPECT_EQ(calls.remaining(kStart + std::chrono::seconds(1)), Seconds(2));
  EXPECT_EQ(calls.remaining(kStart + std::chrono::seconds(9)), Seconds(0));
}

TEST(CallPlan, SendsARefusedStreamAgainWhichIsNoResumption) {
  for (const char* words : {"Received RST_STREAM with error code 7", "Stream refused by server",
                            "reset reason: remote refused stream reset"}) {
    const ConnectionLostError refused(words);
    auto calls = plan(Seconds(100), 0);
    for (const double delay : {0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0}) {
      EXPECT_DOUBLE_EQ(calls.delay(refused, nullptr, true, kStart).count(), delay);
    }
    EXPECT_THROW(calls.delay(refused, nullptr, true, kStart), ConnectionLostError);
    auto begun = plan(Seconds(100), 0);
    EXPECT_THROW(begun.delay(refused, nullptr, false, kStart), ConnectionLostError);
    auto late = plan(Seconds(0.05), 0);
    EXPECT_THROW(late.delay(refused, nullptr, true, kStart), ConnectionLostError);
  }
  for (const char* words : {"RST_STREAM with error code 8", "RST_STREAM with error code 77"}) {
    auto calls = plan(Seconds(100), 0);
    EXPECT_THROW(calls.delay(ConnectionLostError(words), nullptr, true, kStart),
                 ConnectionLostError);
  }
}

TEST(RetryBudget, LetsAHundredGoOnAtOnceAndThenTenASecond) {
  RetryBudget budget;
  const Seconds enough(60);
  for (int count = 0; count < 100; ++count) EXPECT_EQ(*budget.take(enough, kStart), Seconds(0));
  for (int count = 1; count <= 30; ++count) {
    EXPECT_NEAR(budget.take(enough, kStart)->count(), 0.1 * count, 1e-6);
  }
  EXPECT_FALSE(budget.take(Seconds(1), kStart));  // and takes no place
  EXPECT_NEAR(budget.take(enough, kStart)->count(), 3.1, 1e-6);
  EXPECT_EQ(*budget.take(enough, kStart + std::chrono::seconds(20)), Seconds(0));
}

TEST(Timeout, IsAWeekAtMostAndNeverNegative) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double count : {0.0, 0.5, 604800.0}) {
    EXPECT_EQ(checked_timeout(Seconds(count)).count(), count);
  }
  for (const double count : {1e10, 1e300, infinity}) {
    EXPECT_EQ(checked_timeout(Seconds(count)).count(), 604800);
  }
  for (const double count : {-1.0, -infinity, std::nan("")}) {
    EXPECT_THROW(checked_timeout(Seconds(count)), InvalidFieldError);
  }
}

}  // namespace
}  // namespace paceline::detail
