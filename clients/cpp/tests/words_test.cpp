#include "paceline/words.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <string>

#include "paceline/v1/orchestrator_service.pb.h"

namespace paceline {
namespace {

// "DISPATCH_POLICY_BLOCKS" is "blocks" where the first value is DISPATCH_POLICY_UNSPECIFIED.
std::string word_of(const google::protobuf::EnumDescriptor& wire, int number) {
  const auto prefix = std::string(wire.value(0)->name()).size() - std::string("UNSPECIFIED").size();
  auto word = std::string(wire.FindValueByNumber(number)->name()).substr(prefix);
  std::transform(word.begin(), word.end(), word.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return word;
}

template <class Enum>
void expect_words_of(const google::protobuf::EnumDescriptor& wire) {
  ASSERT_EQ(static_cast<int>(detail::words<Enum>.size()), wire.value_count());
  for (int number = 1; number < wire.value_count(); ++number) {
    EXPECT_EQ(to_string(static_cast<Enum>(number)), word_of(wire, number));
    EXPECT_EQ(from_string<Enum>(word_of(wire, number)), static_cast<Enum>(number));
  }
}

TEST(Words, AreTheWiresInTheirOrder) {
  expect_words_of<Strategy>(*v1::Strategy_descriptor());
  expect_words_of<VerificationRule>(*v1::VerificationRule_descriptor());
  expect_words_of<DrafterKind>(*v1::DrafterKind_descriptor());
  expect_words_of<DispatchPolicy>(*v1::DispatchPolicy_descriptor());
  expect_words_of<FinishReason>(*v1::FinishReason_descriptor());
  expect_words_of<TokenOrigin>(*v1::TokenOrigin_descriptor());
  expect_words_of<TimelineEventKind>(*v1::TimelineEventKind_descriptor());
}

TEST(Words, AreUnknownWhereThereIsNone) {
  EXPECT_EQ(from_string<Strategy>("warp"), Strategy::Unknown);
}

}  // namespace
}  // namespace paceline
