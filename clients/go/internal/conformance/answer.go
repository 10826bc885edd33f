package main

import (
	"encoding/json"
	"errors"
	"strings"
	"time"

	paceline "github.com/paceline/paceline/clients/go"
)

// An answer is one line of the output.
type answer struct {
	Case json.RawMessage `json:"case"`
	report
	Events            []eventReport `json:"events"`
	Cancelled         bool          `json:"cancelled"`
	Resumed           *report       `json:"resumed"`
	System            *systemReport `json:"system"`
	FirstChunkSeconds *float64      `json:"first_chunk_seconds"`
	ElapsedSeconds    float64       `json:"elapsed_seconds"`
}

// A report has the received data of one stream.
type report struct {
	Chunks       []chunkReport       `json:"chunks"`
	Text         string              `json:"text"`
	PromptChunks []promptChunkReport `json:"prompt_chunks"`
	Started      *startedReport      `json:"started"`
	Finished     *finishedReport     `json:"finished"`
	Error        *errorReport        `json:"error"`
}

type promptChunkReport struct {
	Position    int               `json:"position"`
	TokenIDs    []uint32          `json:"token_ids"`
	Logprobs    []float64         `json:"logprobs"`
	TopLogprobs [][]logprobReport `json:"top_logprobs"`
}

type chunkReport struct {
	Position    int               `json:"position"`
	TokenIDs    []uint32          `json:"token_ids"`
	Text        string            `json:"text"`
	Logprobs    []float64         `json:"logprobs"`
	TopLogprobs [][]logprobReport `json:"top_logprobs"`
	Origins     []string          `json:"origins"`
}

type logprobReport struct {
	TokenID uint32  `json:"token_id"`
	Logprob float64 `json:"logprob"`
}

type eventReport struct {
	Kind             string   `json:"kind"`
	Server           string   `json:"server"`
	StartNs          int64    `json:"start_ns"`
	EndNs            int64    `json:"end_ns"`
	Position         int      `json:"position"`
	TokenIDs         []uint32 `json:"token_ids"`
	CallID           int      `json:"call_id"`
	SpeculationDepth int      `json:"speculation_depth"`
	BranchTokenCount int      `json:"branch_token_count"`
	IsBranch         bool     `json:"is_branch"`
}

type startedReport struct {
	RequestID        string `json:"request_id"`
	Seed             uint64 `json:"seed"`
	ModelFingerprint string `json:"model_fingerprint"`
	Strategy         string `json:"strategy"`
	Promise          string `json:"promise"`
	PromptTokenCount int    `json:"prompt_token_count"`
	Lookahead        int    `json:"lookahead"`
	TargetCount      int    `json:"target_count"`
	PlanNote         string `json:"plan_note"`
	Width            int    `json:"width"`
	Branches         int    `json:"branches"`
}

type finishedReport struct {
	FinishReason   string           `json:"finish_reason"`
	StopString     string           `json:"stop_string"`
	Promise        string           `json:"promise"`
	Lookahead      int              `json:"lookahead"`
	TargetsUsed    int              `json:"targets_used"`
	Usage          usageReport      `json:"usage"`
	Statistics     statisticsReport `json:"statistics"`
	TimelineLength int              `json:"timeline_length"`
}

type usageReport struct {
	PromptTokenCount       int `json:"prompt_token_count"`
	CompletionTokenCount   int `json:"completion_token_count"`
	CachedPromptTokenCount int `json:"cached_prompt_token_count"`
}

type statisticsReport struct {
	TargetForwardCount          int            `json:"target_forward_count"`
	DrafterForwardCount         int            `json:"drafter_forward_count"`
	DraftedTokenCount           int            `json:"drafted_token_count"`
	AcceptedTokenCount          int            `json:"accepted_token_count"`
	RejectedTokenCount          int            `json:"rejected_token_count"`
	DiscardedTokenCount         int            `json:"discarded_token_count"`
	AcceptanceRate              float64        `json:"acceptance_rate"`
	CancelledRPCCount           int            `json:"cancelled_rpc_count"`
	Fallbacks                   map[string]int `json:"fallbacks"`
	QueueNs                     int64          `json:"queue_ns"`
	ForwardNs                   int64          `json:"forward_ns"`
	NetworkNs                   int64          `json:"network_ns"`
	TimeToFirstTokenNs          int64          `json:"time_to_first_token_ns"`
	TotalNs                     int64          `json:"total_ns"`
	CorrectionsAheadCount       int            `json:"corrections_ahead_count"`
	BranchTokenCount            int            `json:"branch_token_count"`
	BranchAcceptedCount         int            `json:"branch_accepted_count"`
	MaxGramDraftedTokenCount    int            `json:"max_gram_drafted_token_count"`
	MaxGramAcceptedTokenCount   int            `json:"max_gram_accepted_token_count"`
	DrafterModels               []modelReport  `json:"drafter_models"`
	WalltimeImprovement         float64        `json:"walltime_improvement"`
	PredictedTokenCount         int            `json:"predicted_token_count"`
	PredictedAcceptedTokenCount int            `json:"predicted_accepted_token_count"`
	ForcedDraftedTokenCount     int            `json:"forced_drafted_token_count"`
	ForcedAcceptedTokenCount    int            `json:"forced_accepted_token_count"`
}

