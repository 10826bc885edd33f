package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/metadata"

	paceline "github.com/paceline/paceline/clients/go"
)

// unsupported is the error for a request that this driver, or Go, cannot do.
type unsupported string

func (u unsupported) Error() string { return string(u) }

// A request is one line of the input.
type request struct {
	Case     json.RawMessage `json:"case"`
	Do       string          `json:"do"`
	Client   string          `json:"client"`
	Address  string          `json:"address"`
	Several  []string        `json:"addresses"`
	Insecure bool            `json:"insecure"`
	TLS      *struct {
		CA          string `json:"ca"`
		Certificate string `json:"certificate"`
		Key         string `json:"key"`
	} `json:"tls"`
	Prompt struct {
		Text     *string   `json:"text"`
		TokenIDs []float64 `json:"token_ids"`
	} `json:"prompt"`
	Options        map[string]json.RawMessage `json:"options"`
	TimeoutSeconds json.RawMessage            `json:"timeout_seconds"`
	ClientTimeout  json.RawMessage            `json:"client_timeout_seconds"`
	SecondReader   bool                       `json:"second_reader"`
	ResumeAttempts json.RawMessage            `json:"resume_attempts"`
	TLSFromMemory  bool                       `json:"tls_from_memory"`
	ClientMetadata map[string]string          `json:"client_metadata"`
	Metadata       map[string]string          `json:"metadata"`
	Tokens         []*string                  `json:"tokens"`
	Cancel         cancellation               `json:"cancel"`
	PauseSeconds   float64                    `json:"pause_seconds"`
	ThenResume     bool                       `json:"then_resume"`
	Events         bool                       `json:"events"`
}

type cancellation struct {
	AfterSeconds *float64 `json:"after_seconds"`
	AfterChunks  int      `json:"after_chunks"`
}

func (r *request) dialOptions() ([]paceline.DialOption, error) {
	var options []paceline.DialOption
	if r.TLS != nil {
		files, err := r.tls()
		if err != nil {
			return nil, err
		}
		options = append(options, paceline.WithTLS(files))
	}
	if r.ClientMetadata != nil {
		options = append(options, paceline.WithMetadata(readMetadata(r.ClientMetadata)))
	}
	if r.Tokens != nil {
		options = append(options, paceline.WithToken(r.token()))
	}
	if r.Insecure {
		options = append(options, paceline.WithInsecure())
	}
	if r.ClientTimeout != nil {
		timeout, err := readTimeout(r.ClientTimeout)
		if err != nil {
			return nil, err
		}
		options = append(options, paceline.WithTimeout(timeout))
	}
	return options, nil
}

func (r *request) tls() (paceline.TLS, error) {
	files := paceline.TLS{CAFile: r.TLS.CA, CertificateFile: r.TLS.Certificate, KeyFile: r.TLS.Key}
	if !r.TLSFromMemory {
		return files, nil
	}
	var contents [3][]byte
	for index, path := range []string{r.TLS.CA, r.TLS.Certificate, r.TLS.Key} {
		content, err := os.ReadFile(path)
		if err != nil {
			return files, err
		}
		contents[index] = content
	}
	return paceline.TLS{CA: contents[0], Certificate: contents[1], Key: contents[2]}, nil
}

// token tells one token after the other, and the last one again and again; null never comes.
func (r *request) token() func(context.Context) (string, error) {
	left := r.Tokens
	return func(ctx context.Context) (string, error) {
		told := left[0]
		if len(left) > 1 {
			left = left[1:]
		}
		if told == nil {
			<-ctx.Done()
			return "", ctx.Err()
		}
		return *told, nil
	}
}

// readMetadata reads metadata, in which bytes are hexadecimal digits.
func readMetadata(told map[string]string) map[string]string {
	read := make(map[string]string)
	for name, value := range told {
		if content, err := hex.DecodeString(value); err == nil && strings.HasSuffix(name, "-bin") {
			value = string(content)
		}
		read[name] = value
	}
	return read
}

// outgoing returns a context with the call's metadata.
func (r *request) outgoing() context.Context {
	if r.Metadata == nil {
		return context.Background()
	}
	return metadata.NewOutgoingContext(context.Background(), metadata.New(readMetadata(r.Metadata)))
}

func (r *request) context() (context.Context, context.CancelFunc, error) {
	if r.TimeoutSeconds == nil {
		ctx, cancel := context.WithCancel(r.outgoing())
		return ctx, cancel, nil
	}
	timeout, err := readTimeout(r.TimeoutSeconds)
	if err == nil && timeout < 0 {
		err = unsupported("a context in Go whose deadline has passed is just that")
	}
	ctx, cancel := context.WithTimeout(r.outgoing(), timeout)
	return ctx, cancel, err
}

// readTimeout reads seconds; the longest time.Duration stands for all that is longer.
func readTimeout(value json.RawMessage) (time.Duration, error) {
	var count float64
	if json.Unmarshal(value, &count) != nil {
		return 0, unsupported(fmt.Sprintf("a time.Duration cannot hold %s", value))
	}
	if count > math.MaxInt64/1e9 {
		return math.MaxInt64, nil
	}
	return seconds(count), nil
}

func (r *request) prompt() (paceline.Prompt, error) {
	if r.Prompt.Text != nil {
		return paceline.Text(*r.Prompt.Text), nil
	}
	tokens := paceline.TokenIDs{}
	for _, token := range r.Prompt.TokenIDs {
		if token != float64(uint32(token)) {
			return nil, unsupported(fmt.Sprintf("a token id is a uint32 in Go, which cannot hold %v", token))
		}
		tokens = append(tokens, uint32(token))
	}
	return tokens, nil
}

