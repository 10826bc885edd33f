package paceline_test

import (
	"context"
	"errors"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	paceline "github.com/paceline/paceline/clients/go"
)

const wholeText = "3 4 5 6 7 "

var lost = status.Error(codes.Unavailable, "gone")

func generate(t *testing.T, client *paceline.Client, options ...paceline.GenerateOption) *paceline.Stream {
	t.Helper()
	return generateIn(context.Background(), t, client, options...)
}

func generateIn(ctx context.Context, t *testing.T, client *paceline.Client, options ...paceline.GenerateOption) *paceline.Stream {
	t.Helper()
	stream, err := client.Generate(ctx, paceline.Text("x"), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stream.Close)
	return stream
}

func wantKind(t *testing.T, err error, kind paceline.Kind) *paceline.Error {
	t.Helper()
	var failure *paceline.Error
	if !errors.As(err, &failure) || failure.Kind != kind {
		t.Fatalf("the error is %v, not an %v", err, kind)
	}
	return failure
}

func wantText(t *testing.T, stream *paceline.Stream, want string) {
	t.Helper()
	text, err := stream.Text()
	if err != nil || text != want {
		t.Fatalf("the text is %q (%v), not %q", text, err, want)
	}
}

func receive(t *testing.T, from <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-from:
	case <-time.After(30 * time.Second):
		t.Fatal("not within 30 s: " + what)
	}
}

func TestChunksStreamBetweenStartedAndFinished(t *testing.T) {
	stream := generate(t, serve(t).dial(t))
	if stream.Started() != nil || stream.Finished() != nil {
		t.Fatal("something is known before the first message")
	}
	var positions []int
	for stream.Next() {
		positions = append(positions, stream.Chunk().Position)
		if stream.Started().Strategy != paceline.StrategyDistributed || stream.Started().Seed != seed {
			t.Fatalf("started is %+v", stream.Started())
		}
	}
	if stream.Err() != nil || !reflect.DeepEqual(positions, []int{3, 4, 5, 6, 7}) {
		t.Fatalf("positions %v, error %v", positions, stream.Err())
	}
	finished := stream.Finished()
	if finished.FinishReason != paceline.FinishLength || finished.Usage.CompletionTokenCount != tokenCount {
		t.Fatalf("finished is %+v", finished)
	}
	statistics := finished.Statistics
	if statistics.AcceptanceRate != 0.5 || statistics.Total != 1500 || statistics.Fallbacks["target_lost"] != 1 {
		t.Fatalf("statistics are %+v", statistics)
	}
}

func TestAnEnumValueOfANewerServerIsUnknown(t *testing.T) {
	stream := generate(t, serve(t).dial(t))
	stream.Next()
	want := []paceline.TokenOrigin{paceline.OriginAcceptedDraft, paceline.OriginUnknown}
	if !reflect.DeepEqual(stream.Chunk().Origins, want) {
		t.Fatalf("origins are %v", stream.Chunk().Origins)
	}
}

func TestCollectReturnsTheWhole(t *testing.T) {
	completion, err := generate(t, serve(t).dial(t)).Collect()
	if err != nil {
		t.Fatal(err)
	}
	if completion.Text() != wholeText || !reflect.DeepEqual(completion.TokenIDs(), []uint32{3, 4, 5, 6, 7}) {
		t.Fatalf("completion is %+v", completion)
	}
}

func TestNextPassesOverTimelineEventsAndNextEventDoesNot(t *testing.T) {
	client := serve(t).dial(t)
	wantText(t, generate(t, client, paceline.WithStreamTimeline(true)), wholeText)
	stream := generate(t, client, paceline.WithStreamTimeline(true))
	chunks, events := 0, 0
	for stream.NextEvent() {
		switch event := stream.Event().(type) {
		case paceline.Chunk:
			chunks++
		case paceline.TimelineEvent:
			events++
			if event.Kind != paceline.EventDrafted || event.Server != "drafter-0" {
				t.Fatalf("event is %+v", event)
			}
		}
	}
	if chunks != tokenCount || events != tokenCount || stream.Err() != nil {
		t.Fatalf("%d chunks, %d events, error %v", chunks, events, stream.Err())
	}
}

