package paceline

import (
	"fmt"
	"strings"
	"time"

	pb "github.com/paceline/paceline/clients/go/paceline/v1"
)

// Reads the wire's messages into the client's data.

func readStarted(message *pb.GenerationStarted) *Started {
	return &Started{
		RequestID:        message.GetRequestId(),
		Seed:             message.GetSeed(),
		ModelFingerprint: message.GetModelFingerprint(),
		Strategy:         Strategy(word(pb.Strategy_name, int32(message.GetStrategy()))),
		Promise:          readRule(message.GetPromise()),
		PromptTokenCount: int(message.GetPromptTokenCount()),
		Lookahead:        int(message.GetLookahead()),
		TargetCount:      int(message.GetTargetCount()),
		PlanNote:         message.GetPlanNote(),
		Width:            int(message.GetWidth()),
		Branches:         int(message.GetBranches()),
	}
}

func readChunk(message *pb.GenerationChunk) Chunk {
	origins := make([]TokenOrigin, len(message.GetOrigins()))
	for index, origin := range message.GetOrigins() {
		origins[index] = TokenOrigin(word(pb.TokenOrigin_name, int32(origin)))
	}
	return Chunk{
		Position:    int(message.GetPosition()),
		TokenIDs:    message.GetTokenIds(),
		Text:        message.GetText(),
		Logprobs:    message.GetLogprobs(),
		TopLogprobs: readLikeliest(message.GetTopLogprobs()),
		Origins:     origins,
		TextLengths: message.GetTextLengths(),
		TokenBytes:  message.GetTokenBytes(),
	}
}

func readPromptChunk(message *pb.PromptChunk) PromptChunk {
	return PromptChunk{
		Position:    int(message.GetPosition()),
		TokenIDs:    message.GetTokenIds(),
		TokenBytes:  message.GetTokenBytes(),
		Logprobs:    message.GetLogprobs(),
		TopLogprobs: readLikeliest(message.GetTopLogprobs()),
	}
}

func readLikeliest(messages []*pb.LikeliestTokens) [][]TokenLogprob {
	places := make([][]TokenLogprob, len(messages))
	for place, message := range messages {
		for rank, logprob := range message.GetLogprobs() {
			if rank < len(message.GetTokenIds()) {
				told := TokenLogprob{TokenID: message.GetTokenIds()[rank], Logprob: logprob}
				if rank < len(message.GetTokenBytes()) {
					told.TokenBytes = message.GetTokenBytes()[rank]
				}
				places[place] = append(places[place], told)
			}
		}
	}
	return places
}

func readTimelineEvent(message *pb.TimelineEvent) TimelineEvent {
	return TimelineEvent{
		Kind:             TimelineEventKind(word(pb.TimelineEventKind_name, int32(message.GetKind()))),
		Server:           message.GetServer(),
		Start:            time.Duration(message.GetStartNs()),
		End:              time.Duration(message.GetEndNs()),
		Position:         int(message.GetPosition()),
		TokenIDs:         message.GetTokenIds(),
		CallID:           int(message.GetCallId()),
		SpeculationDepth: int(message.GetSpeculationDepth()),
		BranchTokenCount: int(message.GetBranchTokenCount()),
		IsBranch:         message.GetIsBranch(),
	}
}

func readFinished(message *pb.GenerationFinished) *Finished {
	timeline := make([]TimelineEvent, len(message.GetTimeline()))
	for index, event := range message.GetTimeline() {
		timeline[index] = readTimelineEvent(event)
	}
	return &Finished{
		FinishReason: FinishReason(word(pb.FinishReason_name, int32(message.GetFinishReason()))),
		StopString:   message.GetStopString(),
		Promise:      readRule(message.GetPromise()),
		Lookahead:    int(message.GetLookahead()),
		TargetsUsed:  int(message.GetTargetsUsed()),
		Usage: Usage{
			PromptTokenCount:       int(message.GetPromptTokenCount()),
			CompletionTokenCount:   int(message.GetCompletionTokenCount()),
			CachedPromptTokenCount: int(message.GetCachedPromptTokenCount()),
		},
		Statistics: readStatistics(message.GetStatistics()),
		Timeline:   timeline,
	}
}

