// TLS material, read and checked before anything is sent with it.

#ifndef PACELINE_SRC_TLS_HPP_
#define PACELINE_SRC_TLS_HPP_

#include <string>

#include "paceline/options.hpp"

namespace paceline::detail {

/// PEM as gRPC takes it; what was not given is empty.
struct TlsMaterial {
  std::string authorities;
  std::string certificate;
  std::string key;
};

/// Read files and take over what was given as text. Throws InvalidFieldError, which names the field
/// and never shows what is in it, if something cannot be read or used, is there twice or lacks its
/// other half.
TlsMaterial read_tls(const Tls& tls);

}  // namespace paceline::detail

#endif  // PACELINE_SRC_TLS_HPP_
