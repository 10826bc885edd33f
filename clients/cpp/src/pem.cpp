#include "pem.hpp"

#ifdef PACELINE_HAS_OPENSSL

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <memory>

namespace paceline::detail {
namespace {

template <auto Free>
struct Freed {
  template <class Held>
  void operator()(Held* held) const {
    Free(held);
  }
};
using Bio = std::unique_ptr<BIO, Freed<BIO_free>>;
using Certificate = std::unique_ptr<X509, Freed<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;

Bio reading(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Instead of OpenSSL's own, which asks the terminal.
int no_password(char*, int, int, void*) { return -1; }

Certificate next_certificate(const Bio& pem) {
  return Certificate(PEM_read_bio_X509(pem.get(), nullptr, no_password, nullptr));
}

}  // namespace

bool has_certificates(const std::string& pem) {
  ERR_clear_error();
  const auto rest = reading(pem);
  bool found = false;
  while (next_certificate(rest)) found = true;
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  return found && at_end;
}

bool is_key_pair(const std::string& certificate_pem, const std::string& key_pem) {
  const auto certificate = next_certificate(reading(certificate_pem));
  const Key key(PEM_read_bio_PrivateKey(reading(key_pem).get(), nullptr, no_password, nullptr));
  const bool fits = certificate && key && X509_check_private_key(certificate.get(), key.get()) == 1;
  ERR_clear_error();
  return fits;
}

}  // namespace paceline::detail

#else

namespace paceline::detail {

bool has_certificates(const std::string&) { return true; }
bool is_key_pair(const std::string&, const std::string&) { return true; }

}  // namespace paceline::detail

#endif
