// Turns a generation's options into the wire's request.

#ifndef PACELINE_SRC_REQUEST_HPP_
#define PACELINE_SRC_REQUEST_HPP_

#include "paceline/options.hpp"
#include "paceline/v1/orchestrator_service.pb.h"

namespace paceline::detail {

/// Throws InvalidFieldError if a field cannot hold the value; the server checks all other limits.
v1::GenerateRequest build_request(const Prompt& prompt, const GenerateOptions& options);

}  // namespace paceline::detail

#endif  // PACELINE_SRC_REQUEST_HPP_
