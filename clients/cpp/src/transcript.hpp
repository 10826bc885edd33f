// The received part of a generation, and the request for the missing part: no I/O here.

#ifndef PACELINE_SRC_TRANSCRIPT_HPP_
#define PACELINE_SRC_TRANSCRIPT_HPP_

#include <cstdint>
#include <optional>
#include <vector>

#include "paceline/errors.hpp"
#include "paceline/generation.hpp"
#include "paceline/v1/orchestrator_service.pb.h"

namespace paceline::detail {

/// A request and its answer, which can come over several streams. Another generation can continue a
/// copy.
///
/// Invariant: each chunk starts at the absolute position where the one
/// before ended, and none is missing at the end. A stream that breaks this rule ends in an error,
/// never in a gap or a duplicate.
class Transcript {
 public:
  explicit Transcript(v1::GenerateRequest request) : request_(std::move(request)) {}

  /// Return the request for the missing part.
  v1::GenerateRequest next_request() const;

  /// Add a message, and return the event for the caller, if any. Throws ModelMismatchError if
  /// the resumed stream comes from another model, InvariantViolatedError if tokens are missing or
  /// come twice.
  std::optional<Event> add(const v1::GenerateResponse& response);

  /// The whole. Throws InvariantViolatedError if the server closed the stream without its last
  /// message.
  Completion completion() const;
  void check_complete() const;

  const std::optional<Started>& started() const { return started_; }
  const std::optional<Finished>& finished() const { return finished_; }
  const std::vector<PromptChunk>& prompt_chunks() const { return prompt_chunks_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }

 private:
  void start(Started started);
  void append_prompt(PromptChunk chunk);
  void append(const Chunk& chunk);
  void finish(Finished finished);

  v1::GenerateRequest request_;
  std::optional<Started> started_;
  std::optional<Finished> finished_;
  std::vector<Chunk> chunks_;
  std::vector<PromptChunk> prompt_chunks_;
  std::int64_t next_position_ = 0;
  std::int64_t received_count_ = 0;  // tokens in chunks_
  std::int64_t resumed_count_ = 0;   // tokens that the current stream did not have to send
};

}  // namespace paceline::detail

#endif  // PACELINE_SRC_TRANSCRIPT_HPP_
