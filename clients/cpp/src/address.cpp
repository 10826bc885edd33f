#include "address.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>

#include "paceline/errors.hpp"

namespace paceline::detail {
namespace {

constexpr int kHighestPort = 65535;

bool is_port(const std::string& text) {
  const bool digits =
      std::all_of(text.begin(), text.end(), [](char c) { return '0' <= c && c <= '9'; });
  return digits && !text.empty() && text.size() <= 5 && std::stoi(text) <= kHighestPort;
}

std::string host_of(const std::string& endpoint) {
  const auto colon = endpoint.rfind(':');
  if (colon == std::string::npos || colon == 0 || !is_port(endpoint.substr(colon + 1))) {
    throw InvalidFieldError::of("address", "'" + endpoint + "' must be HOST:PORT");
  }
  auto host = endpoint.substr(0, colon);
  if (host.front() == '[') host.erase(0, 1);
  if (!host.empty() && host.back() == ']') host.pop_back();
  return host;
}

// A name other than localhost is not: where it leads to is not ours to know.
bool is_loopback_host(const std::string& host) {
  in_addr ipv4;
  in6_addr ipv6;
  if (inet_pton(AF_INET, host.c_str(), &ipv4) == 1) return ntohl(ipv4.s_addr) >> 24 == 127;
  if (inet_pton(AF_INET6, host.c_str(), &ipv6) == 1) return IN6_IS_ADDR_LOOPBACK(&ipv6);
  return host == "localhost";
}

// "dns:///a:1" is ("dns", "a:1"); "a:1" is ("", "a:1").
std::pair<std::string, std::string> split_scheme(const std::string& address) {
  const auto colon = address.find(':');
  const auto scheme = address.substr(0, colon);
  if (colon != std::string::npos) {
    const auto rest = address.substr(colon + 1);
    if (scheme == "unix" || scheme == "unix-abstract") return {"unix", rest};
    if (scheme == "dns" || scheme == "ipv4" || scheme == "ipv6" || scheme == "passthrough") {
      return {scheme, rest.substr(rest.rfind('/') + 1)};  // npos + 1 is 0
    }
  }
  return {"", address};
}

}  // namespace

bool is_loopback(const std::string& address) {
  const auto [scheme, endpoints] = split_scheme(address);
  if (scheme == "unix") return true;
  bool local = !endpoints.empty();
  if (!local) host_of(endpoints);  // throws
  std::istringstream list(endpoints);
  for (std::string endpoint; std::getline(list, endpoint, ',');) {
    local = is_loopback_host(host_of(endpoint)) && local;
  }
  return local;
}

void check_address(const std::string& address, bool has_tls, bool insecure) {
  if (is_loopback(address) || has_tls || insecure) return;
  throw InvalidFieldError::of("address", address +
                                             " is not on this machine and there is no TLS: give "
                                             "TLS options, or say insecure to allow plaintext");
}

}  // namespace paceline::detail
