package paceline

import (
	"context"
	"io"
	"sync"
	"sync/atomic"
	"time"

	pb "github.com/paceline/paceline/clients/go/paceline/v1"
)

// A Stream is a generation as it streams, like bufio.Scanner: Next moves on, Chunk is what
// it moved to, and Err, after the loop, is why it ended.
//
// Closing it, or cancelling its context, cancels the RPC, and all work of the servers for it.
// The received part stays: Client.Resume goes on from there. A stream that was read to its end needs no
// Close; any other holds a goroutine until then, or until its deadline.
//
// One goroutine at a time may use a Stream, but Close may be called by any. If a second one calls Next
// while the first one waits, Next is false, and Err is an ErrInvalidField, for both.
type Stream struct {
	ctx        context.Context
	cancel     context.CancelFunc
	client     *Client
	transcript *transcript
	resumption *resumption

	call  pb.OrchestratorService_GenerateClient // nil where none is open
	heard bool                                  // something of it has come
	event Event
	over  bool
	err   error

	readers int32 // in Next now
	misused int32 // 1 once there were two

	mutex sync.Mutex // guards the fields below
	wire  *lease     // what the call runs on
}

// Next moves on to the next chunk, and waits for it. It is false at the end, and after an error.
func (s *Stream) Next() bool {
	for s.NextEvent() {
		if _, isChunk := s.event.(Chunk); isChunk {
			return true
		}
	}
	return false
}

// NextEvent moves on to the next chunk or, with WithStreamTimeline, to the next timeline event.
func (s *Stream) NextEvent() bool {
	if atomic.AddInt32(&s.readers, 1) > 1 {
		atomic.StoreInt32(&s.misused, 1)
	}
	defer atomic.AddInt32(&s.readers, -1)
	if atomic.LoadInt32(&s.misused) == 1 {
		return false
	}
	s.event = nil
	for s.event == nil && !s.over {
		if err := s.step(); err != nil {
			s.end(err)
		}
	}
	return s.event != nil
}

// Chunk is the chunk that Next moved to.
func (s *Stream) Chunk() Chunk {
	chunk, _ := s.event.(Chunk)
	return chunk
}

// Event is the event that NextEvent moved to.
func (s *Stream) Event() Event { return s.event }

// Err is the reason why Next was false: nil at the end of the generation, otherwise an *Error.
func (s *Stream) Err() error {
	if atomic.LoadInt32(&s.misused) == 1 {
		return invalidField("generation", "has two readers: let one read it, or give each its own by Resume")
	}
	return s.err
}

// Started has seed, model and plan of the generation; nil before its first message, which comes before
// the first chunk.
func (s *Stream) Started() *Started { return s.transcript.started }

// Finished is the end, with statistics; nil until then.
func (s *Stream) Finished() *Finished { return s.transcript.finished }

// PromptChunks has the prompt's tokens, if they were asked for: all of them, once there is a chunk.
func (s *Stream) PromptChunks() []PromptChunk { return s.transcript.promptChunks }

// Chunks ranges over the rest: it is an iter.Seq2[Chunk, error]. An error comes last, with an empty
// chunk. Leaving the loop closes the stream.
func (s *Stream) Chunks() func(yield func(Chunk, error) bool) {
	return func(yield func(Chunk, error) bool) { each(s, s.Next, s.Chunk, yield) }
}

// Events ranges over the rest with the timeline's events, if WithStreamTimeline asks for them: it is an
// iter.Seq2[Event, error], and ends as Chunks does.
func (s *Stream) Events() func(yield func(Event, error) bool) {
	return func(yield func(Event, error) bool) { each(s, s.NextEvent, s.Event, yield) }
}

// each yields what a stream moves to, until it ends or the caller stops.
func each[T any](s *Stream, next func() bool, at func() T, yield func(T, error) bool) {
	defer s.Close()
	for next() {
		if !yield(at(), nil) {
			return
		}
	}
	if err := s.Err(); err != nil {
		var nothing T
		yield(nothing, err)
	}
}

// Collect reads the rest and returns the whole completion, a resumed one from its start.
func (s *Stream) Collect() (*Completion, error) {
	for s.Next() {
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	return s.transcript.completion()
}

// Text reads the rest and returns the whole text.
func (s *Stream) Text() (string, error) {
	completion, err := s.Collect()
	if err != nil {
		return "", err
	}
	return completion.Text(), nil
}

// Close cancels the RPC, if it runs. A second call does nothing.
func (s *Stream) Close() {
	s.cancel()
	s.giveBack()
}

// giveBack gives back the wire of the ended call.
func (s *Stream) giveBack() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.wire != nil {
		s.wire.end()
	}
}

// step adds one message. io.EOF says that the generation is whole.
func (s *Stream) step() error {
	if s.call == nil && s.transcript.finished != nil {
		return io.EOF // resumed when nothing was missing
	}
	response, err := s.receive()
	switch {
	case err == nil:
		s.heard = true
		s.event, err = s.transcript.add(response)
		if _, isChunk := s.event.(Chunk); isChunk {
			s.resumption.hear()
			s.client.endpoints.answered(s.resumption.at)
		}
		return err
	case err == io.EOF:
		if _, err := s.transcript.completion(); err != nil {
			return err
		}
		return io.EOF
	case s.transcript.finished != nil:
		return io.EOF
	}
	broken := s.decode(err)
	if broken.TryAgain() { // which nothing is that happens before an endpoint is asked
		s.client.endpoints.failed(s.resumption.at)
	}
	s.call = nil // it ended with its error
	s.giveBack()
	return s.wait(broken)
}

// receive returns nothing after the stream is closed, not even messages that have arrived.
func (s *Stream) receive() (*pb.GenerateResponse, error) {
	if err := s.ctx.Err(); err != nil {
		return nil, err
	}
	if s.call == nil {
		if err := s.begin(); err != nil {
			return nil, err
		}
	}
	return s.call.Recv()
}

// begin returns the request for the missing part.
func (s *Stream) begin() error {
	along, err := s.client.options.alongWith(s.ctx)
	if err != nil {
		return err
	}
	at, wire, err := s.client.endpoints.lend(s.resumption.asked)
	if err != nil {
		return err
	}
	s.resumption.at = at
	s.mutex.Lock()
	s.wire = wire
	s.mutex.Unlock()
	s.heard = false
	s.call, err = wire.stub.Generate(along, s.transcript.nextRequest())
	return err
}

func (s *Stream) decode(failure error) *Error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.wire == nil {
		return decode(failure)
	}
	return s.wire.decode(s.ctx, failure)
}

// wait returns when the generation may continue after an error, or returns the error if another attempt
// is not useful.
func (s *Stream) wait(broken *Error) error {
	select {
	case <-s.client.closed:
		return clientClosed()
	default:
	}
	deadline, _ := s.ctx.Deadline()
	delay, worthwhile := s.resumption.delay(broken, !s.heard, time.Until(deadline))
	if !worthwhile {
		return broken
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-s.ctx.Done():
		return decode(s.ctx.Err())
	case <-s.client.closed:
		return clientClosed()
	}
}

func clientClosed() *Error {
	return &Error{Kind: ErrClientCancelled, Message: "the client was closed"}
}

func (s *Stream) end(err error) {
	s.over = true
	if err != io.EOF {
		s.err = err
	}
	s.Close()
}
