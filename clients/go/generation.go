package paceline

import (
	"strings"
	"time"
)

// A generation's messages as plain data, without protobuf. Names and meanings are those of
// orchestrator_service.proto. Positions are absolute: they count the prompt.

// Unknown, in each word type below, is a value of a newer server that this client does not know.
const unknown = "unknown"

// A Strategy is how a request is decoded. The output is the same with every strategy.
type Strategy string

// The strategies.
const (
	StrategyAuto            Strategy = "auto"
	StrategyAutoregressive  Strategy = "autoregressive"
	StrategySpeculative     Strategy = "speculative"
	StrategyDistributed     Strategy = "distributed"
	StrategySelfSpeculative Strategy = "self_speculative"
	StrategyUnknown         Strategy = unknown
)

// A VerificationRule decides how draft tokens are accepted, and so the promise about the output: RuleExact
// the target's own tokens for the seed, RuleRejection the target's distribution.
type VerificationRule string

// The rules.
const (
	RuleExact     VerificationRule = "exact"
	RuleRejection VerificationRule = "rejection"
	RuleUnknown   VerificationRule = unknown
)

// A DrafterKind is the drafter, for strategies that need one.
type DrafterKind string

// The kinds of drafters.
const (
	DrafterServer           DrafterKind = "server"
	DrafterMaxGram          DrafterKind = "max_gram"
	DrafterServerAndMaxGram DrafterKind = "server_and_max_gram"
)

// A DispatchPolicy is when draft tokens are sent to targets.
type DispatchPolicy string

// The policies.
const (
	DispatchWorkConserving DispatchPolicy = "work_conserving"
	DispatchBlocks         DispatchPolicy = "blocks"
)

// A FinishReason is why a generation ended.
type FinishReason string

// The reasons.
const (
	FinishLength     FinishReason = "length"
	FinishEOS        FinishReason = "eos"
	FinishStopString FinishReason = "stop_string"
	FinishUnknown    FinishReason = unknown
)

// A TokenOrigin is the origin of a token: an accepted draft token, or the target's own token.
type TokenOrigin string

// The origins.
const (
	OriginAcceptedDraft TokenOrigin = "accepted_draft"
	OriginTarget        TokenOrigin = "target"
	OriginUnknown       TokenOrigin = unknown
)

// A TimelineEventKind is the kind of a timeline event.
type TimelineEventKind string

// The kinds of timeline events.
const (
	EventDrafted   TimelineEventKind = "drafted"
	EventVerifying TimelineEventKind = "verifying"
	EventAccepted  TimelineEventKind = "accepted"
	EventCorrected TimelineEventKind = "corrected"
	EventDiscarded TimelineEventKind = "discarded"
	EventCancelled TimelineEventKind = "cancelled"
	EventUnknown   TimelineEventKind = unknown
)

// Started is the first message of a generation, before any token.
type Started struct {
	RequestID        string
	Seed             uint64 // in use; the same seed gives the same text again
	ModelFingerprint string
	Strategy         Strategy // in use; never StrategyAuto
	Promise          VerificationRule
	PromptTokenCount int
	Lookahead        int
	TargetCount      int
	PlanNote         string // the reason for StrategyAuto's choice; empty without it
	Width            int    // how many tokens drafters find at a place; 1: chains
	Branches         int    // tokens beside the likeliest ones that each drafter forward follows
}

// An Event is a Chunk or a TimelineEvent.
type Event interface{ isEvent() }

// A Chunk is final tokens and their text. Origins and TextLengths (the characters that the token adds to
// Text) have one entry for each token. So have, if requested, Logprobs and TopLogprobs: the likeliest
// tokens at the position, the likeliest first. The slices are the stream's own: do not change them.
type Chunk struct {
	Position    int
	TokenIDs    []uint32
	Text        string
	Logprobs    []float64
	TopLogprobs [][]TokenLogprob
	Origins     []TokenOrigin
	TextLengths []uint32
	TokenBytes  [][]byte // if requested
}

// A PromptChunk is tokens of the prompt, and if requested how likely the target thinks each of them.
// Logprobs, TopLogprobs and TokenBytes have one entry for each token, if they were requested. The prompt's
// first token comes in a chunk of its own, without the first two.
type PromptChunk struct {
	Position    int
	TokenBytes  [][]byte
	TokenIDs    []uint32
	Logprobs    []float64
	TopLogprobs [][]TokenLogprob
}

// A TokenLogprob is a token, and the natural logarithm of its probability.
type TokenLogprob struct {
	TokenID    uint32
	Logprob    float64
	TokenBytes []byte // if requested
}