func TestARangeHasTheChunksOrTheEvents(t *testing.T) {
	client := serve(t).dial(t)
	text := ""
	generate(t, client).Chunks()(func(chunk paceline.Chunk, err error) bool {
		text += chunk.Text
		return err == nil
	})
	if text != wholeText {
		t.Fatalf("the text is %q", text)
	}
	count := 0
	generate(t, client, paceline.WithStreamTimeline(true)).Events()(func(event paceline.Event, err error) bool {
		count++
		return err == nil
	})
	if count != 2*tokenCount {
		t.Fatalf("%d events", count)
	}
}

func TestARangeEndsWithTheError(t *testing.T) {
	stream := generate(t, serve(t, leg{chunks: 2, err: lost}).dial(t))
	var failures []error
	stream.Chunks()(func(chunk paceline.Chunk, err error) bool {
		failures = append(failures, err)
		return true
	})
	if len(failures) != 3 || failures[0] != nil || failures[1] != nil {
		t.Fatalf("errors are %v", failures)
	}
	wantKind(t, failures[2], paceline.ErrConnectionLost)
}

func TestLeavingARangeCancelsItAtTheServer(t *testing.T) {
	server := serve(t, leg{chunks: 1, hangs: true})
	stream := generate(t, server.dial(t))
	stream.Chunks()(func(paceline.Chunk, error) bool { return false })
	receive(t, server.cancelled, "the server hears of the cancel")
}

func TestClosingAStreamCancelsItAtTheServer(t *testing.T) {
	server := serve(t, leg{chunks: 1, hangs: true})
	stream := generate(t, server.dial(t))
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	stream.Close()
	receive(t, server.cancelled, "the server hears of the cancel")
	if stream.Next() {
		t.Fatal("a closed stream moves on")
	}
	wantKind(t, stream.Err(), paceline.ErrClientCancelled)
}

func TestClosingAStreamEndsANextThatWaits(t *testing.T) {
	server := serve(t, leg{chunks: 1, hangs: true})
	stream := generate(t, server.dial(t))
	stream.Next()
	over := make(chan struct{})
	go func() {
		stream.Next()
		close(over)
	}()
	stream.Close()
	receive(t, over, "Next returns")
	wantKind(t, stream.Err(), paceline.ErrClientCancelled)
}

func TestCancellingTheContextCancelsTheGeneration(t *testing.T) {
	server := serve(t, leg{chunks: 1, hangs: true})
	ctx, cancel := context.WithCancel(context.Background())
	stream := generateIn(ctx, t, server.dial(t))
	stream.Next()
	cancel()
	receive(t, server.cancelled, "the server hears of the cancel")
	if stream.Next() || !errors.Is(stream.Err(), context.Canceled) {
		t.Fatalf("the error is %v", stream.Err())
	}
	wantKind(t, stream.Err(), paceline.ErrClientCancelled)
}

func TestACancelBeforeTheFirstMessageEndsTheStream(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	stream := generateIn(ctx, t, serve(t).dial(t))
	cancel()
	_, err := stream.Collect()
	wantKind(t, err, paceline.ErrClientCancelled)
}

func TestADeadlineEndsTheStream(t *testing.T) {
	server := serve(t, leg{hangs: true}, leg{hangs: true})
	client := server.dial(t, paceline.WithTimeout(50*time.Millisecond))
	_, err := generate(t, client, paceline.WithResumeAttempts(3)).Collect()
	if wantKind(t, err, paceline.ErrDeadline); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal("it is no context.DeadlineExceeded")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = generateIn(ctx, t, server.dial(t)).Collect()
	wantKind(t, err, paceline.ErrDeadline)
}

func TestABrokenStreamGoesOnByItself(t *testing.T) {
	server := serve(t, leg{err: lost, chunks: 2}, leg{err: lost, chunks: 1})
	completion, err := generate(t, server.dial(t), paceline.WithResumeAttempts(2)).Collect()
	if err != nil {
		t.Fatal(err)
	}
	if completion.Text() != wholeText || completion.ResumedTokenCount != 3 {
		t.Fatalf("completion is %+v", completion)
	}
	last := server.asked()[2]
	if last.GetSeed() != seed || !reflect.DeepEqual(last.GetResumeTokenIds(), []uint32{3, 4, 5}) {
		t.Fatalf("the last request is %v", last)
	}
}

func TestABrokenStreamEndsWhenItsAttemptsAreUsedUp(t *testing.T) {
	server := serve(t, leg{err: lost}, leg{err: lost})
	_, err := generate(t, server.dial(t), paceline.WithResumeAttempts(1)).Collect()
	failure := wantKind(t, err, paceline.ErrConnectionLost)
	if !failure.TryAgain() || failure.Message != "gone" || len(server.asked()) != 2 {
		t.Fatalf("%v after %d requests", err, len(server.asked()))
	}
}

