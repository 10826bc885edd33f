// The addresses of connections, and whether they may be plaintext.

#ifndef PACELINE_SRC_ADDRESS_HPP_
#define PACELINE_SRC_ADDRESS_HPP_

#include <string>
#include <vector>

namespace paceline::detail {

/// The addresses between the commas; what has a gRPC scheme is one, and may have commas of its own.
std::vector<std::string> listed(const std::string& addresses);

/// Whether every endpoint of a gRPC target is on this machine. Throws InvalidFieldError if an
/// endpoint has no port.
bool is_loopback(const std::string& address);

/// Whether a gRPC target is one server: a socket, or one IP address; a name can lead to several.
/// Throws InvalidFieldError if an endpoint has no port.
bool leads_to_one(const std::string& address);

/// Throws InvalidFieldError if `address` is malformed, or is on another machine and neither TLS nor
/// `insecure` allows that.
void check_address(const std::string& address, bool has_tls, bool insecure);

}  // namespace paceline::detail

#endif  // PACELINE_SRC_ADDRESS_HPP_
