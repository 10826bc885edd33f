// Reads the wire's messages into the client's data.

#ifndef PACELINE_SRC_RESPONSES_HPP_
#define PACELINE_SRC_RESPONSES_HPP_

#include "paceline/generation.hpp"
#include "paceline/v1/orchestrator_service.pb.h"

namespace paceline::detail {

Started read_started(const v1::GenerationStarted& message);
Chunk read_chunk(const v1::GenerationChunk& message);
PromptChunk read_prompt_chunk(const v1::PromptChunk& message);
TimelineEvent read_timeline_event(const v1::TimelineEvent& message);
Finished read_finished(const v1::GenerationFinished& message);
SystemInfo read_system_info(const v1::GetSystemInfoResponse& message);

}  // namespace paceline::detail

#endif  // PACELINE_SRC_RESPONSES_HPP_