func readStatistics(message *pb.GenerationStatistics) Statistics {
	fallbacks := make(map[string]int)
	for _, fallback := range message.GetFallbacks() {
		kind := wordOrNumber(pb.FallbackKind_name, int32(fallback.GetKind()), "fallback")
		fallbacks[kind] = int(fallback.GetCount())
	}
	models := make([]ModelForwards, len(message.GetDrafterModels()))
	for index, model := range message.GetDrafterModels() {
		models[index] = ModelForwards{
			ModelName:    model.GetModelName(),
			ForwardCount: int(model.GetForwardCount()),
			Forward:      time.Duration(model.GetForwardNs()),
		}
	}
	return Statistics{
		TargetForwardCount:          int(message.GetTargetForwardCount()),
		DrafterForwardCount:         int(message.GetDrafterForwardCount()),
		DraftedTokenCount:           int(message.GetDraftedTokenCount()),
		AcceptedTokenCount:          int(message.GetAcceptedTokenCount()),
		RejectedTokenCount:          int(message.GetRejectedTokenCount()),
		DiscardedTokenCount:         int(message.GetDiscardedTokenCount()),
		AcceptanceRate:              message.GetAcceptanceRate(),
		CancelledRPCCount:           int(message.GetCancelledRpcCount()),
		Fallbacks:                   fallbacks,
		Queue:                       time.Duration(message.GetQueueNs()),
		Forward:                     time.Duration(message.GetForwardNs()),
		Network:                     time.Duration(message.GetNetworkNs()),
		TimeToFirstToken:            time.Duration(message.GetTimeToFirstTokenNs()),
		Total:                       time.Duration(message.GetTotalNs()),
		CorrectionsAheadCount:       int(message.GetCorrectionsAheadCount()),
		BranchTokenCount:            int(message.GetBranchTokenCount()),
		BranchAcceptedCount:         int(message.GetBranchAcceptedCount()),
		MaxGramDraftedTokenCount:    int(message.GetMaxGramDraftedTokenCount()),
		MaxGramAcceptedTokenCount:   int(message.GetMaxGramAcceptedTokenCount()),
		DrafterModels:               models,
		WalltimeImprovement:         message.GetWalltimeImprovement(),
		PredictedTokenCount:         int(message.GetPredictedTokenCount()),
		PredictedAcceptedTokenCount: int(message.GetPredictedAcceptedTokenCount()),
		ForcedDraftedTokenCount:     int(message.GetForcedDraftedTokenCount()),
		ForcedAcceptedTokenCount:    int(message.GetForcedAcceptedTokenCount()),
	}
}

func readSystemInfo(message *pb.GetSystemInfoResponse) *SystemInfo {
	servers := make([]ServerInfo, len(message.GetServers()))
	for index, server := range message.GetServers() {
		servers[index] = ServerInfo{
			Name:             server.GetName(),
			Address:          server.GetAddress(),
			Role:             wordOrNumber(pb.ModelRole_name, int32(server.GetRole()), "role"),
			Ready:            server.GetReady(),
			Status:           server.GetStatus(),
			ModelFingerprint: server.GetModelFingerprint(),
			DecodeStep:       time.Duration(server.GetDecodeStepNs()),
			SelfDraftKind:    server.GetSelfDraftKind(),
			IsInvariant:      server.GetIsInvariant(),
			Standing:         readStanding(server.GetStanding()),
			StandingDetail:   server.GetStandingDetail(),
		}
	}
	return &SystemInfo{
		Version:              message.GetVersion(),
		ModelName:            message.GetModelName(),
		ModelFingerprint:     message.GetModelFingerprint(),
		TokenizerFingerprint: message.GetTokenizerFingerprint(),
		VocabularySize:       int(message.GetVocabularySize()),
		ContextLength:        int(message.GetContextLength()),
		Servers:              servers,
		RunningRequestCount:  int(message.GetRunningRequestCount()),
	}
}

// readStanding names a server's standing; empty if an older orchestrator does not send it.
func readStanding(number pb.ServerStanding) string {
	if number == 0 {
		return ""
	}
	return wordOrNumber(pb.ServerStanding_name, int32(number), "standing")
}

func readRule(number pb.VerificationRule) VerificationRule {
	return VerificationRule(word(pb.VerificationRule_name, int32(number)))
}

// word finds the word for a number of the wire; unknown if this client has none.
func word(names map[int32]string, number int32) string {
	name, found := names[number]
	if !found || number == 0 {
		return unknown
	}
	return strings.ToLower(strings.TrimPrefix(name, prefixOf(names)))
}

// wordOrNumber finds the word for a number of the wire; "role 12" if this client has none.
func wordOrNumber(names map[int32]string, number int32, noun string) string {
	if found := word(names, number); found != unknown {
		return found
	}
	return fmt.Sprintf("%s %d", noun, number)
}

// numberOf finds the number that the wire has for a word.
func numberOf(names map[int32]string, wanted string) (int32, bool) {
	for number := range names {
		if number != 0 && word(names, number) == wanted {
			return number, true
		}
	}
	return 0, false
}

// wordsOf lists an enum's words in the wire's order.
func wordsOf(names map[int32]string) []string {
	var words []string
	for number := int32(1); int(number) < len(names); number++ {
		words = append(words, word(names, number))
	}
	return words
}

// prefixOf is the common prefix of an enum's names, such as STRATEGY_.
func prefixOf(names map[int32]string) string {
	return strings.TrimSuffix(names[0], "UNSPECIFIED")
}
