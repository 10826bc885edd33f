#include "tls.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "pem.hpp"

namespace paceline::detail {
namespace {

using Text = std::optional<std::string>;

// An option's content, and its name in errors; for a file, its path, too.
struct Pem {
  std::string field;
  std::string path;
  std::string content;

  [[noreturn]] void refuse(const std::string& why) const {
    throw InvalidFieldError::of(field, path.empty() ? why : path + ": " + why);
  }
};

std::string content_of(const Pem& file) {
  errno = 0;
  std::ifstream stream(file.path, std::ios::binary);
  std::ostringstream content;
  if (!stream || !(content << stream.rdbuf())) {  // nothing to insert is a failure, too
    file.refuse(errno ? std::strerror(errno) : "is empty");
  }
  return content.str();
}

Pem read_pem(const std::string& name, const Text& path, const Text& content) {
  Pem pem{"tls." + name + (path ? "_file" : ""), path.value_or(""), content.value_or("")};
  if (path && content) pem.refuse("and tls." + name + " too: give one");
  if (path) pem.content = content_of(pem);
  // Which gRPC would take for nothing given.
  if (content && content->empty()) pem.refuse("is empty");
  return pem;
}

}  // namespace

TlsMaterial read_tls(const Tls& tls) {
  const bool has_certificate = tls.certificate_file || tls.certificate;
  if (has_certificate != (tls.key_file || tls.key)) {
    throw InvalidFieldError::of("tls", "a certificate and its key belong together");
  }
  const auto authorities = read_pem("ca", tls.ca_file, tls.ca);
  const auto certificate = read_pem("certificate", tls.certificate_file, tls.certificate);
  const auto key = read_pem("key", tls.key_file, tls.key);
  if ((tls.ca_file || tls.ca) && !has_certificates(authorities.content)) {
    authorities.refuse("has no usable certificate");
  }
  if (has_certificate && !is_key_pair(certificate.content, key.content)) {
    certificate.refuse("is no usable certificate, or the key is not its own");
  }
  return {authorities.content, certificate.content, key.content};
}

}  // namespace paceline::detail
