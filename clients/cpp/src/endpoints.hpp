// The orchestrators of a client, and which of them the next call goes to: no I/O here.

#ifndef PACELINE_SRC_ENDPOINTS_HPP_
#define PACELINE_SRC_ENDPOINTS_HPP_

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace paceline::detail {

class Connection;

/// One address of a client's.
struct Endpoint {
  using Time = std::chrono::steady_clock::time_point;

  Endpoint(std::shared_ptr<Connection> connection, bool leads_to_one)
      : connection(std::move(connection)), leads_to_one(leads_to_one) {}

  const std::shared_ptr<Connection> connection;
  const bool leads_to_one;  ///< One orchestrator is behind it, and not as many as a name says.

  // Guarded by the Endpoints' mutex.
  int running_count = 0;  ///< Calls of this client that run there.
  int failure_count = 0;
  Time rests_until = Time::min();
};

/// Endpoints without an answer; the others come first.
using Asked = std::set<const Endpoint*>;

/// All endpoints of a client; requests are spread over the ones that serve. An endpoint is judged
/// by the outcomes of its calls: no call is made for that purpose. Any thread may use it.
class Endpoints {
 public:
  using Clock = std::function<Endpoint::Time()>;
  /// An endpoint for one call; destroying it gives it back.
  using Lease = std::unique_ptr<Endpoint, std::function<void(Endpoint*)>>;

  /// `all`: at least one.
  explicit Endpoints(std::vector<std::unique_ptr<Endpoint>> all,
                     Clock now = std::chrono::steady_clock::now);

  std::size_t count() const { return all_.size(); }
  /// Whether another orchestrator can continue an unfinished generation.
  bool may_be_several() const { return count() > 1 || !all_.front()->leads_to_one; }

  /// Lend the best endpoint for a call: not asked yet, working, and with the fewest calls; equal
  /// ones take turns. If all have failed, one is asked all the same: its error says why. The lease
  /// must end before this object.
  Lease lend(const Asked& asked);
  /// It answered as it should.
  void answered(Endpoint& endpoint);
  /// The endpoint refused or broke a call: the others come first for a while.
  void failed(Endpoint& endpoint);

 private:
  Endpoint& best(const Asked& asked) const;

  const std::vector<std::unique_ptr<Endpoint>> all_;
  const Clock now_;
  std::mutex mutex_;  // guards the fields below, and the changing fields of each endpoint
  std::size_t turn_ = 0;
};

}  // namespace paceline::detail

#endif  // PACELINE_SRC_ENDPOINTS_HPP_
