package paceline

import (
	"math"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/paceline/paceline/clients/go/paceline/v1"
)

func TestEveryOptionReachesTheRequest(t *testing.T) {
	g, err := newGeneration(Text("x"), []GenerateOption{
		WithMaxTokens(1), WithStop("a", "b"), WithTemperature(0.5), WithTopK(2), WithTopP(0.75), WithMinP(0.25),
		WithSeed(math.MaxUint64), WithStrategy(StrategyDistributed), WithLookahead(3), WithTargets(4),
		WithDrafters(5), WithWidth(8), WithBranches(9), WithDrafter(DrafterMaxGram), WithRule(RuleRejection), WithDispatch(DispatchBlocks), WithIgnoreEOS(true),
		WithLogprobs(true), WithTopLogprobs(10), WithPromptLogprobs(0), WithTokenBytes(true), WithPromptTokens(true), WithPredictedText("p"), WithLora("a"), WithAddSpecialTokens(false), WithParseSpecialTokens(true), WithIncludeTimeline(true),
		WithStreamTimeline(true), WithRequestID("r"), WithResumeTokenIDs([]uint32{6}), WithResumeAttempts(7),
	})
	if err != nil {
		t.Fatal(err)
	}
	want := &pb.GenerateRequest{
		Prompt:      &pb.GenerateRequest_Text{Text: "x"},
		MaxTokens:   proto.Uint32(1),
		StopStrings: []string{"a", "b"},
		Sampling: &pb.SamplingParameters{
			Temperature: proto.Float64(0.5),
			TopK:        proto.Uint32(2),
			TopP:        proto.Float64(0.75),
			MinP:        proto.Float64(0.25),
		},
		Seed:               proto.Uint64(math.MaxUint64),
		Strategy:           pb.Strategy_STRATEGY_DISTRIBUTED,
		Lookahead:          proto.Uint32(3),
		TargetCount:        proto.Uint32(4),
		DrafterCount:       proto.Uint32(5),
		Width:              proto.Uint32(8),
		Branches:           proto.Uint32(9),
		Drafter:            pb.DrafterKind_DRAFTER_KIND_MAX_GRAM,
		VerificationRule:   pb.VerificationRule_VERIFICATION_RULE_REJECTION,
		DispatchPolicy:     pb.DispatchPolicy_DISPATCH_POLICY_BLOCKS,
		IgnoreEos:          true,
		Logprobs:           true,
		TopLogprobs:        10,
		PromptLogprobs:     proto.Uint32(0),
		IncludeTokenBytes:  true,
		IncludePrompt:      true,
		PredictedText:      "p",
		Lora:               "a",
		AddSpecialTokens:   proto.Bool(false),
		ParseSpecialTokens: proto.Bool(true),
		IncludeTimeline:    true,
		StreamTimeline:     true,
		RequestId:          "r",
		ResumeTokenIds:     []uint32{6},
	}
	if !proto.Equal(g.request, want) || g.resumeAttempts != 7 {
		t.Fatalf("the request is %v", g.request)
	}
}

func TestWhatIsLeftOutIsNotSent(t *testing.T) {
	g, err := newGeneration(TokenIDs{1, 2}, nil)
	if err != nil {
		t.Fatal(err)
	}
	tokens := &pb.GenerateRequest_TokenIds{TokenIds: &pb.TokenIds{Ids: []uint32{1, 2}}}
	if !proto.Equal(g.request, &pb.GenerateRequest{Prompt: tokens}) {
		t.Fatalf("the request is %v", g.request)
	}
}

func TestZeroIsSentWhereItIsSaid(t *testing.T) {
	g, err := newGeneration(Text("x"), []GenerateOption{WithMaxTokens(0), WithSeed(0), WithTemperature(0)})
	if err != nil {
		t.Fatal(err)
	}
	if g.request.MaxTokens == nil || g.request.Seed == nil || g.request.Sampling.Temperature == nil {
		t.Fatalf("the request is %v", g.request)
	}
}

func TestAValueThatCannotBeSentNamesItsOption(t *testing.T) {
	for field, option := range map[string]GenerateOption{
		"max_tokens":      WithMaxTokens(-1),
		"top_k":           WithTopK(-1),
		"lookahead":       WithLookahead(math.MaxInt64),
		"targets":         WithTargets(-1),
		"drafters":        WithDrafters(-1),
		"temperature":     WithTemperature(math.NaN()),
		"top_p":           WithTopP(math.Inf(1)),
		"min_p":           WithMinP(math.Inf(-1)),
		"no_such_p":       WithSampling("no_such_p", 1),
		"min_tokens":      WithSampling("min_tokens", 1),
		"logit_bias":      WithSampling("logit_bias", 1),
		"strategy":        WithStrategy("fastest"),
		"rule":            WithRule(RuleUnknown),
		"dispatch":        WithDispatch(""),
		"stop":            WithStop("fine", "\xff"),
		"request_id":      WithRequestID("\xff"),
		"resume_attempts": WithResumeAttempts(-1),
	} {
		_, err := newGeneration(Text("x"), []GenerateOption{option})
		wantViolation(t, err, field)
	}
	_, err := newGeneration(Text("\xff"), nil)
	wantViolation(t, err, "text")
	_, err = newGeneration(nil, nil)
	wantViolation(t, err, "prompt")
}

func TestEveryWordOfTheWireHasAConstant(t *testing.T) {
	for _, enum := range []struct {
		names map[int32]string
		words []string
	}{
		{pb.Strategy_name, []string{string(StrategyAuto), string(StrategyAutoregressive), string(StrategySpeculative), string(StrategyDistributed), string(StrategySelfSpeculative)}},
		{pb.VerificationRule_name, []string{string(RuleExact), string(RuleRejection)}},
		{pb.DrafterKind_name, []string{string(DrafterServer), string(DrafterMaxGram), string(DrafterServerAndMaxGram)}},
		{pb.DispatchPolicy_name, []string{string(DispatchWorkConserving), string(DispatchBlocks)}},
		{pb.FinishReason_name, []string{string(FinishLength), string(FinishEOS), string(FinishStopString)}},
		{pb.TokenOrigin_name, []string{string(OriginAcceptedDraft), string(OriginTarget)}},
		{pb.TimelineEventKind_name, []string{string(EventDrafted), string(EventVerifying), string(EventAccepted), string(EventCorrected), string(EventDiscarded), string(EventCancelled)}},
	} {
		for _, word := range enum.words {
			if _, found := numberOf(enum.names, word); !found {
				t.Errorf("the wire has no %q", word)
			}
		}
		if len(enum.words) != len(enum.names)-1 {
			t.Errorf("the wire has more words than %v", enum.words)
		}
	}
}