type modelReport struct {
	ModelName    string `json:"model_name"`
	ForwardCount int    `json:"forward_count"`
	ForwardNs    int64  `json:"forward_ns"`
}

type errorReport struct {
	Kind              string            `json:"kind"`
	Code              string            `json:"code"`
	Reason            string            `json:"reason"`
	Message           string            `json:"message"`
	Metadata          map[string]string `json:"metadata"`
	Violations        []violationReport `json:"violations"`
	RetryAfterSeconds *float64          `json:"retry_after_seconds"`
}

type violationReport struct {
	Field       string `json:"field"`
	Description string `json:"description"`
}

type systemReport struct {
	Version              string         `json:"version"`
	ModelName            string         `json:"model_name"`
	ModelFingerprint     string         `json:"model_fingerprint"`
	TokenizerFingerprint string         `json:"tokenizer_fingerprint"`
	VocabularySize       int            `json:"vocabulary_size"`
	ContextLength        int            `json:"context_length"`
	Servers              []serverReport `json:"servers"`
	RunningRequestCount  int            `json:"running_request_count"`
}

type serverReport struct {
	Name             string `json:"name"`
	Address          string `json:"address"`
	Role             string `json:"role"`
	Ready            bool   `json:"ready"`
	Status           string `json:"status"`
	ModelFingerprint string `json:"model_fingerprint"`
	DecodeStepNs     int64  `json:"decode_step_ns"`
	SelfDraftKind    string `json:"self_draft_kind"`
	IsInvariant      bool   `json:"is_invariant"`
	Standing         string `json:"standing"`
	StandingDetail   string `json:"standing_detail"`
}

func newReport() report {
	return report{Chunks: []chunkReport{}, PromptChunks: []promptChunkReport{}}
}

// add takes in what the stream moved to.
func (a *answer) add(event paceline.Event, after time.Duration) {
	switch event := event.(type) {
	case paceline.TimelineEvent:
		a.Events = append(a.Events, reportEvent(event))
	case paceline.Chunk:
		if a.FirstChunkSeconds == nil {
			first := after.Seconds()
			a.FirstChunkSeconds = &first
		}
		a.Chunks = append(a.Chunks, reportChunk(event))
		a.Text += event.Text
	}
}

// end notes how the stream ended. A requested cancellation is not an error.
func (a *answer) end(stream *paceline.Stream, cancelling bool) {
	for _, chunk := range stream.PromptChunks() {
		a.PromptChunks = append(a.PromptChunks, promptChunkReport{
			Position:    chunk.Position,
			TokenIDs:    append([]uint32{}, chunk.TokenIDs...),
			Logprobs:    append([]float64{}, chunk.Logprobs...),
			TopLogprobs: reportLikeliest(chunk.TopLogprobs),
		})
	}
	a.Started, a.Finished = reportStarted(stream.Started()), reportFinished(stream.Finished())
	if cancelling && errors.Is(stream.Err(), paceline.ErrClientCancelled) {
		a.Cancelled = true
	} else {
		a.Error = reportError(stream.Err())
	}
}

// enum is a word as the wire has it, without its prefix.
func enum[T ~string](word T) string { return strings.ToUpper(string(word)) }

func reportChunk(chunk paceline.Chunk) chunkReport {
	origins := []string{}
	for _, origin := range chunk.Origins {
		origins = append(origins, enum(origin))
	}
	return chunkReport{
		Position:    chunk.Position,
		TokenIDs:    append([]uint32{}, chunk.TokenIDs...),
		Text:        chunk.Text,
		Logprobs:    append([]float64{}, chunk.Logprobs...),
		TopLogprobs: reportLikeliest(chunk.TopLogprobs),
		Origins:     origins,
	}
}

func reportLikeliest(told [][]paceline.TokenLogprob) [][]logprobReport {
	places := [][]logprobReport{}
	for _, likeliest := range told {
		place := []logprobReport{}
		for _, each := range likeliest {
			place = append(place, logprobReport{each.TokenID, each.Logprob})
		}
		places = append(places, place)
	}
	return places
}

func reportEvent(event paceline.TimelineEvent) eventReport {
	return eventReport{
		Kind:             enum(event.Kind),
		Server:           event.Server,
		StartNs:          event.Start.Nanoseconds(),
		EndNs:            event.End.Nanoseconds(),
		Position:         event.Position,
		TokenIDs:         append([]uint32{}, event.TokenIDs...),
		CallID:           event.CallID,
		SpeculationDepth: event.SpeculationDepth,
		BranchTokenCount: event.BranchTokenCount,
		IsBranch:         event.IsBranch,
	}
}

func reportStarted(started *paceline.Started) *startedReport {
	if started == nil {
		return nil
	}
	return &startedReport{
		RequestID:        started.RequestID,
		Seed:             started.Seed,
		ModelFingerprint: started.ModelFingerprint,
		Strategy:         enum(started.Strategy),
		Promise:          enum(started.Promise),
		PromptTokenCount: started.PromptTokenCount,
		Lookahead:        started.Lookahead,
		TargetCount:      started.TargetCount,
		PlanNote:         started.PlanNote,
		Width:            started.Width,
		Branches:         started.Branches,
	}
}

