#include "endpoints.hpp"

#include <algorithm>
#include <tuple>

namespace paceline::detail {
namespace {

// So long an endpoint that failed is asked after the others; the time doubles until it answers.
constexpr std::chrono::milliseconds kFirstRest{100};
constexpr std::chrono::milliseconds kLongestRest{10'000};
constexpr int kMostDoublings = 10;

}  // namespace

Endpoints::Endpoints(std::vector<std::unique_ptr<Endpoint>> all, Clock now)
    : all_(std::move(all)), now_(std::move(now)) {}

Endpoints::Lease Endpoints::lend(const Asked& asked) {
  const std::lock_guard lock(mutex_);
  ++turn_;
  auto& chosen = best(asked);
  ++chosen.running_count;
  return Lease(&chosen, [this](Endpoint* lent) {
    const std::lock_guard lock(mutex_);
    --lent->running_count;
  });
}

Endpoint& Endpoints::best(const Asked& asked) const {
  const auto now = now_();
  const auto rank = [&](const Endpoint& it) {
    return std::tuple(asked.count(&it), now < it.rests_until, it.running_count);
  };
  auto* best = all_[turn_ % count()].get();
  for (std::size_t step = 1; step < count(); ++step) {
    auto* each = all_[(turn_ + step) % count()].get();
    if (rank(*each) < rank(*best)) best = each;
  }
  return *best;
}

void Endpoints::answered(Endpoint& endpoint) {
  const std::lock_guard lock(mutex_);
  endpoint.failure_count = 0;
  endpoint.rests_until = Endpoint::Time::min();
}

void Endpoints::failed(Endpoint& endpoint) {
  const std::lock_guard lock(mutex_);
  const auto now = now_();
  if (now < endpoint.rests_until) return;  // one of many calls that ended together
  endpoint.rests_until = now + std::min(kFirstRest * (1 << endpoint.failure_count), kLongestRest);
  endpoint.failure_count = std::min(endpoint.failure_count + 1, kMostDoublings);
}

}  // namespace paceline::detail
