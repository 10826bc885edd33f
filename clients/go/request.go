package paceline

import (
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/paceline/paceline/clients/go/paceline/v1"
)

// A Prompt is Text or TokenIDs.
type Prompt interface {
	assignTo(*pb.GenerateRequest) error
}

// Text is a prompt for the server's tokenizer.
type Text string

// TokenIDs is a prompt of tokens.
type TokenIDs []uint32

func (t Text) assignTo(request *pb.GenerateRequest) error {
	request.Prompt = &pb.GenerateRequest_Text{Text: string(t)}
	return checkText("text", string(t))
}

func (t TokenIDs) assignTo(request *pb.GenerateRequest) error {
	request.Prompt = &pb.GenerateRequest_TokenIds{TokenIds: &pb.TokenIds{Ids: t}}
	return nil
}

// A GenerateOption changes one thing about a generation. An option that is left out has the server's
// default. Limits are checked by the server, and reported as ErrInvalidField.
type GenerateOption interface {
	applyTo(*generation) error
}

// A ResumeOption can also be given to Resume.
type ResumeOption interface {
	GenerateOption
	isResumeOption()
}

// generation has the fields that options change.
type generation struct {
	request        *pb.GenerateRequest
	resumeAttempts int
	countsAttempts bool // resumeAttempts was given
}

type requestOption func(*pb.GenerateRequest) error

func (o requestOption) applyTo(g *generation) error { return o(g.request) }

type resumeAttempts int

func (r resumeAttempts) applyTo(g *generation) error {
	if r < 0 {
		return invalidField("resume_attempts", fmt.Sprintf("must be 0 or more, not %d", int(r)))
	}
	g.resumeAttempts, g.countsAttempts = int(r), true
	return nil
}

func (resumeAttempts) isResumeOption() {}

// WithResumeAttempts sets how often a generation resumes by itself after an ErrTryAgain, such as a
// broken connection. The text has no gap and no duplicate. Default: never with one orchestrator; with
// several, until all of them have failed several times. 0 leaves it to the caller.
func WithResumeAttempts(attempts int) ResumeOption { return resumeAttempts(attempts) }

// WithMaxTokens sets the most tokens to generate. Default 256, or fewer if the context has less room.
func WithMaxTokens(count int) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		return setCount(&r.MaxTokens, "max_tokens", count)
	})
}

// WithStop ends the text before the first of these strings.
func WithStop(stop ...string) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.StopStrings = append(r.StopStrings, stop...)
		return checkText("stop", stop...)
	})
}

// WithSampling sets a number of the proto's SamplingParameters by its name there, such as "min_p".
func WithSampling(name string, value float64) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		if math.IsNaN(value) || math.IsInf(value, 0) {
			return invalidField(name, fmt.Sprintf("must be finite, not %v", value))
		}
		message := sampling(r).ProtoReflect()
		field := message.Descriptor().Fields().ByName(protoreflect.Name(name))
		if field == nil || field.Kind() != protoreflect.DoubleKind || field.IsMap() {
			return invalidField(name, "is no number of SamplingParameters")
		}
		message.Set(field, protoreflect.ValueOfFloat64(value))
		return nil
	})
}

// WithTemperature sets the temperature; 0 (the default) is greedy.
func WithTemperature(temperature float64) GenerateOption {
	return WithSampling("temperature", temperature)
}

// WithTopK keeps the k most likely tokens; 0 (the default) keeps all.
func WithTopK(k int) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		return setCount(&sampling(r).TopK, "top_k", k)
	})
}

// WithTopP keeps the fewest likeliest tokens whose probabilities add up to p; 1 (the default) keeps all.
func WithTopP(p float64) GenerateOption {
	return WithSampling("top_p", p)
}

// WithMinP keeps tokens with at least p times the likeliest token's probability; 0 keeps all.
func WithMinP(p float64) GenerateOption {
	return WithSampling("min_p", p)
}

// WithLogitBias adds numbers in [-100, 100] to the logits of token ids.
func WithLogitBias(biases map[uint32]float64) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		given := make(map[uint32]float64, len(biases))
		for id, bias := range biases {
			if math.IsNaN(bias) || math.IsInf(bias, 0) {
				return invalidField("logit_bias", fmt.Sprintf("must be finite, not %v", bias))
			}
			given[id] = bias
		}
		sampling(r).LogitBias = given
		return nil
	})
}