func TestAnErrorThatARetryCannotHelpIsNotRetried(t *testing.T) {
	server := serve(t, leg{err: status.Error(codes.InvalidArgument, "no")})
	_, err := generate(t, server.dial(t), paceline.WithResumeAttempts(3)).Collect()
	wantKind(t, err, paceline.ErrInvalidField)
	if len(server.asked()) != 1 {
		t.Fatalf("%d requests", len(server.asked()))
	}
}

func TestABrokenStreamCanBeResumedElsewhere(t *testing.T) {
	broken := generate(t, serve(t, leg{err: lost, chunks: 2}).dial(t))
	_, err := broken.Collect()
	wantKind(t, err, paceline.ErrConnectionLost)
	resumed, err := serve(t).dial(t).Resume(context.Background(), broken)
	if err != nil {
		t.Fatal(err)
	}
	if !resumed.Next() || resumed.Chunk().Position != 5 {
		t.Fatalf("%+v, error %v", resumed.Chunk(), resumed.Err())
	}
	wantText(t, resumed, wholeText)
}

func TestALeftStreamCanBeResumed(t *testing.T) {
	server := serve(t, leg{chunks: 1, hangs: true}, leg{err: lost})
	client := server.dial(t)
	left := generate(t, client)
	left.Next()
	left.Close()
	resumed, err := client.Resume(context.Background(), left, paceline.WithResumeAttempts(1))
	if err != nil {
		t.Fatal(err)
	}
	wantText(t, resumed, wholeText)
}

func TestResumingAFinishedStreamSendsNothing(t *testing.T) {
	server := serve(t)
	client := server.dial(t)
	whole := generate(t, client)
	wantText(t, whole, wholeText)
	resumed, err := client.Resume(context.Background(), whole)
	if err != nil {
		t.Fatal(err)
	}
	if wantText(t, resumed, wholeText); len(server.asked()) != 1 {
		t.Fatalf("%d requests", len(server.asked()))
	}
}

func TestAStreamOfAnotherModelIsRefused(t *testing.T) {
	server := serve(t, leg{err: lost, chunks: 2}, leg{fingerprint: "model-b"})
	_, err := generate(t, server.dial(t), paceline.WithResumeAttempts(1)).Collect()
	wantKind(t, err, paceline.ErrModelMismatch)
}

func TestAGapInTheTokensIsAnError(t *testing.T) {
	_, err := generate(t, serve(t, leg{shift: 1}).dial(t), paceline.WithResumeAttempts(1)).Collect()
	wantKind(t, err, paceline.ErrInvariantViolated)
}

func TestAStreamWithoutItsLastMessageIsAnError(t *testing.T) {
	_, err := generate(t, serve(t, leg{omitsFinish: true}).dial(t), paceline.WithResumeAttempts(1)).Collect()
	wantKind(t, err, paceline.ErrInvariantViolated)
}

func TestABreakAfterTheLastMessageIsNoError(t *testing.T) {
	wantText(t, generate(t, serve(t, leg{breaksAtEnd: lost}).dial(t)), wholeText)
}

func TestSystemInfoNamesTheServers(t *testing.T) {
	info, err := serve(t).dial(t).Info(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if info.ModelName != "fake" || len(info.Servers) != 1 || info.Servers[0].Name != "target-0" || !info.Servers[0].Ready {
		t.Fatalf("info is %+v", info)
	}
}

func TestAUnixSocketIsReached(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "socket")
	serveOn(t, "unix", socket)
	client, err := paceline.Dial("unix:" + socket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	wantText(t, generate(t, client), wholeText)
}

func TestAClosedClientCancelsWhatRuns(t *testing.T) {
	server := serve(t, leg{chunks: 1, hangs: true})
	client := server.dial(t)
	stream := generate(t, client)
	stream.Next()
	client.Close()
	receive(t, server.cancelled, "the server hears of the cancel")
	_, err := stream.Collect()
	wantKind(t, err, paceline.ErrClientCancelled)
}

func TestClosingTheClientEndsAUnaryCallThatWaits(t *testing.T) {
	server := serve(t)
	server.asleep = make(chan struct{})
	client := server.dial(t)
	go func() {
		<-server.asleep
		client.Close()
	}()
	_, err := client.Info(context.Background())
	wantKind(t, err, paceline.ErrClientCancelled)
}

func TestCancellingTheContextEndsAUnaryCallThatWaits(t *testing.T) {
	server := serve(t)
	server.asleep = make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-server.asleep
		cancel()
	}()
	_, err := server.dial(t).Info(ctx)
	wantKind(t, err, paceline.ErrClientCancelled)
}

