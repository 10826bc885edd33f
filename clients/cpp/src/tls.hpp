// TLS material, read and checked before anything is sent with it.

#ifndef PACELINE_SRC_TLS_HPP_
#define PACELINE_SRC_TLS_HPP_

#include <string>

#include "paceline/options.hpp"

namespace paceline::detail {

/// PEM in gRPC's form; a missing option is empty.
struct TlsMaterial {
  std::string authorities;
  std::string certificate;
  std::string key;
};

/// Read the files and texts of the options. Throws InvalidFieldError, which names the field and
/// never shows its content, if an option cannot be read or used, is given twice or lacks its other
/// half.
TlsMaterial read_tls(const Tls& tls);

}  // namespace paceline::detail

#endif  // PACELINE_SRC_TLS_HPP_
