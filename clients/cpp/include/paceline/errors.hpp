// Every error of Paceline, on both sides of the wire.
//
//   PacelineError
//   ├── InvalidFieldError               fix the request
//   │   └── ContextLengthExceededError
//   ├── MalformedRequestError           fix the client
//   ├── UnsupportedError                leave it out, or ask another server
//   ├── PermissionDeniedError           fix the credentials
//   │   └── UnauthenticatedError        send the credential that it names
//   ├── SessionError                    an orchestrator repairs it by itself
//   │   ├── SessionNotFoundError
//   │   ├── PrefixNotHeldError
//   │   ├── PrefixMismatchError
//   │   ├── StaleCallError
//   │   └── SupersededError
//   ├── ModelMismatchError              pick another server
//   ├── ModelNotFoundError              ask for another LoRA adapter, or for none
//   ├── TokenizerMismatchError          pair other models
//   ├── TryAgainError                   retry after retry_after(), or elsewhere
//   │   ├── CacheExhaustedError
//   │   ├── OverloadedError
//   │   ├── LoadingError
//   │   ├── DrainingError
//   │   ├── NoTargetError
//   │   └── ConnectionLostError         has no reason on the wire: the transport broke
//   ├── DeadlineError                   resume, with a later deadline
//   │   └── SlowConsumerError           resume, and read faster
//   ├── ClientCancelledError
//   ├── InvariantViolatedError          report it
//   └── InternalError                   report it

