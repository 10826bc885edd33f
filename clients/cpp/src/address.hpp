// Where a connection goes, and whether it may be plaintext.

#ifndef PACELINE_SRC_ADDRESS_HPP_
#define PACELINE_SRC_ADDRESS_HPP_

#include <string>

namespace paceline::detail {

/// Whether every endpoint of a gRPC target is on this machine. Throws InvalidFieldError if an
/// endpoint has no port.
bool is_loopback(const std::string& address);

/// Throws InvalidFieldError if `address` is malformed, or is on another machine and neither TLS nor
/// `insecure` allows that.
void check_address(const std::string& address, bool has_tls, bool insecure);

}  // namespace paceline::detail

#endif  // PACELINE_SRC_ADDRESS_HPP_
