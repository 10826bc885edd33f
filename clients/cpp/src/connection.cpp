#include "connection.hpp"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "address.hpp"
#include "paceline/v1/orchestrator_service.grpc.pb.h"
#include "status.hpp"

namespace paceline::detail {
namespace {

// A frozen peer is noticed in about 25 s: without ping_timeout_ms keepalive alone does not bound
// it. A server that comes back is found again within half a second. The receive limit has room for
// the timeline of a long request.
grpc::ChannelArguments channel_arguments(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt("grpc.keepalive_time_ms", 20'000);
  arguments.SetInt("grpc.keepalive_timeout_ms", 5'000);
  arguments.SetInt("grpc.http2.ping_timeout_ms", 5'000);
  arguments.SetInt("grpc.initial_reconnect_backoff_ms", 100);
  arguments.SetInt("grpc.min_reconnect_backoff_ms", 100);
  arguments.SetInt("grpc.max_reconnect_backoff_ms", 500);
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
  return grpc::SslCredentials(options);
}

void set_timeout(grpc::ClientContext& context, Seconds timeout) {
  using Clock = std::chrono::system_clock;  // the only one that every gRPC release takes
  context.set_deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout));
}

std::unique_ptr<PacelineError> error_of(const grpc::Status& status) {
  if (status.ok()) return nullptr;
  return decode(status.error_code(), status.error_message(), status.error_details());
}

constexpr const char* kUntouched = "\x01untouched";

class GrpcCall final : public Call {
 public:
  explicit GrpcCall(std::shared_ptr<v1::OrchestratorService::Stub> stub) : stub_(std::move(stub)) {}

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
    return error_of(status);
  }

  void cancel() noexcept override { context_.TryCancel(); }

 private:
  std::shared_ptr<v1::OrchestratorService::Stub> stub_;
  grpc::ClientContext context_;  // before reader_, which uses it
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
  bool finished_ = false;
  bool unreadable_ = false;
};

class GrpcConnection final : public Connection {
 public:
  explicit GrpcConnection(const std::shared_ptr<grpc::Channel>& channel)
      : stub_(v1::OrchestratorService::NewStub(channel)) {}

  std::unique_ptr<Call> new_call() override { return std::make_unique<GrpcCall>(stub_); }

  v1::GetSystemInfoResponse get_system_info(Seconds timeout) override {
    grpc::ClientContext context;
    set_timeout(context, timeout);
    v1::GetSystemInfoResponse response;
    const auto status = stub_->GetSystemInfo(&context, {}, &response);
    if (const auto error = error_of(status)) error->raise();
    return response;
  }

 private:
  std::shared_ptr<v1::OrchestratorService::Stub> stub_;
};

}  // namespace

std::shared_ptr<Connection> open_connection(const std::string& address,
                                            const ClientOptions& options) {
  check_address(address, options.tls.has_value(), options.insecure);
  auto arguments = channel_arguments(address);
  if (options.tls && options.tls->server_name) {
    arguments.SetSslTargetNameOverride(*options.tls->server_name);
  }
  return std::make_shared<GrpcConnection>(
      grpc::CreateCustomChannel(address, credentials(options.tls), arguments));
}

}  // namespace paceline::detail
