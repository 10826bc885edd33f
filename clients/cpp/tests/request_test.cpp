#include "request.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "utf8.hpp"

namespace paceline::detail {
namespace {

TEST(Request, CarriesEveryOption) {
  GenerateOptions options;
  options.max_tokens = 1;
  options.stop = {"a", "ü"};
  options.temperature = 0.5;
  options.top_k = 2;
  options.top_p = 0.25;
  options.min_p = 0.125;
  options.seed = (std::int64_t{1} << 53) - 1;
  options.strategy = Strategy::Distributed;
  options.lookahead = 3;
  options.targets = 4;
  options.drafters = 5;
  options.width = 8;
  options.branches = 9;
  options.drafter = DrafterKind::MaxGram;
  options.rule = VerificationRule::Rejection;
  options.dispatch = DispatchPolicy::Blocks;
  options.ignore_eos = options.logprobs = true;
  options.top_logprobs = 10;
  options.prompt_logprobs = 0;
  options.include_token_bytes = options.include_prompt = true;
  options.predicted_text = "p";
  options.lora = "a";
  options.add_special_tokens = false;
  options.parse_special_tokens = true;
  options.include_timeline = options.stream_timeline = true;
  options.request_id = "r-1";
  options.resume_token_ids = {7, 4294967295};
  EXPECT_EQ(build_request(std::vector<std::int64_t>{8, 9}, options).ShortDebugString(),
            "token_ids { ids: 8 ids: 9 } add_special_tokens: false parse_special_tokens: true "
            "max_tokens: 1 stop_strings: \"a\" stop_strings: \"\\303\\274\" ignore_eos: true "
            "logprobs: true sampling { temperature: 0.5 top_k: 2 top_p: 0.25 min_p: 0.125 } "
            "seed: 9007199254740991 strategy: STRATEGY_DISTRIBUTED lookahead: 3 target_count: 4 "
            "drafter_count: 5 verification_rule: VERIFICATION_RULE_REJECTION "
            "dispatch_policy: DISPATCH_POLICY_BLOCKS resume_token_ids: 7 "
            "resume_token_ids: 4294967295 include_timeline: true stream_timeline: true "
            "request_id: \"r-1\" width: 8 branches: 9 drafter: DRAFTER_KIND_MAX_GRAM "
            "top_logprobs: 10 prompt_logprobs: 0 include_token_bytes: true include_prompt: true "
            "predicted_text: \"p\" lora: \"a\"");
}

TEST(Request, LeavesOutWhatIsNotSaid) {
  v1::GenerateRequest expected;
  expected.set_text("x");
  EXPECT_EQ(build_request("x", {}).SerializeAsString(), expected.SerializeAsString());
}

TEST(Request, KeepsAnEmptyListOfTokenIdsApartFromNoPrompt) {
  EXPECT_TRUE(build_request(std::vector<std::int64_t>{}, {}).has_token_ids());
}

TEST(Request, NamesTheOptionThatItsFieldCannotHold) {
  static constexpr std::int64_t kTooLarge = std::int64_t{1} << 32;
  const std::map<std::string, std::function<void(GenerateOptions&)>> spoilers{
      {"max_tokens", [](auto& it) { it.max_tokens = -1; }},
      {"top_k", [](auto& it) { it.top_k = kTooLarge; }},
      {"temperature", [](auto& it) { it.temperature = std::nan(""); }},
      {"top_p", [](auto& it) { it.top_p = std::numeric_limits<double>::infinity(); }},
      {"min_p", [](auto& it) { it.min_p = -std::numeric_limits<double>::infinity(); }},
      {"seed", [](auto& it) { it.seed = -1; }},
      {"lookahead", [](auto& it) { it.lookahead = -1; }},
      {"targets", [](auto& it) { it.targets = kTooLarge; }},
      {"drafters", [](auto& it) { it.drafters = -2; }},
      {"width", [](auto& it) { it.width = -1; }},
      {"branches", [](auto& it) { it.branches = kTooLarge; }},
      {"drafter", [](auto& it) { it.drafter = DrafterKind::Unknown; }},
      {"strategy", [](auto& it) { it.strategy = from_string<Strategy>("warp"); }},
      {"rule", [](auto& it) { it.rule = VerificationRule::Unknown; }},
      {"dispatch", [](auto& it) { it.dispatch = DispatchPolicy::Unknown; }},
      {"stop", [](auto& it) { it.stop = {"\xff"}; }},
      {"request_id", [](auto& it) { it.request_id = "\xc3"; }},
      {"resume_token_ids",
       [](auto& it) {
         it.resume_token_ids = {1, -1};
       }},
  };
  for (const auto& [option, spoil] : spoilers) {
    GenerateOptions options;
    spoil(options);
    try {
      build_request("x", options);
      ADD_FAILURE() << option << " was accepted";
    } catch (const InvalidFieldError& error) {
      EXPECT_EQ(error.violations().at(0).field, option);
    }
  }
}

TEST(Request, RefusesAPromptThatIsNoTextOrNoTokens) {
  EXPECT_THROW(build_request("\xed\xa0\x80", {}), InvalidFieldError);
  EXPECT_THROW(build_request(std::vector<std::int64_t>{-1}, {}), InvalidFieldError);
}

TEST(Utf8, AcceptsTheFirstAndLastCharacterOfEveryLength) {
  for (const auto* text :
       {"", "\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
        "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(is_utf8(text)) << text;
  }
  EXPECT_TRUE(is_utf8(std::string_view("\0", 1)));
}

TEST(Utf8, RefusesWhatIsCutOverlongASurrogateOrTooLarge) {
  for (const auto* text :
       {"\x80", "\xc1\xbf", "\xc3", "\xc3(", "\xe0\x9f\xbf", "\xe2\x82", "\xed\xa0\x80",
        "\xf0\x8f\xbf\xbf", "\xf0\x9f\x98", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {
    EXPECT_FALSE(is_utf8(text)) << text;
  }
}

}  // namespace
}  // namespace paceline::detail
