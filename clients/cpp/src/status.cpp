#include "status.hpp"

#include <google/protobuf/any.pb.h>

#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

#include "paceline/client/status_details.pb.h"

namespace paceline::detail {
namespace {

struct ClassOfError {
  const ErrorKind* kind;
  std::unique_ptr<PacelineError> (*make)(const std::string& message, ErrorDetails details);
};

template <class Error>
constexpr ClassOfError class_of() {
  return {&Error::info, [](const std::string& message, ErrorDetails details) {
            return std::unique_ptr<PacelineError>(new Error(message, std::move(details)));
          }};
}

constexpr std::array kClassesWithReason{
    class_of<InvalidFieldError>(),      class_of<ContextLengthExceededError>(),
    class_of<MalformedRequestError>(),  class_of<UnsupportedError>(),
    class_of<PermissionDeniedError>(),  class_of<UnauthenticatedError>(),
    class_of<SessionNotFoundError>(),   class_of<PrefixNotHeldError>(),
    class_of<PrefixMismatchError>(),    class_of<StaleCallError>(),
    class_of<SupersededError>(),        class_of<ModelMismatchError>(),
    class_of<ModelNotFoundError>(),
    class_of<TokenizerMismatchError>(), class_of<CacheExhaustedError>(),
    class_of<OverloadedError>(),        class_of<LoadingError>(),
    class_of<DrainingError>(),          class_of<NoTargetError>(),
    class_of<DeadlineError>(),          class_of<SlowConsumerError>(),
    class_of<ClientCancelledError>(),   class_of<InvariantViolatedError>(),
    class_of<InternalError>(),
};

// The meaning of each code without a reason of ours: the transport's, a proxy's, a newer server's.
// gRPC itself answers RESOURCE_EXHAUSTED to a message that is too large: the same call would fail
// again. Some of its servers answer CANCELLED to calls that they cut, or that arrive, as they stop;
// the client does not decode its own cancels.
struct CodeOfStatus {
  std::string_view name;
  ClassOfError error = class_of<InternalError>();
};

constexpr std::array kCodes{
    CodeOfStatus{"OK"},
    CodeOfStatus{"CANCELLED", class_of<DrainingError>()},
    CodeOfStatus{"UNKNOWN"},
    CodeOfStatus{"INVALID_ARGUMENT", class_of<InvalidFieldError>()},
    CodeOfStatus{"DEADLINE_EXCEEDED", class_of<DeadlineError>()},
    CodeOfStatus{"NOT_FOUND"},
    CodeOfStatus{"ALREADY_EXISTS"},
    CodeOfStatus{"PERMISSION_DENIED", class_of<PermissionDeniedError>()},
    CodeOfStatus{"RESOURCE_EXHAUSTED", class_of<InvalidFieldError>()},
    CodeOfStatus{"FAILED_PRECONDITION"},
    CodeOfStatus{"ABORTED"},
    CodeOfStatus{"OUT_OF_RANGE"},
    CodeOfStatus{"UNIMPLEMENTED", class_of<UnsupportedError>()},
    CodeOfStatus{"INTERNAL"},
    CodeOfStatus{"UNAVAILABLE", class_of<ConnectionLostError>()},
    CodeOfStatus{"DATA_LOSS"},
    CodeOfStatus{"UNAUTHENTICATED", class_of<UnauthenticatedError>()},
};

constexpr std::size_t kUnknownCode = 2;
constexpr std::size_t kResourceExhausted = 8;
constexpr auto kOverloaded = class_of<OverloadedError>();

struct Details {
  client::Status status;
  client::ErrorInfo info;
  client::RetryInfo retry;
  client::BadRequest bad_request;
};

template <class Message>
void unpack(const google::protobuf::Any& any, std::string_view type, Message& message) {
  const std::string_view url = any.type_url();
  if (url.substr(url.rfind('/') + 1) != type) return;
  if (!message.ParseFromString(any.value())) message.Clear();
}

Details parse(const std::string& bytes) {
  Details details;
  if (!details.status.ParseFromString(bytes)) details.status.Clear();
  for (const auto& any : details.status.details()) {
    unpack(any, "google.rpc.ErrorInfo", details.info);
    unpack(any, "google.rpc.RetryInfo", details.retry);
    unpack(any, "google.rpc.BadRequest", details.bad_request);
  }
  return details;
}

ErrorDetails read_details(const Details& wire) {
  ErrorDetails details;
  details.metadata = {wire.info.metadata().begin(), wire.info.metadata().end()};
  for (const auto& violation : wire.bad_request.field_violations()) {
    details.violations.push_back({violation.field(), violation.description()});
  }
  if (wire.retry.has_retry_delay()) {
    const auto& delay = wire.retry.retry_delay();
    details.retry_after = Seconds(static_cast<double>(delay.seconds()) + delay.nanos() / 1e9);
  }
  return details;
}

const ClassOfError& class_of_code(std::size_t code, bool may_pass) {
  return code == kResourceExhausted && may_pass ? kOverloaded : kCodes[code].error;
}

const ClassOfError& find_class(const Details& details, std::size_t code) {
  const auto& fallback = class_of_code(code, details.retry.has_retry_delay());
  if (details.info.domain() != "paceline") return fallback;
  for (const auto& error : kClassesWithReason) {
    if (error.kind->reason == details.info.reason()) return error;
  }
  return fallback;
}

}  // namespace

std::unique_ptr<PacelineError> decode(int number, const std::string& message,
                                      const std::string& bytes) {
  const auto index = static_cast<std::size_t>(number);
  const auto code = index < kCodes.size() ? index : kUnknownCode;
  const auto details = parse(bytes);
  auto words = details.status.message().empty() ? message : details.status.message();
  if (words.empty()) words = kCodes[code].name;
  return find_class(details, code).make(words, read_details(details));
}

}  // namespace paceline::detail