func reportFinished(finished *paceline.Finished) *finishedReport {
	if finished == nil {
		return nil
	}
	return &finishedReport{
		FinishReason:   enum(finished.FinishReason),
		StopString:     finished.StopString,
		Promise:        enum(finished.Promise),
		Lookahead:      finished.Lookahead,
		TargetsUsed:    finished.TargetsUsed,
		Usage:          usageReport(finished.Usage),
		Statistics:     reportStatistics(finished.Statistics),
		TimelineLength: len(finished.Timeline),
	}
}

func reportStatistics(statistics paceline.Statistics) statisticsReport {
	models := make([]modelReport, len(statistics.DrafterModels))
	for index, model := range statistics.DrafterModels {
		models[index] = modelReport{model.ModelName, model.ForwardCount, model.Forward.Nanoseconds()}
	}
	return statisticsReport{
		TargetForwardCount:          statistics.TargetForwardCount,
		DrafterForwardCount:         statistics.DrafterForwardCount,
		DraftedTokenCount:           statistics.DraftedTokenCount,
		AcceptedTokenCount:          statistics.AcceptedTokenCount,
		RejectedTokenCount:          statistics.RejectedTokenCount,
		DiscardedTokenCount:         statistics.DiscardedTokenCount,
		AcceptanceRate:              statistics.AcceptanceRate,
		CancelledRPCCount:           statistics.CancelledRPCCount,
		Fallbacks:                   statistics.Fallbacks,
		QueueNs:                     statistics.Queue.Nanoseconds(),
		ForwardNs:                   statistics.Forward.Nanoseconds(),
		NetworkNs:                   statistics.Network.Nanoseconds(),
		TimeToFirstTokenNs:          statistics.TimeToFirstToken.Nanoseconds(),
		TotalNs:                     statistics.Total.Nanoseconds(),
		CorrectionsAheadCount:       statistics.CorrectionsAheadCount,
		BranchTokenCount:            statistics.BranchTokenCount,
		BranchAcceptedCount:         statistics.BranchAcceptedCount,
		MaxGramDraftedTokenCount:    statistics.MaxGramDraftedTokenCount,
		MaxGramAcceptedTokenCount:   statistics.MaxGramAcceptedTokenCount,
		DrafterModels:               models,
		WalltimeImprovement:         statistics.WalltimeImprovement,
		PredictedTokenCount:         statistics.PredictedTokenCount,
		PredictedAcceptedTokenCount: statistics.PredictedAcceptedTokenCount,
		ForcedDraftedTokenCount:     statistics.ForcedDraftedTokenCount,
		ForcedAcceptedTokenCount:    statistics.ForcedAcceptedTokenCount,
	}
}

func reportError(err error) *errorReport {
	var failure *paceline.Error
	if !errors.As(err, &failure) {
		return nil
	}
	told := &errorReport{
		Kind:       string(failure.Kind),
		Code:       wireName(failure.Code().String()),
		Reason:     failure.Reason(),
		Message:    failure.Message,
		Metadata:   map[string]string{},
		Violations: []violationReport{},
	}
	for key, value := range failure.Metadata {
		told.Metadata[key] = value
	}
	for _, violation := range failure.Violations {
		told.Violations = append(told.Violations, violationReport(violation))
	}
	if failure.RetryAfter > 0 {
		after := failure.RetryAfter.Seconds()
		told.RetryAfterSeconds = &after
	}
	return told
}

// wireName turns Go's name of a code into the wire's: DataLoss into DATA_LOSS, Canceled into CANCELLED.
func wireName(code string) string {
	if code == "Canceled" {
		return "CANCELLED"
	}
	var name strings.Builder
	for index, letter := range code {
		if index > 0 && 'A' <= letter && letter <= 'Z' {
			name.WriteByte('_')
		}
		name.WriteRune(letter)
	}
	return strings.ToUpper(name.String())
}

func reportSystem(info *paceline.SystemInfo) *systemReport {
	servers := []serverReport{}
	for _, server := range info.Servers {
		servers = append(servers, serverReport{
			Name:             server.Name,
			Address:          server.Address,
			Role:             server.Role,
			Ready:            server.Ready,
			Status:           server.Status,
			ModelFingerprint: server.ModelFingerprint,
			DecodeStepNs:     server.DecodeStep.Nanoseconds(),
			SelfDraftKind:    server.SelfDraftKind,
			IsInvariant:      server.IsInvariant,
			Standing:         server.Standing,
			StandingDetail:   server.StandingDetail,
		})
	}
	return &systemReport{
		Version:              info.Version,
		ModelName:            info.ModelName,
		ModelFingerprint:     info.ModelFingerprint,
		TokenizerFingerprint: info.TokenizerFingerprint,
		VocabularySize:       info.VocabularySize,
		ContextLength:        info.ContextLength,
		Servers:              servers,
		RunningRequestCount:  info.RunningRequestCount,
	}
}
