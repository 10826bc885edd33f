#include "endpoints.hpp"

#include <gtest/gtest.h>

#include <map>

namespace paceline::detail {
namespace {

using std::chrono::milliseconds;

// Three of them on a clock that stands, until it is told otherwise.
struct Three {
  Endpoint::Time now{};
  Endpoints some{three(), [this] { return now; }};

  static std::vector<std::unique_ptr<Endpoint>> three() {
    std::vector<std::unique_ptr<Endpoint>> all;
    for (int count = 0; count < 3; ++count) {
      all.push_back(std::make_unique<Endpoint>(nullptr, true));
    }
    return all;
  }

  // How often each is chosen by so many calls that follow on one another.
  std::map<const Endpoint*, int> chosen(int count) {
    std::map<const Endpoint*, int> found;
    for (; count > 0; --count) ++found[some.lend({}).get()];
    return found;
  }

  bool is_asked(const Endpoint& endpoint) { return chosen(6)[&endpoint] > 0; }
};

TEST(Endpoints, TakeTurnsWhereTheyAreEqual) {
  Three all;
  const auto found = all.chosen(6);
  EXPECT_EQ(found.size(), 3u);
  for (const auto& [endpoint, count] : found) EXPECT_EQ(count, 2);
}

TEST(Endpoints, AreAskedWhereTheFewestCallsRun) {
  Three all;
  auto busy = all.some.lend({});
  const auto& one = *busy;
  EXPECT_FALSE(all.is_asked(one));
  busy.reset();
  EXPECT_TRUE(all.is_asked(one));
}

TEST(Endpoints, ComeLastOnceTheyWereAsked) {
  Three all;
  const auto* one = all.some.lend({}).get();
  const auto* other = all.some.lend({one}).get();
  for (int count = 0; count < 6; ++count) {
    const auto* third = all.some.lend({one, other}).get();
    EXPECT_NE(third, one);
    EXPECT_NE(third, other);
  }
}

TEST(Endpoints, RestLongerAfterEachFailureUntilTheyAnswer) {
  Three all;
  auto& sick = *all.some.lend({});
  for (const int rest : {100, 200, 400}) {
    all.some.failed(sick);
    all.some.failed(sick);  // calls that end together are one failure
    all.now += milliseconds(rest - 1);
    EXPECT_FALSE(all.is_asked(sick)) << rest;
    all.now += milliseconds(1);
    EXPECT_TRUE(all.is_asked(sick)) << rest;
  }
  all.some.answered(sick);
  all.some.failed(sick);
  all.now += milliseconds(100);
  EXPECT_TRUE(all.is_asked(sick));
}

TEST(Endpoints, RestTenSecondsAtMost) {
  Three all;
  auto& sick = *all.some.lend({});
  for (int count = 0; count < 20; ++count) {
    all.some.failed(sick);
    all.now += milliseconds(10'000);
    EXPECT_TRUE(all.is_asked(sick)) << count;
  }
}

TEST(Endpoints, AreAskedAllTheSameWhereAllHaveFailed) {
  Three all;
  for (int count = 0; count < 3; ++count) all.some.failed(*all.some.lend({}));
  EXPECT_EQ(all.chosen(3).size(), 3u);
}

TEST(Endpoints, MayBeSeveralWhereThereAreOrANameLeadsThere) {
  EXPECT_TRUE(Three().some.may_be_several());
  for (const bool leads_to_one : {true, false}) {
    std::vector<std::unique_ptr<Endpoint>> one;
    one.push_back(std::make_unique<Endpoint>(nullptr, leads_to_one));
    EXPECT_EQ(Endpoints(std::move(one)).may_be_several(), !leads_to_one);
  }
}

}  // namespace
}  // namespace paceline::detail
