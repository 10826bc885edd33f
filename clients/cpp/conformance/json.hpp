// The client's data as JSON, and JSON as the client's options.

#ifndef PACELINE_CONFORMANCE_JSON_HPP_
#define PACELINE_CONFORMANCE_JSON_HPP_

#include <nlohmann/json.hpp>
#include <paceline/paceline.hpp>
#include <stdexcept>

namespace conformance {

using Json = nlohmann::json;

/// The request asks for what this driver does not know.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Json told(const paceline::Chunk& chunk);
Json told(const paceline::PromptChunk& chunk);
Json told(const paceline::TimelineEvent& event);
Json told(const std::optional<paceline::Started>& started);
Json told(const std::optional<paceline::Finished>& finished);
Json told(const paceline::SystemInfo& system);
Json told(const paceline::PacelineError& error);

std::string read_addresses(const Json& request);
paceline::ClientOptions read_client_options(const Json& request);
paceline::Prompt read_prompt(const Json& prompt);
paceline::GenerateOptions read_options(const Json& options);
paceline::CallOptions read_call(const Json& request);
paceline::Metadata read_metadata(const Json& request, const char* key);

}  // namespace conformance

#endif  // PACELINE_CONFORMANCE_JSON_HPP_
