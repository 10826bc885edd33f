#include "call_metadata.hpp"

#include <gtest/gtest.h>

#include <stdexcept>

namespace paceline::detail {
namespace {

TEST(CallMetadata, HasTheClientsAndTheCallsAndTheToken) {
  const CallMetadata along(Metadata{{"X-Tenant", "blue"}}, [] { return std::string("t"); });
  const MetadataPairs expected{
      {"x-tenant", "blue"}, {"x-b-bin", {"\0\xff", 2}}, {"authorization", "Bearer t"}};
  EXPECT_EQ(along.pairs({{"x-b-bin", {"\0\xff", 2}}}), expected);
}

TEST(CallMetadata, AsksAnewForEachCall) {
  int count = 0;
  const CallMetadata along([&] { return Metadata{{"n", std::to_string(++count)}}; }, nullptr);
  EXPECT_EQ(along.pairs({}), (MetadataPairs{{"n", "1"}}));
  EXPECT_EQ(along.pairs({}), (MetadataPairs{{"n", "2"}}));
}

TEST(CallMetadata, MayBeNothing) {
  EXPECT_TRUE(CallMetadata(Metadata{}, nullptr).pairs({}).empty());
  EXPECT_TRUE(CallMetadata(std::function<Metadata()>(), nullptr).pairs({}).empty());
}

TEST(CallMetadata, ThrowsWhatTheTokenThrows) {
  const CallMetadata along(Metadata{},
                           []() -> std::string { throw std::domain_error("no token"); });
  EXPECT_THROW(along.pairs({}), std::domain_error);
}

TEST(CallMetadata, NamesWhatCannotBeSentAndNeverShowsAValue) {
  const std::vector<Metadata> bad{{{"", "x"}},          {{"a b", "x"}},         {{"grpc-x", "x"}},
                                  {{"GRPC-X", "x"}},    {{"\u00fc", "x"}},      {{"a", "se\ncret"}},
                                  {{"a", "secret\xc3"}}, {{"a", "secret\x7f"}}};
  for (const auto& metadata : bad) {
    try {
      CallMetadata(metadata, nullptr);
      ADD_FAILURE() << "accepted";
    } catch (const InvalidFieldError& error) {
      EXPECT_EQ(error.violations().at(0).field, "metadata");
      EXPECT_EQ(std::string(error.what()).find("cret"), std::string::npos);
    }
  }
}

TEST(CallMetadata, RefusesATokenWithASpaceOrNone) {
  for (const auto* token : {"", "se cret", "se\ncret"}) {
    const CallMetadata along(Metadata{}, [token] { return std::string(token); });
    EXPECT_THROW(along.pairs({}), InvalidFieldError);
  }
}

}  // namespace
}  // namespace paceline::detail
