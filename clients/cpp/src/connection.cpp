#include "connection.hpp"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include "address.hpp"
#include "paceline/v1/orchestrator_service.grpc.pb.h"
#include "pem.hpp"
#include "status.hpp"

namespace paceline::detail {
namespace {

// A frozen peer is noticed in about 25 s: without ping_timeout_ms keepalive alone does not bound
// it. A server that comes back is found again within half a second. min_reconnect_backoff_ms is,
// despite its name, the limit of a connection attempt, TLS and the first HTTP/2 frame included. The
// receive limit has room for the timeline of a long request.
grpc::ChannelArguments channel_arguments(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt("grpc.keepalive_time_ms", 20'000);
  arguments.SetInt("grpc.keepalive_timeout_ms", 5'000);
  arguments.SetInt("grpc.http2.ping_timeout_ms", 5'000);
  arguments.SetInt("grpc.initial_reconnect_backoff_ms", 100);
  arguments.SetInt("grpc.min_reconnect_backoff_ms", 10'000);
  arguments.SetInt("grpc.max_reconnect_backoff_ms", 500);
  // Else a new channel would go on with the connection of the one before.
  arguments.SetInt("grpc.use_local_subchannel_pool", 1);
  arguments.SetMaxReceiveMessageSize(64 * 1024 * 1024);
  if (is_loopback(address)) arguments.SetInt("grpc.enable_http_proxy", 0);
  return arguments;
}

std::string read_file(const std::string& field, const std::optional<std::string>& path) {
  if (!path) return {};
  errno = 0;
  std::ifstream file(*path, std::ios::binary);
  std::ostringstream content;
  if (!file || !(content << file.rdbuf())) {  // nothing to insert is a failure, too
    throw InvalidFieldError::of(field, *path + ": " + (errno ? std::strerror(errno) : "is empty"));
  }
  return content.str();
}

std::shared_ptr<grpc::ChannelCredentials> credentials(const std::optional<Tls>& tls) {
  if (!tls) return grpc::InsecureChannelCredentials();
  if (tls->certificate_file.has_value() != tls->key_file.has_value()) {
    throw InvalidFieldError::of("tls", "certificate_file and key_file belong together");
  }
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = read_file("tls.ca_file", tls->ca_file);
  options.pem_private_key = read_file("tls.key_file", tls->key_file);
  options.pem_cert_chain = read_file("tls.certificate_file", tls->certificate_file);
  if (tls->ca_file && !has_certificates(options.pem_root_certs)) {
    throw InvalidFieldError::of("tls.ca_file", *tls->ca_file + ": has no usable certificate");
  }
  if (tls->key_file && !is_key_pair(options.pem_cert_chain, options.pem_private_key)) {
    throw InvalidFieldError::of("tls.certificate_file",
                                *tls->certificate_file + " and " + *tls->key_file +
                                    ": are no usable certificate and key");
  }
  return grpc::SslCredentials(options);
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
  explicit GrpcCall(std::shared_ptr<Wire> wire) : wire_(std::move(wire)), stub_(wire_->stub()) {}

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

  std::unique_ptr<Call> new_call() override { return std::make_unique<GrpcCall>(wire_); }

  v1::GetSystemInfoResponse get_system_info(Seconds timeout) override {
    grpc::ClientContext context;
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

}  // namespace

std::shared_ptr<Connection> open_connection(const std::string& address,
                                            const ClientOptions& options) {
  check_address(address, options.tls.has_value(), options.insecure);
  auto arguments = channel_arguments(address);
  if (options.tls && options.tls->server_name) {
    arguments.SetSslTargetNameOverride(*options.tls->server_name);
  }
  auto open = [address, arguments, trust = credentials(options.tls)] {
    return grpc::CreateCustomChannel(address, trust, arguments);
  };
  return std::make_shared<GrpcConnection>(std::make_shared<Wire>(std::move(open)));
}

}  // namespace paceline::detail
