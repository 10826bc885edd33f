#include "scripted_server.hpp"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <utility>

#include "paceline/v1/orchestrator_service.grpc.pb.h"

namespace paceline {
namespace {

std::vector<v1::GenerateResponse> responses_of(const Leg& leg, const v1::GenerateRequest& request) {
  std::vector<v1::GenerateResponse> responses;
  if (leg.omits_start) return responses;
  auto& started = *responses.emplace_back().mutable_started();
  started.set_prompt_token_count(ScriptedServer::kPromptLength);
  started.set_seed(request.has_seed() ? request.seed() : 7);
  started.set_model_fingerprint(leg.fingerprint);
  const int first = request.resume_token_ids_size();
  int next = first;
  for (; next < ScriptedServer::kTotal && next < first + leg.chunks; ++next) {
    const auto position = static_cast<std::uint32_t>(ScriptedServer::kPromptLength + next);
    auto& chunk = *responses.emplace_back().mutable_chunk();
    chunk.set_position(position);
    chunk.add_token_ids(position);
    chunk.set_text(std::to_string(position) + " ");
    if (request.stream_timeline())
      responses.emplace_back().mutable_timeline_event()->set_kind(v1::TIMELINE_EVENT_KIND_DRAFTED);
  }
  if (next == ScriptedServer::kTotal) {
    auto& finished = *responses.emplace_back().mutable_finished();
    finished.set_prompt_token_count(ScriptedServer::kPromptLength);
    finished.set_completion_token_count(ScriptedServer::kTotal);
  }
  return responses;
}

class Stream final : public grpc::ServerWriteReactor<v1::GenerateResponse> {
 public:
  Stream(ScriptedServer& server, Leg leg, const v1::GenerateRequest& request)
      : server_(server), leg_(std::move(leg)), responses_(responses_of(leg_, request)) {
    go_on();
  }

  void OnWriteDone(bool /*ok*/) override { go_on(); }

  void OnCancel() override {
    server_.count_cancelled();
    finish(grpc::Status::CANCELLED);
  }

  void OnDone() override { delete this; }

 private:
  void go_on() {
    const std::lock_guard lock(mutex_);
    if (finished_) return;
    if (next_ < responses_.size()) {
      StartWrite(&responses_[next_++]);
    } else if (!leg_.hangs) {
      finished_ = true;
      const auto code = static_cast<grpc::StatusCode>(leg_.code);
      Finish(code == grpc::StatusCode::OK ? grpc::Status::OK : grpc::Status(code, "scripted"));
    }
  }

  void finish(const grpc::Status& status) {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(finished_, true)) Finish(status);
  }

  ScriptedServer& server_;
  const Leg leg_;
  const std::vector<v1::GenerateResponse> responses_;
  std::mutex mutex_;  // guards what follows
  std::size_t next_ = 0;
  bool finished_ = false;
};

class Service final : public v1::OrchestratorService::CallbackService {
 public:
  explicit Service(ScriptedServer& server) : server_(server) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* /*context*/, const v1::GenerateRequest* request) override {
    return new Stream(server_, server_.next_leg(*request), *request);
  }

  grpc::ServerUnaryReactor* GetSystemInfo(grpc::CallbackServerContext* context,
                                          const v1::GetSystemInfoRequest* /*request*/,
                                          v1::GetSystemInfoResponse* response) override {
    response->set_version("1");
    response->add_servers()->set_name("target-0");
    auto* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

 private:
  ScriptedServer& server_;
};

}  // namespace

struct ScriptedServer::Grpc {
  explicit Grpc(ScriptedServer& server) : service(server) {}
  Service service;
  std::unique_ptr<grpc::Server> server;
};

ScriptedServer::ScriptedServer(std::deque<Leg> script)
    : grpc_(std::make_unique<Grpc>(*this)), script_(std::move(script)) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&grpc_->service);
  grpc_->server = builder.BuildAndStart();
  address_ = "127.0.0.1:" + std::to_string(port);
}

ScriptedServer::~ScriptedServer() { grpc_->server->Shutdown(std::chrono::system_clock::now()); }

std::vector<v1::GenerateRequest> ScriptedServer::requests() const {
  const std::lock_guard lock(mutex_);
  return requests_;
}

void ScriptedServer::wait_for_requests(std::size_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return requests_.size() >= count; });
}

void ScriptedServer::wait_for_cancelled(std::size_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return cancelled_count_ >= count; });
}

Leg ScriptedServer::next_leg(const v1::GenerateRequest& request) {
  const std::lock_guard lock(mutex_);
  requests_.push_back(request);
  changed_.notify_all();
  if (script_.empty()) return {};
  auto leg = script_.front();
  script_.pop_front();
  return leg;
}

void ScriptedServer::count_cancelled() {
  const std::lock_guard lock(mutex_);
  ++cancelled_count_;
  changed_.notify_all();
}

}  // namespace paceline
