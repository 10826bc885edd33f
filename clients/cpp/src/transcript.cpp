#include "transcript.hpp"

#include <string>
#include <utility>

#include "responses.hpp"

namespace paceline::detail {

v1::GenerateRequest Transcript::next_request() const {
  auto request = request_;
  if (!started_) return request;
  request.set_seed(started_->seed);
  for (const auto& chunk : chunks_) {
    for (const auto id : chunk.token_ids) {
      request.add_resume_token_ids(static_cast<std::uint32_t>(id));
    }
  }
  if (!chunks_.empty()) {  // which come after all of the prompt
    request.clear_prompt_logprobs();
    request.clear_include_prompt();
  }
  return request;
}

std::optional<Event> Transcript::add(const v1::GenerateResponse& response) {
  switch (response.event_case()) {
    case v1::GenerateResponse::kStarted:
      start(read_started(response.started()));
      break;
    case v1::GenerateResponse::kPromptChunk:
      append_prompt(read_prompt_chunk(response.prompt_chunk()));
      break;
    case v1::GenerateResponse::kChunk: {
      auto chunk = read_chunk(response.chunk());
      append(chunk);
      return chunk;
    }
    case v1::GenerateResponse::kTimelineEvent:
      return read_timeline_event(response.timeline_event());
    case v1::GenerateResponse::kFinished:
      finish(read_finished(response.finished()));
      break;
    default:  // what a newer server says
      break;
  }
  return std::nullopt;
}

void Transcript::check_complete() const {
  if (!started_ || !finished_) {
    throw InvariantViolatedError("the stream ended before its last message");
  }
}

Completion Transcript::completion() const {
  check_complete();
  return {*started_, chunks_, *finished_, resumed_count_, prompt_chunks_};
}

void Transcript::start(Started started) {
  if (!started_) {
    next_position_ = started.prompt_token_count + request_.resume_token_ids_size();
  } else if (started_->model_fingerprint != started.model_fingerprint) {
    throw ModelMismatchError(
        "the stream was resumed with another model: " + started.model_fingerprint + " instead of " +
        started_->model_fingerprint);
  }
  started_ = std::move(started);
  resumed_count_ = received_count_;
}

// A stream that was resumed before the answer tells the prompt's tokens anew.
void Transcript::append_prompt(PromptChunk chunk) {
  if (chunk.position == 0) prompt_chunks_.clear();
  std::int64_t due = 0;
  if (!prompt_chunks_.empty()) {
    const auto& last = prompt_chunks_.back();
    due = last.position + static_cast<std::int64_t>(last.token_ids.size());
  }
  if (chunk.position != due) {
    throw InvariantViolatedError("tokens of the prompt at position " +
                                 std::to_string(chunk.position) + " came where " +
                                 std::to_string(due) + " was due");
  }
  prompt_chunks_.push_back(std::move(chunk));
}

void Transcript::append(const Chunk& chunk) {
  if (!started_) throw InvariantViolatedError("tokens came before the first message");
  if (chunk.position != next_position_) {
    throw InvariantViolatedError("tokens at position " + std::to_string(chunk.position) +
                                 " came where " + std::to_string(next_position_) + " was due");
  }
  const auto count = static_cast<std::int64_t>(chunk.token_ids.size());
  next_position_ += count;
  received_count_ += count;
  chunks_.push_back(chunk);
}

void Transcript::finish(Finished finished) {
  const auto end = finished.usage.prompt_token_count + finished.usage.completion_token_count;
  if (end != next_position_) {
    throw InvariantViolatedError("the stream ended at position " + std::to_string(next_position_) +
                                 " instead of " + std::to_string(end));
  }
  finished_ = std::move(finished);
}

}  // namespace paceline::detail
