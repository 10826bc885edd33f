// The only place that knows gRPC: a channel, and the two calls on it.

#ifndef PACELINE_SRC_CONNECTION_HPP_
#define PACELINE_SRC_CONNECTION_HPP_

#include <memory>
#include <string>
#include <vector>

#include "call_metadata.hpp"
#include "endpoints.hpp"
#include "paceline/errors.hpp"
#include "paceline/options.hpp"
#include "paceline/v1/orchestrator_service.pb.h"

namespace paceline::detail {

/// A call of Generate. One thread starts, reads and finishes it; any may cancel it. The destructor
/// cancels it and waits for its end.
class Call {
 public:
  virtual ~Call() = default;
  /// Send the request. This may wait for the connection.
  virtual void start(const v1::GenerateRequest& request, Seconds timeout) = 0;
  /// Wait for a message; false at the end of the stream.
  virtual bool read(v1::GenerateResponse& response) = 0;
  /// After the last message: why it ended; null if all is well.
  virtual std::unique_ptr<PacelineError> finish() = 0;
  /// Also before the start, which then fails.
  virtual void cancel() noexcept = 0;
};

/// The connection to an orchestrator, and to the next one after it has announced its shutdown. Any
/// number of threads can use it. Timeouts are at least 0, and at most what a clock can hold.
class Connection {
 public:
  virtual ~Connection() = default;
  virtual std::unique_ptr<Call> new_call(const MetadataPairs& metadata) = 0;
  virtual v1::GetSystemInfoResponse get_system_info(const MetadataPairs& metadata,
                                                    Seconds timeout) = 0;
};

/// Open a connection to each of the addresses between the commas. Throws InvalidFieldError; see
/// Client. A connection itself is made by its first call.
std::vector<std::unique_ptr<Endpoint>> open_endpoints(const std::string& addresses,
                                                      const ClientOptions& options);

}  // namespace paceline::detail

#endif  // PACELINE_SRC_CONNECTION_HPP_
