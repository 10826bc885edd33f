// Whether TLS can use the contents of PEM files; gRPC would retry the connection for ever.

#ifndef PACELINE_SRC_PEM_HPP_
#define PACELINE_SRC_PEM_HPP_

#include <string>

namespace paceline::detail {

/// Whether there is a certificate, and every one of them can be read.
///
/// Always true if gRPC was built with a TLS library of its own, which cannot be asked.
bool has_certificates(const std::string& pem);

/// Whether a certificate and a private key can be read, and belong together. See above.
bool is_key_pair(const std::string& certificate_pem, const std::string& key_pem);

}  // namespace paceline::detail

#endif  // PACELINE_SRC_PEM_HPP_
