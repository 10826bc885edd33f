#include "call_metadata.hpp"

#include <algorithm>
#include <string_view>
#include <variant>

namespace paceline::detail {
namespace {

std::string lower(std::string name) {
  for (char& c : name) {
    if ('A' <= c && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return name;
}

bool is_name(const std::string& lower_name) {
  constexpr std::string_view kCharacters = "0123456789abcdefghijklmnopqrstuvwxyz-_.";
  return !lower_name.empty() && lower_name.rfind("grpc-", 0) != 0 &&
         lower_name.find_first_not_of(kCharacters) == std::string::npos;
}

bool is_binary(const std::string& lower_name) {
  return lower_name.size() >= 4 && lower_name.compare(lower_name.size() - 4, 4, "-bin") == 0;
}

// The characters that HTTP/2 headers of gRPC allow.
bool is_printable(const std::string& text, char from) {
  return std::all_of(text.begin(), text.end(), [from](char c) { return from <= c && c <= '~'; });
}

void append(const Metadata& metadata, MetadataPairs& pairs) {
  check_metadata(metadata);
  for (const auto& [name, value] : metadata) pairs.emplace_back(lower(name), value);
}

}  // namespace

void check_metadata(const Metadata& metadata) {
  for (const auto& [name, value] : metadata) {
    const auto lower_name = lower(name);
    if (!is_name(lower_name)) {
      throw InvalidFieldError::of(
          "metadata",
          "'" + name +
              "' is not a metadata name: use letters, digits, - _ . and no prefix grpc-");
    }
    if (!is_binary(lower_name) && !is_printable(value, ' ')) {
      throw InvalidFieldError::of("metadata", name + ": must be printable ASCII");
    }
  }
}

CallMetadata::CallMetadata(MetadataSource source, std::function<std::string()> token)
    : source_(std::move(source)), token_(std::move(token)) {
  if (const auto* known = std::get_if<Metadata>(&source_)) check_metadata(*known);
}

MetadataPairs CallMetadata::pairs(const Metadata& own) const {
  MetadataPairs pairs;
  if (const auto* known = std::get_if<Metadata>(&source_)) {
    append(*known, pairs);
  } else if (const auto& tell = std::get<1>(source_)) {
    append(tell(), pairs);
  }
  append(own, pairs);
  if (!token_) return pairs;
  const auto token = token_();
  if (token.empty() || !is_printable(token, '!')) {
    throw InvalidFieldError::of("token", "must be printable ASCII without spaces");
  }
  pairs.emplace_back("authorization", "Bearer " + token);
  return pairs;
}

}  // namespace paceline::detail
