// The metadata of a client's calls: headers, and the bearer token.

#ifndef PACELINE_SRC_CALL_METADATA_HPP_
#define PACELINE_SRC_CALL_METADATA_HPP_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "paceline/options.hpp"

namespace paceline::detail {

/// Names in small letters, and values; a name can come twice.
using MetadataPairs = std::vector<std::pair<std::string, std::string>>;

/// Throws InvalidFieldError if a name or value cannot be sent. It never shows a value, which may be
/// secret.
void check_metadata(const Metadata& metadata);

/// A client's headers and token, determined for each call. Any thread may use it, if the
/// client's functions allow that.
class CallMetadata {
 public:
  /// Throws as check_metadata for the metadata that is known before a call.
  CallMetadata(MetadataSource source, std::function<std::string()> token);

  /// The metadata of a call, its own included. Throws as check_metadata, and the exceptions of the
  /// client's functions.
  MetadataPairs pairs(const Metadata& own) const;

 private:
  const MetadataSource source_;
  const std::function<std::string()> token_;
};

}  // namespace paceline::detail

#endif  // PACELINE_SRC_CALL_METADATA_HPP_
