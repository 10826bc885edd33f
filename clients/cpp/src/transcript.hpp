// What a generation has received so far, and what it asks for to go on: no I/O here.

#ifndef PACELINE_SRC_TRANSCRIPT_HPP_
#define PACELINE_SRC_TRANSCRIPT_HPP_

#include <cstdint>
#include <optional>
#include <vector>

#include "paceline/errors.hpp"
#include "paceline/generation.hpp"
#include "paceline/v1/orchestrator_service.pb.h"

namespace paceline::detail {

/// A request and what came back, over as many streams as it took. A copy is a branch to go on with.
///
/// Invariant: the chunks follow on one another: each starts at the absolute position where the one
/// before ended, and none is missing at the end. A stream that says otherwise ends in an error,
/// never in a gap or a duplicate.
class Transcript {
 public:
  explicit Transcript(v1::GenerateRequest request) : request_(std::move(request)) {}

  /// Ask for what is missing.
  v1::GenerateRequest next_request() const;

  /// Take in one message, and return what the caller is to see of it. Throws ModelMismatchError if
  /// the resumed stream comes from another model, InvariantViolatedError if tokens are missing or
  /// come twice.
  std::optional<Event> add(const v1::GenerateResponse& response);

  /// The whole. Throws InvariantViolatedError if the server closed the stream without its last
  /// message.
  Completion completion() const;
  void check_complete() const;

  const std::optional<Started>& started() const { return started_; }
  const std::optional<Finished>& finished() const { return finished_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }

 private:
  void start(Started started);
  void append(const Chunk& chunk);
  void finish(Finished finished);

  v1::GenerateRequest request_;
  std::optional<Started> started_;
  std::optional<Finished> finished_;
  std::vector<Chunk> chunks_;
  std::int64_t next_position_ = 0;
  std::int64_t received_count_ = 0;  // tokens in chunks_
  std::int64_t resumed_count_ = 0;   // tokens that the current stream did not have to send
};

}  // namespace paceline::detail

#endif  // PACELINE_SRC_TRANSCRIPT_HPP_
