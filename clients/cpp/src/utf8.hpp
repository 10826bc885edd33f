// Whether bytes are text. Protobuf for C++ would log an error and send them all the same.

#ifndef PACELINE_SRC_UTF8_HPP_
#define PACELINE_SRC_UTF8_HPP_

#include <string_view>

namespace paceline::detail {

/// Whether it is well-formed UTF-8 (Unicode 15, table 3-7): no overlong form, no surrogate.
bool is_utf8(std::string_view bytes);

}  // namespace paceline::detail

#endif  // PACELINE_SRC_UTF8_HPP_
