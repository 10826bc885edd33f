#include "transcript.hpp"

#include <gtest/gtest.h>

namespace paceline::detail {
namespace {

v1::GenerateResponse started(const std::string& fingerprint = "model-a") {
  v1::GenerateResponse response;
  response.mutable_started()->set_prompt_token_count(3);
  response.mutable_started()->set_seed(7);
  response.mutable_started()->set_model_fingerprint(fingerprint);
  return response;
}

v1::GenerateResponse chunk(std::uint32_t position, int count = 1) {
  v1::GenerateResponse response;
  response.mutable_chunk()->set_position(position);
  for (int index = 0; index < count; ++index) response.mutable_chunk()->add_token_ids(position);
  return response;
}

v1::GenerateResponse finished(std::uint32_t count) {
  v1::GenerateResponse response;
  response.mutable_finished()->set_prompt_token_count(3);
  response.mutable_finished()->set_completion_token_count(count);
  return response;
}

Transcript transcript_of(const std::vector<v1::GenerateResponse>& responses) {
  Transcript transcript{v1::GenerateRequest()};
  for (const auto& response : responses) transcript.add(response);
  return transcript;
}

TEST(Transcript, IsWholeAfterItsLastMessage) {
  const auto completion =
      transcript_of({started(), chunk(3, 2), chunk(5), finished(3)}).completion();
  EXPECT_EQ(completion.token_ids(), (std::vector<std::int64_t>{3, 3, 5}));
  EXPECT_EQ(completion.resumed_token_count, 0);
}

TEST(Transcript, IgnoresWhatItDoesNotKnow) {
  v1::GenerateResponse newer;
  ASSERT_TRUE(newer.ParseFromString("\xa2\x06\x01x"));  // field 100, of no version yet
  EXPECT_EQ(Transcript{v1::GenerateRequest()}.add(newer), std::nullopt);
}

TEST(Transcript, RefusesGapsDuplicatesAndTokensBeforeTheStart) {
  EXPECT_THROW(transcript_of({started(), chunk(4)}), InvariantViolatedError);
  EXPECT_THROW(transcript_of({started(), chunk(3), chunk(3)}), InvariantViolatedError);
  EXPECT_THROW(transcript_of({chunk(3)}), InvariantViolatedError);
}

TEST(Transcript, RefusesAnEndThatIsMissingOrInTheWrongPlace) {
  EXPECT_THROW(transcript_of({started(), chunk(3)}).completion(), InvariantViolatedError);
  EXPECT_THROW(transcript_of({started(), chunk(3), finished(2)}), InvariantViolatedError);
}

TEST(Transcript, AsksForWhatIsMissingWithTheSeedInUse) {
  const auto request = transcript_of({started(), chunk(3, 2), chunk(5)}).next_request();
  EXPECT_EQ(request.seed(), 7u);
  EXPECT_EQ(request.resume_token_ids_size(), 3);
  EXPECT_FALSE(transcript_of({}).next_request().has_seed());
}

TEST(Transcript, CountsTheTokensThatTheCallerHadAlready) {
  v1::GenerateRequest request;
  request.add_resume_token_ids(1);
  request.add_resume_token_ids(2);
  Transcript transcript(request);
  transcript.add(started());
  EXPECT_NO_THROW(transcript.add(chunk(5)));
}

TEST(Transcript, GoesOnWhereTheBrokenStreamEnded) {
  auto transcript = transcript_of({started(), chunk(3), chunk(4)});
  auto branch = transcript;
  branch.add(started());
  branch.add(chunk(5));
  branch.add(finished(3));
  EXPECT_EQ(branch.completion().resumed_token_count, 2);
  EXPECT_EQ(transcript.chunks().size(), 2u);
  EXPECT_THROW(transcript.add(chunk(6)), InvariantViolatedError);
}

TEST(Transcript, RefusesToGoOnWithAnotherModel) {
  auto transcript = transcript_of({started(), chunk(3)});
  EXPECT_THROW(transcript.add(started("model-b")), ModelMismatchError);
}

}  // namespace
}  // namespace paceline::detail
