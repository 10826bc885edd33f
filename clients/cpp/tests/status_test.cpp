#include "status.hpp"

#include <google/protobuf/any.pb.h>
#include <gtest/gtest.h>

#include "paceline/client/status_details.pb.h"
#include "paceline/v1/error_reason.pb.h"

namespace paceline::detail {
namespace {

constexpr int kInvalidArgument = 3;
constexpr int kInternal = 13;
constexpr int kUnavailable = 14;

template <class Message>
void pack(const std::string& type, const Message& message, client::Status& status) {
  auto& any = *status.add_details();
  any.set_type_url("type.googleapis.com/" + type);
  any.set_value(message.SerializeAsString());
}

std::string details_with(const std::string& reason, const std::string& domain = "paceline") {
  client::Status status;
  client::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain(domain);
  pack("google.rpc.ErrorInfo", info, status);
  return status.SerializeAsString();
}

TEST(Status, GivesEveryReasonAClassOfItsOwn) {
  const auto& reasons = *v1::ErrorReason_descriptor();
  const std::string prefix = "ERROR_REASON_";
  for (int index = 1; index < reasons.value_count(); ++index) {  // 0 is never sent
    const auto reason = std::string(reasons.value(index)->name()).substr(prefix.size());
    EXPECT_EQ(decode(kInternal, "", details_with(reason))->kind().reason, reason);
  }
}

TEST(Status, IsRaisedAsTheClassAndAsWhatItDerivesFrom) {
  const auto error = decode(kInvalidArgument, "", details_with("CONTEXT_LENGTH_EXCEEDED"));
  EXPECT_THROW(error->raise(), ContextLengthExceededError);
  EXPECT_THROW(error->raise(), InvalidFieldError);
  EXPECT_THROW(decode(kUnavailable, "", details_with("LOADING"))->raise(), TryAgainError);
}

TEST(Status, CarriesMessageMetadataViolationsAndRetryDelay) {
  client::Status status;
  status.set_message("the server's words");
  client::ErrorInfo info;
  info.set_reason("INVALID_FIELD");
  info.set_domain("paceline");
  (*info.mutable_metadata())["limit"] = "64";
  client::BadRequest bad_request;
  auto& violation = *bad_request.add_field_violations();
  violation.set_field("lookahead");
  violation.set_description("must be at most 64");
  client::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(1);
  retry.mutable_retry_delay()->set_nanos(500'000'000);
  pack("google.rpc.ErrorInfo", info, status);
  pack("google.rpc.BadRequest", bad_request, status);
  pack("google.rpc.RetryInfo", retry, status);
  const auto error = decode(kInvalidArgument, "the transport's", status.SerializeAsString());
  EXPECT_STREQ(error->what(), "the server's words");
  EXPECT_EQ(error->metadata().at("limit"), "64");
  EXPECT_EQ(error->violations().at(0).field, "lookahead");
  EXPECT_EQ(error->violations().at(0).description, "must be at most 64");
  EXPECT_EQ(error->retry_after(), Seconds(1.5));
}

TEST(Status, LeavesTheClassToTheCodeWhereThereIsNoReasonOfOurs) {
  for (const auto& details : {std::string(), std::string("\xff garbage"),
                              details_with("LOADING", "googleapis.com"), details_with("NEWER")}) {
    EXPECT_EQ(decode(kUnavailable, "m", details)->kind().name, "ConnectionLostError");
    EXPECT_EQ(decode(kInternal, "m", details)->kind().name, "InternalError");
  }
}

TEST(Status, HasAClassForEveryCode) {
  const std::map<int, std::string_view> special{
      {1, "DrainingError"},         {3, "InvalidFieldError"},      {4, "DeadlineError"},
      {7, "PermissionDeniedError"}, {8, "InvalidFieldError"},      {12, "UnsupportedError"},
      {14, "ConnectionLostError"},  {16, "UnauthenticatedError"},
  };
  for (int code = 1; code < 30; ++code) {
    const auto found = special.find(code);
    const auto expected = found == special.end() ? "InternalError" : found->second;
    EXPECT_EQ(decode(code, "", "")->kind().name, expected) << code;
  }
  EXPECT_STREQ(decode(kUnavailable, "", "")->what(), "UNAVAILABLE");
}

TEST(Status, SurvivesDetailsThatAreNotWhatTheySay) {
  client::Status status;
  auto& any = *status.add_details();
  any.set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  any.set_value("\xff\xff");
  EXPECT_EQ(decode(kUnavailable, "m", status.SerializeAsString())->kind().name,
            "ConnectionLostError");
}

}  // namespace
}  // namespace paceline::detail
