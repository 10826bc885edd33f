#include "address.hpp"

#include <arpa/inet.h>

#include <algorithm>
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

bool is_ip(const std::string& host) {
  in6_addr either;  // the larger one
  return inet_pton(AF_INET, host.c_str(), &either) == 1 ||
         inet_pton(AF_INET6, host.c_str(), &either) == 1;
}

// A name other than localhost is not: its addresses are not known here.
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

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts(1);
  for (const char c : list) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string stripped(const std::string& text) {
  const auto first = text.find_first_not_of(' ');
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(' ') + 1 - first);
}

// None for a socket.
std::vector<std::string> hosts_of(const std::string& address) {
  const auto [scheme, endpoints] = split_scheme(address);
  std::vector<std::string> hosts;
  if (scheme == "unix") return hosts;
  for (const auto& endpoint : split(endpoints)) hosts.push_back(host_of(endpoint));
  return hosts;
}

}  // namespace

std::vector<std::string> listed(const std::string& addresses) {
  if (!split_scheme(addresses).first.empty()) return {addresses};
  auto all = split(addresses);
  std::transform(all.begin(), all.end(), all.begin(), stripped);
  return all;
}

bool is_loopback(const std::string& address) {
  const auto hosts = hosts_of(address);
  return std::all_of(hosts.begin(), hosts.end(), is_loopback_host);
}

bool leads_to_one(const std::string& address) {
  const auto hosts = hosts_of(address);
  return hosts.empty() || (hosts.size() == 1 && (hosts[0] == "localhost" || is_ip(hosts[0])));
}

void check_address(const std::string& address, bool has_tls, bool insecure) {
  if (is_loopback(address) || has_tls || insecure) return;
  throw InvalidFieldError::of("address", address +
                                             " is not on this machine and there is no TLS: give "
                                             "TLS options, or say insecure to allow plaintext");
}

}  // namespace paceline::detail
