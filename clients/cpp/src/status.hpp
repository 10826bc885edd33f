// Errors on the wire: google.rpc.Status, and back to the class that the server raised.

#ifndef PACELINE_SRC_STATUS_HPP_
#define PACELINE_SRC_STATUS_HPP_

#include <memory>
#include <string>

#include "paceline/errors.hpp"

namespace paceline::detail {

/// Rebuild the error that a server raised, or name the transport's error.
///
/// Never fails: if the details are not a google.rpc.Status, or have no reason that this version
/// knows, the status code decides the class.
///
/// `code` is the number of a gRPC status code other than OK, `details` the trailer
/// grpc-status-details-bin.
std::unique_ptr<PacelineError> decode(int code, const std::string& message,
                                      const std::string& details);

}  // namespace paceline::detail

#endif  // PACELINE_SRC_STATUS_HPP_