func TestClosingTheClientWakesAStreamThatWaitsToGoOn(t *testing.T) {
	busy, err := status.New(codes.Unavailable, "busy").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(100 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	server := serve(t, leg{err: busy.Err(), chunks: 1})
	client := server.dial(t)
	ctx, cancel := context.WithTimeout(context.Background(), 1000*time.Second)
	defer cancel()
	stream := generateIn(ctx, t, client, paceline.WithResumeAttempts(1))
	stream.Next()
	ended := make(chan struct{})
	go func() {
		stream.Next()
		close(ended)
	}()
	client.Close()
	receive(t, ended, "the stream ends")
	wantKind(t, stream.Err(), paceline.ErrClientCancelled)
}

// Whatever way a stream ends, its goroutine in gRPC ends too, while the client stays open.
func TestNoStreamLeavesAGoroutineBehind(t *testing.T) {
	ways := map[string]struct {
		leg leg
		end func(*paceline.Stream, context.CancelFunc)
	}{
		"read to the end":        {leg{}, func(s *paceline.Stream, _ context.CancelFunc) { s.Collect() }},
		"broken":                 {leg{err: lost, chunks: 1}, func(s *paceline.Stream, _ context.CancelFunc) { s.Collect() }},
		"refused by the client":  {leg{omitsFinish: true}, func(s *paceline.Stream, _ context.CancelFunc) { s.Collect() }},
		"closed":                 {leg{chunks: 1, hangs: true}, func(s *paceline.Stream, _ context.CancelFunc) { s.Close() }},
		"cancelled by a context": {leg{chunks: 1, hangs: true}, func(_ *paceline.Stream, cancel context.CancelFunc) { cancel() }},
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			client := serve(t, way.leg).dial(t)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			stream := generateIn(ctx, t, client)
			if !stream.Next() {
				t.Fatal(stream.Err())
			}
			if streamGoroutines() == 0 {
				t.Fatal("an open stream should have a goroutine, or this test sees nothing")
			}
			way.end(stream, cancel)
			for deadline := time.Now().Add(30 * time.Second); streamGoroutines() > 0; runtime.Gosched() {
				if time.Now().After(deadline) {
					t.Fatal("a goroutine is left")
				}
			}
		})
	}
}

// streamGoroutines counts the goroutines that gRPC's client has for its streams.
func streamGoroutines() int {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	return strings.Count(string(stacks), "created by google.golang.org/grpc.newClientStream")
}

func TestASecondReaderIsToldSo(t *testing.T) {
	stream := generate(t, serve(t, leg{hangs: true, chunks: 1}).dial(t))
	ended := make(chan error, 2)
	for count := 0; count < 2; count++ {
		go func() {
			for stream.Next() {
			}
			ended <- stream.Err()
		}()
	}
	wantKind(t, <-ended, paceline.ErrInvalidField)
	stream.Close()
	wantKind(t, <-ended, paceline.ErrInvalidField)
}

func TestResumingNothingIsAnError(t *testing.T) {
	_, err := serve(t).dial(t).Resume(context.Background(), nil)
	wantKind(t, err, paceline.ErrInvalidField)
}

func TestARefusedRequestConnectsAnewAndRunningStreamsFinishWhereTheyAre(t *testing.T) {
	leaving, err := status.New(codes.Unavailable, "leaving").WithDetails(&errdetails.ErrorInfo{Reason: "DRAINING", Domain: "paceline"})
	if err != nil {
		t.Fatal(err)
	}
	server := serve(t, leg{}, leg{err: leaving.Err(), refuses: true})
	client := server.dial(t)
	running := generate(t, client)
	running.Next()
	wantText(t, generate(t, client), wholeText)
	wantText(t, running, wholeText)
	wantText(t, generate(t, client), wholeText)
	peers := server.peers
	if len(peers) != 4 || peers[0] != peers[1] || peers[1] == peers[2] || peers[2] != peers[3] {
		t.Fatalf("the requests came by %v", peers)
	}
}

func TestANegativeTimeIsRefused(t *testing.T) {
	_, err := paceline.Dial("127.0.0.1:1", paceline.WithTimeout(-time.Second))
	wantKind(t, err, paceline.ErrInvalidField)
}