// A TimelineEvent is a draft, a verification or its result. Start and End count from the request's
// arrival.
type TimelineEvent struct {
	Kind             TimelineEventKind
	Server           string
	Start, End       time.Duration
	Position         int
	TokenIDs         []uint32
	CallID           int
	SpeculationDepth int
	// BranchTokenCount counts tokens beside the chain in a draft or a verification.
	BranchTokenCount int
	// IsBranch is true for a verification of tokens beside the chain.
	IsBranch bool
}

func (Chunk) isEvent()         {}
func (TimelineEvent) isEvent() {}

// Usage is tokens in the prompt, and tokens generated, resumed ones included. CachedPromptTokenCount
// prompt tokens had been computed before, for an earlier request of this client.
type Usage struct {
	PromptTokenCount       int
	CompletionTokenCount   int
	CachedPromptTokenCount int
}

// Statistics has the times and counts of a generation, of a resumed one of its last part. Fallbacks
// counts deviations from the plan by kind, such as "target_lost"; a kind that this client does not know
// is "fallback 12".
type Statistics struct {
	TargetForwardCount        int
	DrafterForwardCount       int
	DraftedTokenCount         int
	AcceptedTokenCount        int
	RejectedTokenCount        int
	DiscardedTokenCount       int
	AcceptanceRate            float64
	CancelledRPCCount         int
	Fallbacks                 map[string]int
	Queue                     time.Duration
	Forward                   time.Duration
	Network                   time.Duration
	TimeToFirstToken          time.Duration
	Total                     time.Duration
	CorrectionsAheadCount     int             // corrections that a drafter had found beside its chain
	BranchTokenCount          int             // tokens beside the chains that targets judged
	BranchAcceptedCount       int             // the ones that became output
	MaxGramDraftedTokenCount  int             // draft tokens that Max-Gram found in the text
	MaxGramAcceptedTokenCount int             // the ones that became output
	DrafterModels             []ModelForwards // by model, of a stack the largest model first
	// SWI: the new tokens at the mean time of a target's forward, over the time in all forwards;
	// 0 if calls were withdrawn, so that it is not known.
	WalltimeImprovement float64
	// Tokens of WithPredictedText, and those of the answer that were drafted from it.
	PredictedTokenCount         int
	PredictedAcceptedTokenCount int
	// Draft tokens that a grammar forced, without a forward, and tokens of the answer that were such.
	ForcedDraftedTokenCount  int
	ForcedAcceptedTokenCount int
}

// ModelForwards has the forwards of one of the drafters' models.
type ModelForwards struct {
	ModelName    string
	ForwardCount int
	Forward      time.Duration // time in these forwards
}

// Finished is the end of a generation; Timeline is empty unless it was requested.
type Finished struct {
	FinishReason FinishReason
	StopString   string
	Promise      VerificationRule
	Lookahead    int
	TargetsUsed  int
	Usage        Usage
	Statistics   Statistics
	Timeline     []TimelineEvent
}

// A Completion is a whole generation, a resumed one from its start.
type Completion struct {
	Started           Started
	Chunks            []Chunk
	Finished          Finished
	ResumedTokenCount int           // tokens from before its last part
	PromptChunks      []PromptChunk // the prompt's tokens, with WithPromptLogprobs or WithPromptTokens
}

// Text is the generated text.
func (c *Completion) Text() string {
	var text strings.Builder
	for _, chunk := range c.Chunks {
		text.WriteString(chunk.Text)
	}
	return text.String()
}

// TokenIDs are the generated tokens.
func (c *Completion) TokenIDs() []uint32 {
	var tokens []uint32
	for _, chunk := range c.Chunks {
		tokens = append(tokens, chunk.TokenIDs...)
	}
	return tokens
}

// ServerInfo is a model server, as the orchestrator describes it. Role is "drafter" or "target"; a role
// that this client does not know is "role 12". Standing is "used", "resting", or in one word why the
// server is not used, such as "other_dtype"; a word that this client does not know is "standing 99", and
// it is empty if the orchestrator is older than this field.
type ServerInfo struct {
	Name             string
	Address          string
	Role             string
	Ready            bool
	Status           string
	ModelFingerprint string
	DecodeStep       time.Duration
	SelfDraftKind    string // its kind of adapter, such as "medusa"; or empty
	IsInvariant      bool   // its logits for a sequence depend on this sequence alone
	Standing         string
	StandingDetail   string // more on that, for people, mostly about "it"; may be empty
}

// SystemInfo describes the models and servers of an orchestrator.
type SystemInfo struct {
	Version              string
	ModelName            string
	ModelFingerprint     string
	TokenizerFingerprint string
	VocabularySize       int
	ContextLength        int
	Servers              []ServerInfo
	RunningRequestCount  int
}