// WithPresencePenalty is taken once from the logit of each token that the answer has already.
func WithPresencePenalty(penalty float64) GenerateOption {
	return WithSampling("presence_penalty", penalty)
}

// WithFrequencyPenalty is taken from it for each time that the answer has the token.
func WithFrequencyPenalty(penalty float64) GenerateOption {
	return WithSampling("frequency_penalty", penalty)
}

// WithRepetitionPenalty makes tokens of prompt and answer less likely if above 1, the default.
func WithRepetitionPenalty(penalty float64) GenerateOption {
	return WithSampling("repetition_penalty", penalty)
}

// WithMinTokens keeps the text from ending by itself before it has so many tokens.
func WithMinTokens(count int) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		return setCount(&sampling(r).MinTokens, "min_tokens", count)
	})
}

// WithJSONSchema makes the text one JSON value that a schema, as JSON, allows.
func WithJSONSchema(schema string) GenerateOption {
	return withGrammar(&pb.Grammar{Definition: &pb.Grammar_JsonSchema{JsonSchema: schema}}, schema)
}

// WithRegex makes the text match a regular expression in the syntax of Rust's crate regex.
func WithRegex(regex string) GenerateOption {
	return withGrammar(&pb.Grammar{Definition: &pb.Grammar_Regex{Regex: regex}}, regex)
}

// WithLark makes the text follow a context-free grammar in llguidance's form of Lark, or
// in llama.cpp's (GBNF).
func WithLark(grammar string) GenerateOption {
	return withGrammar(&pb.Grammar{Definition: &pb.Grammar_Lark{Lark: grammar}}, grammar)
}

// WithChoices makes the text one of some texts.
func WithChoices(texts ...string) GenerateOption {
	choices := &pb.Choices{Texts: texts}
	return withGrammar(&pb.Grammar{Definition: &pb.Grammar_Choices{Choices: choices}}, texts...)
}

func withGrammar(grammar *pb.Grammar, texts ...string) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		if err := checkText("grammar", texts...); err != nil {
			return err
		}
		sampling(r).Grammar = grammar
		return nil
	})
}

// WithSeed sets the seed, in [0, 2^53). The same seed gives the same text, with every
// strategy. Default: chosen, and told in Started.
func WithSeed(seed uint64) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.Seed = &seed
		return nil
	})
}

// WithStrategy sets how to decode. Default StrategyAuto.
func WithStrategy(strategy Strategy) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		number, err := enumNumber("strategy", pb.Strategy_name, string(strategy))
		r.Strategy = pb.Strategy(number)
		return err
	})
}

// WithLookahead sets how many draft tokens a verification has. Default: the planner's choice.
func WithLookahead(tokens int) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		return setCount(&r.Lookahead, "lookahead", tokens)
	})
}

// WithTargets sets the most targets to use. Default: the planner's choice.
func WithTargets(count int) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		return setCount(&r.TargetCount, "targets", count)
	})
}

// WithDrafters sets the most drafters to use. Default 1.
func WithDrafters(count int) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		return setCount(&r.DrafterCount, "drafters", count)
	})
}

// WithWidth sets how many tokens drafters find at a position: with 2 or more, targets judge trees, and
// corrections are found ahead. Default 1; with AUTO the planner's choice.
func WithWidth(tokens int) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		return setCount(&r.Width, "width", tokens)
	})
}

// WithBranches sets the number of runners-up that each drafter forward also extends. Default 0.
func WithBranches(count int) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		return setCount(&r.Branches, "branches", count)
	})
}

// WithDrafter sets the drafter. Default: servers, and Max-Gram while there is no drafter server.
func WithDrafter(kind DrafterKind) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		number, err := enumNumber("drafter", pb.DrafterKind_name, string(kind))
		r.Drafter = pb.DrafterKind(number)
		return err
	})
}

// WithRule sets the promise about the output. Default RuleExact.
func WithRule(rule VerificationRule) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		number, err := enumNumber("rule", pb.VerificationRule_name, string(rule))
		r.VerificationRule = pb.VerificationRule(number)
		return err
	})
}

// WithDispatch sets when blocks are sent to targets, and whether SI drafts ahead. Default
// DispatchWorkConserving.
func WithDispatch(policy DispatchPolicy) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		number, err := enumNumber("dispatch", pb.DispatchPolicy_name, string(policy))
		r.DispatchPolicy = pb.DispatchPolicy(number)
		return err
	})
}

