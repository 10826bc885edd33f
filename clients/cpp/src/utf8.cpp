#include "utf8.hpp"

#include <cstddef>

namespace paceline::detail {
namespace {

// The bytes that may follow a leading byte: their number, and the range of the first one.
struct Tail {
  std::size_t length;
  unsigned char lowest = 0x80;
  unsigned char highest = 0xBF;
};

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

Tail tail_of(unsigned char lead) {
  if (lead < 0x80) return {0};
  if (lead < 0xC2) return {kNone};
  if (lead < 0xE0) return {1};
  if (lead == 0xE0) return {2, 0xA0, 0xBF};
  if (lead == 0xED) return {2, 0x80, 0x9F};
  if (lead < 0xF0) return {2};
  if (lead == 0xF0) return {3, 0x90, 0xBF};
  if (lead < 0xF4) return {3};
  if (lead == 0xF4) return {3, 0x80, 0x8F};
  return {kNone};
}

}  // namespace

bool is_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    auto tail = tail_of(static_cast<unsigned char>(bytes.front()));
    bytes.remove_prefix(1);
    if (tail.length == kNone || tail.length > bytes.size()) return false;
    for (; tail.length > 0; --tail.length, tail.lowest = 0x80, tail.highest = 0xBF) {
      const auto byte = static_cast<unsigned char>(bytes.front());
      if (byte < tail.lowest || byte > tail.highest) return false;
      bytes.remove_prefix(1);
    }
  }
  return true;
}

}  // namespace paceline::detail
