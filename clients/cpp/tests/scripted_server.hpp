// An OrchestratorService without models, in this process: it answers by its script.

#ifndef PACELINE_TESTS_SCRIPTED_SERVER_HPP_
#define PACELINE_TESTS_SCRIPTED_SERVER_HPP_

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "paceline/v1/orchestrator_service.pb.h"

namespace paceline {

/// How one call of Generate goes: `total` tokens after those that are resumed, unless something
/// else is set here. Token p has the text "p ".
struct Leg {
  int chunks = 5;            // sent at most by this call
  int code = 0;              // the status after them
  bool hangs = false;        // after them
  bool omits_start = false;  // and everything else
  std::string fingerprint = "model-a";
};

/// Serves on a free port of this machine until it is destroyed.
class ScriptedServer {
 public:
  static constexpr int kPromptLength = 3;
  static constexpr int kTotal = 5;

  explicit ScriptedServer(std::deque<Leg> script = {});
  ~ScriptedServer();

  const std::string& address() const { return address_; }
  std::vector<v1::GenerateRequest> requests() const;
  /// Wait until so many calls have come, or were cancelled.
  void wait_for_requests(std::size_t count);
  void wait_for_cancelled(std::size_t count);

  // For the service.
  Leg next_leg(const v1::GenerateRequest& request);
  void count_cancelled();

 private:
  struct Grpc;
  std::unique_ptr<Grpc> grpc_;
  std::string address_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Leg> script_;
  std::vector<v1::GenerateRequest> requests_;
  std::size_t cancelled_count_ = 0;
};

}  // namespace paceline

#endif  // PACELINE_TESTS_SCRIPTED_SERVER_HPP_