// WithIgnoreEOS says whether to continue after an end-of-text token. Default false.
func WithIgnoreEOS(ignore bool) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.IgnoreEos = ignore
		return nil
	})
}

// WithLogprobs says whether to return each token's log probability. Default false.
func WithLogprobs(wanted bool) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.Logprobs = wanted
		return nil
	})
}

// WithTopLogprobs sets the number of likeliest tokens to return at each position, at most 20. Default 0.
func WithTopLogprobs(count uint32) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.TopLogprobs = count
		return nil
	})
}

// WithPromptLogprobs returns each prompt token's log probability, and so many of the likeliest tokens at
// its position, at most 20. With it WithMaxTokens may be 0. Default: neither.
func WithPromptLogprobs(count uint32) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.PromptLogprobs = &count
		return nil
	})
}

// WithTokenBytes says whether to return the bytes of each token that is told. Default false.
func WithTokenBytes(wanted bool) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.IncludeTokenBytes = wanted
		return nil
	})
}

// WithPromptTokens says whether to return the prompt's tokens, which WithPromptLogprobs also does. Default
// false.
func WithPromptTokens(wanted bool) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.IncludePrompt = wanted
		return nil
	})
}

// WithPredictedText sets what the answer will probably be: Max-Gram drafts from it.
func WithPredictedText(text string) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.PredictedText = text
		return nil
	})
}

// WithLora sets the name of the LoRA adapter to generate with. Default: none, the model alone.
func WithLora(name string) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.Lora = name
		return nil
	})
}

// WithAddSpecialTokens says whether the tokenizer adds its special tokens to a text prompt. Default
// true.
func WithAddSpecialTokens(add bool) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.AddSpecialTokens = &add
		return nil
	})
}

// WithParseSpecialTokens says whether special tokens written in a text prompt are parsed. Default
// false.
func WithParseSpecialTokens(parse bool) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.ParseSpecialTokens = &parse
		return nil
	})
}

// WithIncludeTimeline says whether to put every draft and verification into Finished.Timeline.
func WithIncludeTimeline(include bool) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.IncludeTimeline = include
		return nil
	})
}

// WithStreamTimeline says whether the stream has them as they happen: see Stream.NextEvent.
func WithStreamTimeline(stream bool) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.StreamTimeline = stream
		return nil
	})
}

// WithRequestID sets a name for logs. Default: chosen.
func WithRequestID(id string) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.RequestId = id
		return checkText("request_id", id)
	})
}

// WithResumeTokenIDs goes on after tokens of this generation that were received earlier; it needs
// their seed. Client.Resume does that for a Stream.
func WithResumeTokenIDs(tokens []uint32) GenerateOption {
	return requestOption(func(r *pb.GenerateRequest) error {
		r.ResumeTokenIds = append(r.ResumeTokenIds, tokens...)
		return nil
	})
}

// newGeneration builds the wire's request. It fails if a field cannot hold the value; the server checks
// all other limits.
func newGeneration(prompt Prompt, options []GenerateOption) (*generation, error) {
	g := &generation{request: &pb.GenerateRequest{}}
	if prompt == nil {
		return nil, invalidField("prompt", "must be Text or TokenIDs, not nil")
	}
	if err := prompt.assignTo(g.request); err != nil {
		return nil, err
	}
	for _, option := range options {
		if err := option.applyTo(g); err != nil {
			return nil, err
		}
	}
	return g, nil
}

func sampling(request *pb.GenerateRequest) *pb.SamplingParameters {
	if request.Sampling == nil {
		request.Sampling = &pb.SamplingParameters{}
	}
	return request.Sampling
}

func setCount(field **uint32, name string, value int) error {
	if value < 0 || uint64(value) > math.MaxUint32 {
		return invalidField(name, fmt.Sprintf("must be in [0, 2^32), not %d", value))
	}
	count := uint32(value)
	*field = &count
	return nil
}

func enumNumber(name string, names map[int32]string, wanted string) (int32, error) {
	number, found := numberOf(names, wanted)
	if !found {
		return 0, invalidField(name, fmt.Sprintf("must be one of %s, not %q", strings.Join(wordsOf(names), ", "), wanted))
	}
	return number, nil
}

func checkText(name string, texts ...string) error {
	for _, text := range texts {
		if !utf8.ValidString(text) {
			return invalidField(name, "must be UTF-8")
		}
	}
	return nil
}
