#include "connection.hpp"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>

#include "address.hpp"
#include "paceline/v1/orchestrator_service.grpc.pb.h"
#include "status.hpp"
#include "tls.hpp"

namespace paceline::detail {
namespace {

using ChannelOptions = std::map<std::string, ChannelOption>;

// A frozen peer is noticed in about 25 s: without ping_timeout_ms keepalive alone does not bound
// it. A server that comes back is found again within half a second. min_reconnect_backoff_ms is,
// despite its name, the limit of a connection attempt, TLS and the first HTTP/2 frame included. The
// receive limit has room for the timeline of a long request.
ChannelOptions default_options() {
  return {
      {"grpc.keepalive_time_ms", 20'000},
      {"grpc.keepalive_timeout_ms", 5'000},
      {"grpc.http2.ping_timeout_ms", 5'000},
      {"grpc.initial_reconnect_backoff_ms", 100},
      {"grpc.min_reconnect_backoff_ms", 10'000},
      {"grpc.max_reconnect_backoff_ms", 500},
      {"grpc.max_receive_message_length", 64 * 1024 * 1024},
      // Without it a new channel would use the connection of the channel before.
      {"grpc.use_local_subchannel_pool", 1},
  };
}

ChannelOptions channel_options(const std::string& address, const ClientOptions& client) {
  auto options = default_options();
  if (is_loopback(address)) options["grpc.enable_http_proxy"] = 0;
  // All addresses of a name are connected to, and take turns. DNS is asked again when a connection
  // ends. gRPC's default waits 30 s between two queries: new pods would not be found for so long.
  if (!leads_to_one(address)) {
    options["grpc.lb_policy_name"] = "round_robin";
    options["grpc.dns_min_time_between_resolutions_ms"] = 1'000;
  }
  if (client.tls && client.tls->server_name) {
    options["grpc.ssl_target_name_override"] = *client.tls->server_name;
  }
  for (const auto& [name, value] : client.channel_options) options[name] = value;
  return options;
}

grpc::ChannelArguments channel_arguments(const ChannelOptions& options) {
  grpc::ChannelArguments arguments;
  for (const auto& [name, value] : options) {
    if (const auto* number = std::get_if<int>(&value)) {
      arguments.SetInt(name, *number);
    } else {
      arguments.SetString(name, std::get<std::string>(value));
    }
  }
  return arguments;
}

std::shared_ptr<grpc::ChannelCredentials> credentials(const std::optional<Tls>& tls) {
  if (!tls) return grpc::InsecureChannelCredentials();
  const auto material = read_tls(*tls);
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = material.authorities;
  options.pem_private_key = material.key;
  options.pem_cert_chain = material.certificate;
  return grpc::SslCredentials(options);
}

void set_metadata(grpc::ClientContext& context, const MetadataPairs& metadata) {
  for (const auto& [name, value] : metadata) context.AddMetadata(name, value);
}

void set_timeout(grpc::ClientContext& context, Seconds timeout) {
  using Clock = std::chrono::system_clock;  // the only one that every gRPC release takes
  context.set_deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout));
}

constexpr const char* kUntouched = "\x01untouched";

using Stub = v1::OrchestratorService::Stub;  // keeps its channel open

// The stub for new calls, which is another one after the orchestrator has said that it is shutting
// down: running calls finish on the channel that they began on.
class Wire {
 public:
  explicit Wire(std::function<std::shared_ptr<grpc::Channel>()> open) : open_(std::move(open)) {
    stub_ = v1::OrchestratorService::NewStub(open_());
  }

  std::shared_ptr<Stub> stub() {
    const std::lock_guard lock(mutex_);
    return stub_;
  }

  // Say why a call of a stub ended; null if all is well.
  std::unique_ptr<PacelineError> error_of(const grpc::Status& status,
                                          const std::shared_ptr<Stub>& stub) {
    if (status.ok()) return nullptr;
    auto error = decode(status.error_code(), status.error_message(), status.error_details());
    if (dynamic_cast<const DrainingError*>(error.get()) != nullptr) leave(stub);
    return error;
  }

 private:
  void leave(const std::shared_ptr<Stub>& stub) {
    const std::lock_guard lock(mutex_);
    if (stub_ == stub) stub_ = v1::OrchestratorService::NewStub(open_());
  }

  const std::function<std::shared_ptr<grpc::Channel>()> open_;
  std::mutex mutex_;
  std::shared_ptr<Stub> stub_;
};

class GrpcCall final : public Call {
 public:
  GrpcCall(std::shared_ptr<Wire> wire, const MetadataPairs& metadata)
      : wire_(std::move(wire)), stub_(wire_->stub()) {
    set_metadata(context_, metadata);
  }

  ~GrpcCall() override {
    if (!reader_ || finished_) return;
    context_.TryCancel();
    reader_->Finish();
  }

  void start(const v1::GenerateRequest& request, Seconds timeout) override {
    set_timeout(context_, timeout);
    reader_ = stub_->Generate(&context_, request);
  }

  // Read() is false at the end of the stream, and also for bytes that are no message, after which
  // Finish() could wait for ever. Parsing clears what the message held; the end leaves it alone.
  bool read(v1::GenerateResponse& response) override {
    response.mutable_started()->set_request_id(kUntouched);
    if (reader_->Read(&response)) return true;
    unreadable_ = response.started().request_id() != kUntouched;
    return false;
  }

  std::unique_ptr<PacelineError> finish() override {
    finished_ = true;
    if (unreadable_) context_.TryCancel();
    const auto status = reader_->Finish();
    if (unreadable_) return std::make_unique<InternalError>("the server sent what is no message");
    // To gRPC a cancel of this side and one by the server are the same.
    if (cancelled_ && status.error_code() == grpc::StatusCode::CANCELLED) {
      return std::make_unique<ClientCancelledError>(
          "the generation was cancelled; resume() goes on with it");
    }
    return wire_->error_of(status, stub_);
  }

  void cancel() noexcept override {
    cancelled_ = true;
    context_.TryCancel();
  }

 private:
  std::shared_ptr<Wire> wire_;
  std::shared_ptr<Stub> stub_;
  grpc::ClientContext context_;  // before reader_, which uses it
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
  bool finished_ = false;
  bool unreadable_ = false;
  std::atomic<bool> cancelled_{false};
};

class GrpcConnection final : public Connection {
 public:
  explicit GrpcConnection(std::shared_ptr<Wire> wire) : wire_(std::move(wire)) {}

  std::unique_ptr<Call> new_call(const MetadataPairs& metadata) override {
    return std::make_unique<GrpcCall>(wire_, metadata);
  }

  v1::GetSystemInfoResponse get_system_info(const MetadataPairs& metadata,
                                            Seconds timeout) override {
    grpc::ClientContext context;
    set_metadata(context, metadata);
    set_timeout(context, timeout);
    v1::GetSystemInfoResponse response;
    const auto stub = wire_->stub();
    const auto status = stub->GetSystemInfo(&context, {}, &response);
    if (const auto error = wire_->error_of(status, stub)) error->raise();
    return response;
  }

 private:
  std::shared_ptr<Wire> wire_;
};

std::unique_ptr<Endpoint> open_endpoint(const std::string& address, const ClientOptions& options) {
  check_address(address, options.tls.has_value(), options.insecure);
  auto open = [address, arguments = channel_arguments(channel_options(address, options)),
               trust = credentials(options.tls)] {
    return grpc::CreateCustomChannel(address, trust, arguments);
  };
  auto wire = std::make_shared<Wire>(std::move(open));
  return std::make_unique<Endpoint>(std::make_shared<GrpcConnection>(std::move(wire)),
                                    leads_to_one(address));
}

}  // namespace

std::vector<std::unique_ptr<Endpoint>> open_endpoints(const std::string& addresses,
                                                      const ClientOptions& options) {
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  for (const auto& address : listed(addresses)) {
    endpoints.push_back(open_endpoint(address, options));
  }
  return endpoints;
}

}  // namespace paceline::detail