func (r *request) generateOptions() ([]paceline.GenerateOption, error) {
	var options []paceline.GenerateOption
	if !bytes.Equal(r.ResumeAttempts, []byte("null")) { // which is the client's default; without a word, none
		attempts := 0
		if r.ResumeAttempts != nil {
			if err := json.Unmarshal(r.ResumeAttempts, &attempts); err != nil {
				return nil, err
			}
		}
		options = append(options, paceline.WithResumeAttempts(attempts))
	}
	for name, value := range r.Options {
		if bytes.Equal(value, []byte("null")) {
			continue
		}
		option, err := readOption(name, value)
		if err != nil {
			return nil, err
		}
		options = append(options, option)
	}
	return options, nil
}

func readOption(name string, value json.RawMessage) (paceline.GenerateOption, error) {
	switch name {
	case "max_tokens":
		return readValue(value, paceline.WithMaxTokens)
	case "stop":
		return readStop(value)
	case "top_k":
		return readValue(value, paceline.WithTopK)
	case "logit_bias":
		return readValue(value, paceline.WithLogitBias)
	case "grammar":
		return readGrammar(value)
	case "min_tokens":
		return readValue(value, paceline.WithMinTokens)
	case "seed":
		return readSeed(value)
	case "strategy":
		return readValue(value, paceline.WithStrategy)
	case "lookahead":
		return readValue(value, paceline.WithLookahead)
	case "targets":
		return readValue(value, paceline.WithTargets)
	case "drafters":
		return readValue(value, paceline.WithDrafters)
	case "width":
		return readValue(value, paceline.WithWidth)
	case "branches":
		return readValue(value, paceline.WithBranches)
	case "drafter":
		return readValue(value, paceline.WithDrafter)
	case "rule":
		return readValue(value, paceline.WithRule)
	case "dispatch":
		return readValue(value, paceline.WithDispatch)
	case "ignore_eos":
		return readValue(value, paceline.WithIgnoreEOS)
	case "logprobs":
		return readValue(value, paceline.WithLogprobs)
	case "top_logprobs":
		return readValue(value, paceline.WithTopLogprobs)
	case "prompt_logprobs":
		return readValue(value, paceline.WithPromptLogprobs)
	case "include_token_bytes":
		return readValue(value, paceline.WithTokenBytes)
	case "include_prompt":
		return readValue(value, paceline.WithPromptTokens)
	case "predicted_text":
		return readValue(value, paceline.WithPredictedText)
	case "lora":
		return readValue(value, paceline.WithLora)
	case "add_special_tokens":
		return readValue(value, paceline.WithAddSpecialTokens)
	case "parse_special_tokens":
		return readValue(value, paceline.WithParseSpecialTokens)
	case "include_timeline":
		return readValue(value, paceline.WithIncludeTimeline)
	case "stream_timeline":
		return readValue(value, paceline.WithStreamTimeline)
	case "request_id":
		return readValue(value, paceline.WithRequestID)
	case "resume_token_ids":
		return readValue(value, paceline.WithResumeTokenIDs)
	}
	return readSampling(name, value)
}

// readSampling reads a number of SamplingParameters: what is no other option.
func readSampling(name string, value json.RawMessage) (paceline.GenerateOption, error) {
	return readFloat(value, func(number float64) paceline.GenerateOption {
		return paceline.WithSampling(name, number)
	})
}

// readValue reads the option's one value as its own Go type; what that cannot hold, Go has no words for.
func readValue[T any](value json.RawMessage, with func(T) paceline.GenerateOption) (paceline.GenerateOption, error) {
	var held T
	if err := json.Unmarshal(value, &held); err != nil {
		return nil, unsupported(fmt.Sprintf("the option's type in Go is %T, which cannot hold %s", held, value))
	}
	return with(held), nil
}

func readGrammar(value json.RawMessage) (paceline.GenerateOption, error) {
	var given struct {
		JSONSchema *string `json:"json_schema"`
		Regex      *string
		Lark       *string
		Choices    []string
	}
	if err := json.Unmarshal(value, &given); err != nil {
		return nil, err
	}
	switch {
	case given.JSONSchema != nil:
		return paceline.WithJSONSchema(*given.JSONSchema), nil
	case given.Regex != nil:
		return paceline.WithRegex(*given.Regex), nil
	case given.Lark != nil:
		return paceline.WithLark(*given.Lark), nil
	default:
		return paceline.WithChoices(given.Choices...), nil
	}
}

func readFloat(value json.RawMessage, with func(float64) paceline.GenerateOption) (paceline.GenerateOption, error) {
	switch string(value) {
	case `"NaN"`:
		return with(math.NaN()), nil
	case `"Infinity"`:
		return with(math.Inf(1)), nil
	case `"-Infinity"`:
		return with(math.Inf(-1)), nil
	}
	return readValue(value, with)
}

func readSeed(value json.RawMessage) (paceline.GenerateOption, error) {
	seed, err := strconv.ParseUint(string(bytes.Trim(value, `"`)), 10, 64)
	if err != nil {
		return nil, unsupported(fmt.Sprintf("a seed is a uint64 in Go, which cannot hold %s", value))
	}
	return paceline.WithSeed(seed), nil
}

func readStop(value json.RawMessage) (paceline.GenerateOption, error) {
	var one string
	if json.Unmarshal(value, &one) == nil {
		return paceline.WithStop(one), nil
	}
	return readValue(value, func(stop []string) paceline.GenerateOption { return paceline.WithStop(stop...) })
}

func seconds(count float64) time.Duration { return time.Duration(count * float64(time.Second)) }