#ifndef PACELINE_ERRORS_HPP_
#define PACELINE_ERRORS_HPP_

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace paceline {

/// A time in seconds; any std::chrono duration converts to it.
using Seconds = std::chrono::duration<double>;

/// A field out of its limits: its path in the request, and the fault.
struct FieldViolation {
  std::string field;
  std::string description;
};

/// The details of an error.
struct ErrorDetails {
  /// More facts, as in google.rpc.ErrorInfo; never prompts, tokens or handles.
  std::map<std::string, std::string> metadata;
  /// The wrong fields of an InvalidFieldError.
  std::vector<FieldViolation> violations;
  /// Time until a retry is useful, if the server said one.
  std::optional<Seconds> retry_after;
};

/// The facts of a class of errors.
struct ErrorKind {
  std::string_view name;    ///< The class's name.
  std::string_view code;    ///< Name of the gRPC status code.
  std::string_view reason;  ///< Name of the ErrorReason without its prefix; empty if there is none.
  std::string_view advice;  ///< What the caller should do.
};

/// The base of all errors.
class PacelineError : public std::runtime_error {
 public:
  static constexpr ErrorKind info{"PacelineError", "INTERNAL", "", "report it"};

  explicit PacelineError(const std::string& message, ErrorDetails details = {})
      : std::runtime_error(message), details_(std::move(details)) {}

  virtual const ErrorKind& kind() const noexcept { return info; }
  const std::map<std::string, std::string>& metadata() const noexcept { return details_.metadata; }
  const std::vector<FieldViolation>& violations() const noexcept { return details_.violations; }
  std::optional<Seconds> retry_after() const noexcept { return details_.retry_after; }

  /// Throw it as what it is, where only a PacelineError& is at hand.
  [[noreturn]] virtual void raise() const { throw *this; }

 private:
  ErrorDetails details_;
};

namespace detail {

// Gives Self, a child of Parent with a constant `info`, its virtual functions.
template <class Self, class Parent>
class ErrorClass : public Parent {
 public:
  using Parent::Parent;
  const ErrorKind& kind() const noexcept override { return Self::info; }
  [[noreturn]] void raise() const override { throw static_cast<const Self&>(*this); }
};

}  // namespace detail

/// A field is out of its limits: fix the request.
class InvalidFieldError : public detail::ErrorClass<InvalidFieldError, PacelineError> {
 public:
  static constexpr ErrorKind info{"InvalidFieldError", "INVALID_ARGUMENT", "INVALID_FIELD",
                                  "fix the request"};
  using ErrorClass::ErrorClass;

  /// Name one field and its limit.
  static InvalidFieldError of(const std::string& field, const std::string& description) {
    return InvalidFieldError(field + ": " + description, {{}, {{field, description}}, {}});
  }
};

/// Prompt and max_tokens do not fit the model's context: fix the request.
class ContextLengthExceededError
    : public detail::ErrorClass<ContextLengthExceededError, InvalidFieldError> {
 public:
  static constexpr ErrorKind info{"ContextLengthExceededError", "INVALID_ARGUMENT",
                                  "CONTEXT_LENGTH_EXCEEDED", "shorten the prompt or max_tokens"};
  using ErrorClass::ErrorClass;
};

/// The bytes are not the request message: fix the client.
class MalformedRequestError : public detail::ErrorClass<MalformedRequestError, PacelineError> {
 public:
  static constexpr ErrorKind info{"MalformedRequestError", "INVALID_ARGUMENT", "MALFORMED_REQUEST",
                                  "fix the client"};
  using ErrorClass::ErrorClass;
};

/// This server does not support the request: leave the option out, or ask another server.
class UnsupportedError : public detail::ErrorClass<UnsupportedError, PacelineError> {
 public:
  static constexpr ErrorKind info{"UnsupportedError", "UNIMPLEMENTED", "UNSUPPORTED",
                                  "leave out what is not supported, or ask another server"};
  using ErrorClass::ErrorClass;
};

/// The peer may not call this method: fix the credentials.
class PermissionDeniedError : public detail::ErrorClass<PermissionDeniedError, PacelineError> {
 public:
  static constexpr ErrorKind info{"PermissionDeniedError", "PERMISSION_DENIED", "PERMISSION_DENIED",
                                  "fix the credentials"};
  using ErrorClass::ErrorClass;
};

/// A credential is missing or wrong: send the one that the message names.
class UnauthenticatedError
    : public detail::ErrorClass<UnauthenticatedError, PermissionDeniedError> {
 public:
  static constexpr ErrorKind info{"UnauthenticatedError", "UNAUTHENTICATED", "UNAUTHENTICATED",
                                  "send the credential that it names"};
  using ErrorClass::ErrorClass;
};

/// An error between an orchestrator and a model server; the orchestrator repairs it.
class SessionError : public detail::ErrorClass<SessionError, PacelineError> {
 public:
  static constexpr ErrorKind info{"SessionError", "INTERNAL", "",
                                  "report it: an orchestrator repairs this by itself"};
  using ErrorClass::ErrorClass;
};

/// The session is unknown here: open a new one and send the whole prefix.
class SessionNotFoundError : public detail::ErrorClass<SessionNotFoundError, SessionError> {
 public:
  static constexpr ErrorKind info{"SessionNotFoundError", "NOT_FOUND", "SESSION_NOT_FOUND",
                                  "open a session and send the whole prefix"};
  using ErrorClass::ErrorClass;
};

/// The session holds fewer tokens than base_length, namely metadata()["held_length"].
class PrefixNotHeldError : public detail::ErrorClass<PrefixNotHeldError, SessionError> {
 public:
  static constexpr ErrorKind info{"PrefixNotHeldError", "OUT_OF_RANGE", "PREFIX_NOT_HELD",
                                  "call again with a base_length that is held"};
  using ErrorClass::ErrorClass;
};

/// The session holds other tokens than the digest says: call again with the whole prefix.
class PrefixMismatchError : public detail::ErrorClass<PrefixMismatchError, SessionError> {
 public:
  static constexpr ErrorKind info{"PrefixMismatchError", "FAILED_PRECONDITION", "PREFIX_MISMATCH",
                                  "call again with the whole prefix"};
  using ErrorClass::ErrorClass;
};

/// A call with a higher sequence arrived before: drop this call.
class StaleCallError : public detail::ErrorClass<StaleCallError, SessionError> {
 public:
  static constexpr ErrorKind info{"StaleCallError", "ABORTED", "STALE_CALL", "drop this call"};
  using ErrorClass::ErrorClass;
};

/// A newer call of the session replaced this call: drop it.
class SupersededError : public detail::ErrorClass<SupersededError, SessionError> {
 public:
  static constexpr ErrorKind info{"SupersededError", "ABORTED", "SUPERSEDED", "drop this call"};
  using ErrorClass::ErrorClass;
};

/// The server's model is not the expected one: pick another server.
class ModelMismatchError : public detail::ErrorClass<ModelMismatchError, PacelineError> {
 public:
  static constexpr ErrorKind info{"ModelMismatchError", "FAILED_PRECONDITION", "MODEL_MISMATCH",
                                  "pick another server"};
  using ErrorClass::ErrorClass;
};

/// No target has the LoRA adapter that the request names: ask for another, or for none.
class ModelNotFoundError : public detail::ErrorClass<ModelNotFoundError, PacelineError> {
 public:
  static constexpr ErrorKind info{"ModelNotFoundError", "NOT_FOUND", "MODEL_NOT_FOUND",
                                  "ask for another LoRA adapter, or for none"};
  using ErrorClass::ErrorClass;
};

/// Drafter and target have different tokenizers: pair other models.
class TokenizerMismatchError : public detail::ErrorClass<TokenizerMismatchError, PacelineError> {
 public:
  static constexpr ErrorKind info{"TokenizerMismatchError", "FAILED_PRECONDITION",
                                  "TOKENIZER_MISMATCH", "pair other models"};
  using ErrorClass::ErrorClass;
};

/// The cause may pass: retry after retry_after(), or at another server.
class TryAgainError : public detail::ErrorClass<TryAgainError, PacelineError> {
 public:
  static constexpr ErrorKind info{"TryAgainError", "UNAVAILABLE", "", "try again in a moment"};
  using ErrorClass::ErrorClass;
};

/// There is no memory for another session.
class CacheExhaustedError : public detail::ErrorClass<CacheExhaustedError, TryAgainError> {
 public:
  static constexpr ErrorKind info{"CacheExhaustedError", "RESOURCE_EXHAUSTED", "CACHE_EXHAUSTED",
                                  "try again in a moment, or at another server"};
  using ErrorClass::ErrorClass;
};

/// There are too many requests at once.
class OverloadedError : public detail::ErrorClass<OverloadedError, TryAgainError> {
 public:
  static constexpr ErrorKind info{"OverloadedError", "RESOURCE_EXHAUSTED", "OVERLOADED",
                                  "try again in a moment"};
  using ErrorClass::ErrorClass;
};

/// The server is still loading.
class LoadingError : public detail::ErrorClass<LoadingError, TryAgainError> {
 public:
  static constexpr ErrorKind info{"LoadingError", "UNAVAILABLE", "LOADING",
                                  "try again in a moment, or at another server"};
  using ErrorClass::ErrorClass;
};

/// The server is shutting down.
class DrainingError : public detail::ErrorClass<DrainingError, TryAgainError> {
 public:
  static constexpr ErrorKind info{"DrainingError", "UNAVAILABLE", "DRAINING",
                                  "try again at another server"};
  using ErrorClass::ErrorClass;
};

/// No target is reachable.
class NoTargetError : public detail::ErrorClass<NoTargetError, TryAgainError> {
 public:
  static constexpr ErrorKind info{"NoTargetError", "UNAVAILABLE", "NO_TARGET",
                                  "try again in a moment"};
  using ErrorClass::ErrorClass;
};

/// The connection broke or could not be made; no server reports this error.
class ConnectionLostError : public detail::ErrorClass<ConnectionLostError, TryAgainError> {
 public:
  static constexpr ErrorKind info{"ConnectionLostError", "UNAVAILABLE", "",
                                  "check that the server runs at this address, and try again"};
  using ErrorClass::ErrorClass;
};

/// The call's deadline passed: resume with a later deadline.
class DeadlineError : public detail::ErrorClass<DeadlineError, PacelineError> {
 public:
  static constexpr ErrorKind info{"DeadlineError", "DEADLINE_EXCEEDED", "DEADLINE",
                                  "allow more time"};
  using ErrorClass::ErrorClass;
};

/// The client read nothing for too long: resume, and read faster.
class SlowConsumerError : public detail::ErrorClass<SlowConsumerError, DeadlineError> {
 public:
  static constexpr ErrorKind info{"SlowConsumerError", "DEADLINE_EXCEEDED", "SLOW_CONSUMER",
                                  "read faster"};
  using ErrorClass::ErrorClass;
};

/// The caller went away.
class ClientCancelledError : public detail::ErrorClass<ClientCancelledError, PacelineError> {
 public:
  static constexpr ErrorKind info{"ClientCancelledError", "CANCELLED", "CLIENT_CANCELLED",
                                  "nothing: it was asked for"};
  using ErrorClass::ErrorClass;
};

/// The stream was stopped before it could break a promise: report it.
class InvariantViolatedError : public detail::ErrorClass<InvariantViolatedError, PacelineError> {
 public:
  static constexpr ErrorKind info{"InvariantViolatedError", "DATA_LOSS", "INVARIANT_VIOLATED",
                                  "report it"};
  using ErrorClass::ErrorClass;
};

/// A bug: report it. The server's log has it under the request id.
class InternalError : public detail::ErrorClass<InternalError, PacelineError> {
 public:
  static constexpr ErrorKind info{"InternalError", "INTERNAL", "INTERNAL",
                                  "report it, with the request id"};
  using ErrorClass::ErrorClass;
};

}  // namespace paceline

#endif  // PACELINE_ERRORS_HPP_
