package paceline

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	pb "github.com/paceline/paceline/clients/go/paceline/v1"
)

// A transcript is a request and what came back, over as many streams as it took: no I/O here.
//
// Each chunk starts at the absolute position where the one before ended,
// and none is missing at the end. A stream that breaks this rule ends in an error, never in a gap or a
// duplicate.
type transcript struct {
	request      *pb.GenerateRequest
	started      *Started
	finished     *Finished
	chunks       []Chunk
	promptChunks []PromptChunk
	nextPosition int
	resumedCount int // tokens that the current stream did not have to send
}

// nextRequest returns the request for the missing part.
func (t *transcript) nextRequest() *pb.GenerateRequest {
	if t.started == nil {
		return t.request
	}
	request := proto.Clone(t.request).(*pb.GenerateRequest)
	request.Seed = &t.started.Seed
	for _, chunk := range t.chunks {
		request.ResumeTokenIds = append(request.ResumeTokenIds, chunk.TokenIDs...)
	}
	if len(t.chunks) > 0 { // which come after all of the prompt
		request.PromptLogprobs = nil
		request.IncludePrompt = false
	}
	return request
}

// add adds a message, and returns the event for the caller, or nil. It fails with
// ErrModelMismatch if a resumed stream comes from another model, and with ErrInvariantViolated if
// tokens are missing or come twice.
func (t *transcript) add(response *pb.GenerateResponse) (Event, error) {
	switch event := response.GetEvent().(type) {
	case *pb.GenerateResponse_Started:
		return nil, t.start(readStarted(event.Started))
	case *pb.GenerateResponse_PromptChunk:
		return nil, t.appendPrompt(readPromptChunk(event.PromptChunk))
	case *pb.GenerateResponse_Chunk:
		return t.append(readChunk(event.Chunk))
	case *pb.GenerateResponse_TimelineEvent:
		return readTimelineEvent(event.TimelineEvent), nil
	case *pb.GenerateResponse_Finished:
		return nil, t.finish(readFinished(event.Finished))
	}
	return nil, nil // from a newer server
}

// completion returns the whole. It fails with ErrInvariantViolated if the last message is missing.
func (t *transcript) completion() (*Completion, error) {
	if t.started == nil || t.finished == nil {
		return nil, violated("the stream ended before its last message")
	}
	return &Completion{
		Started:           *t.started,
		Chunks:            t.chunks,
		PromptChunks:      t.promptChunks,
		Finished:          *t.finished,
		ResumedTokenCount: t.resumedCount,
	}, nil
}

// branch returns a copy that another generation continues.
func (t *transcript) branch() *transcript {
	twin := *t
	twin.chunks = append([]Chunk(nil), t.chunks...)
	twin.promptChunks = append([]PromptChunk(nil), t.promptChunks...)
	return &twin
}

func (t *transcript) start(started *Started) error {
	switch before := t.started; {
	case before == nil:
		t.nextPosition = started.PromptTokenCount + len(t.request.GetResumeTokenIds())
	case before.ModelFingerprint != started.ModelFingerprint:
		return &Error{
			Kind: ErrModelMismatch,
			Message: fmt.Sprintf("the stream was resumed with another model: %s instead of %s",
				started.ModelFingerprint, before.ModelFingerprint),
		}
	}
	t.started = started
	t.resumedCount = 0
	for _, chunk := range t.chunks {
		t.resumedCount += len(chunk.TokenIDs)
	}
	return nil
}

// appendPrompt adds tokens of the prompt; a stream that was resumed before the answer tells them anew.
func (t *transcript) appendPrompt(chunk PromptChunk) error {
	if chunk.Position == 0 {
		t.promptChunks = nil
	}
	due := 0
	if count := len(t.promptChunks); count > 0 {
		last := t.promptChunks[count-1]
		due = last.Position + len(last.TokenIDs)
	}
	if chunk.Position != due {
		return violated("tokens of the prompt at position %d came where %d was due", chunk.Position, due)
	}
	t.promptChunks = append(t.promptChunks, chunk)
	return nil
}

func (t *transcript) append(chunk Chunk) (Event, error) {
	if t.started == nil {
		return nil, violated("tokens came before the first message")
	}
	if chunk.Position != t.nextPosition {
		return nil, violated("tokens at position %d came where %d was due", chunk.Position, t.nextPosition)
	}
	t.nextPosition += len(chunk.TokenIDs)
	t.chunks = append(t.chunks, chunk)
	return chunk, nil
}

func (t *transcript) finish(finished *Finished) error {
	end := finished.Usage.PromptTokenCount + finished.Usage.CompletionTokenCount
	if end != t.nextPosition {
		return violated("the stream ended at position %d instead of %d", t.nextPosition, end)
	}
	t.finished = finished
	return nil
}

func violated(format string, values ...interface{}) *Error {
	return &Error{Kind: ErrInvariantViolated, Message: fmt.Sprintf(format, values...)}
}
