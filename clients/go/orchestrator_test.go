package paceline_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	paceline "github.com/paceline/paceline/clients/go"
	pb "github.com/paceline/paceline/clients/go/paceline/v1"
)

const (
	promptLength = 3
	tokenCount   = 5
	seed         = 7
)

// A leg is how one call of Generate goes: normally, or with what is set here.
type leg struct {
	err         error // after `chunks` chunks
	refuses     bool  // says err before anything else
	chunks      int
	hangs       bool // after `chunks` chunks
	fingerprint string
	shift       uint32 // added to positions: a broken server
	omitsFinish bool
	breaksAtEnd error // after the last message
}

// An orchestrator serves Generate by its script, one leg for each call. Token p is p and reads "p ".
type orchestrator struct {
	pb.UnimplementedOrchestratorServiceServer
	address   string
	cancelled chan struct{} // one for each call that the client left
	asleep    chan struct{} // if there is one, GetSystemInfo closes it and never answers

	mutex    sync.Mutex
	script   []leg
	requests []*pb.GenerateRequest
	peers    []string // the connection that each request came by
}

// serve starts an orchestrator on a free port of this machine, for the time of the test.
func serve(t *testing.T, script ...leg) *orchestrator {
	t.Helper()
	o := serveOn(t, "tcp", "127.0.0.1:0")
	o.script = script
	return o
}

func serveOn(t *testing.T, network, address string) *orchestrator {
	t.Helper()
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	o := &orchestrator{address: listener.Addr().String(), cancelled: make(chan struct{}, 16)}
	server := grpc.NewServer()
	pb.RegisterOrchestratorServiceServer(server, o)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return o
}

// dial makes a client for the time of the test.
func (o *orchestrator) dial(t *testing.T, options ...paceline.DialOption) *paceline.Client {
	t.Helper()
	client, err := paceline.Dial(o.address, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// asked returns the requests so far.
func (o *orchestrator) asked() []*pb.GenerateRequest {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	return o.requests
}

func (o *orchestrator) next(request *pb.GenerateRequest) leg {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	o.requests = append(o.requests, request)
	if len(o.script) == 0 {
		return leg{}
	}
	now := o.script[0]
	o.script = o.script[1:]
	return now
}

func (o *orchestrator) Generate(request *pb.GenerateRequest, stream pb.OrchestratorService_GenerateServer) error {
	leg := o.next(request)
	if from, known := peer.FromContext(stream.Context()); known {
		o.mutex.Lock()
		o.peers = append(o.peers, from.Addr.String())
		o.mutex.Unlock()
	}
	if leg.refuses {
		return leg.err
	}
	if leg.fingerprint == "" {
		leg.fingerprint = "model-a"
	}
	send := func(response *pb.GenerateResponse) { stream.Send(response) }
	send(started(request, leg))
	for count, index := 0, len(request.GetResumeTokenIds()); index < tokenCount; count, index = count+1, index+1 {
		if count == leg.chunks && leg.err != nil {
			return leg.err
		}
		if count == leg.chunks && leg.hangs {
			<-stream.Context().Done()
			o.cancelled <- struct{}{}
			return status.FromContextError(stream.Context().Err()).Err()
		}
		send(chunk(uint32(promptLength+index), leg))
		if request.GetStreamTimeline() {
			send(drafted())
		}
	}
	if !leg.omitsFinish {
		send(finished())
	}
	return leg.breaksAtEnd
}

func (o *orchestrator) GetSystemInfo(ctx context.Context, _ *pb.GetSystemInfoRequest) (*pb.GetSystemInfoResponse, error) {
	if o.asleep != nil {
		close(o.asleep)
		<-ctx.Done()
	}
	return &pb.GetSystemInfoResponse{
		Version:   "1",
		ModelName: "fake",
		Servers:   []*pb.ServerInfo{{Name: "target-0", Role: pb.ModelRole_MODEL_ROLE_TARGET, Ready: true}},
	}, nil
}

func started(request *pb.GenerateRequest, leg leg) *pb.GenerateResponse {
	message := &pb.GenerationStarted{
		Seed:             seed,
		ModelFingerprint: leg.fingerprint,
		Strategy:         pb.Strategy_STRATEGY_DISTRIBUTED,
		Promise:          pb.VerificationRule_VERIFICATION_RULE_EXACT,
		PromptTokenCount: promptLength,
	}
	return &pb.GenerateResponse{Event: &pb.GenerateResponse_Started{Started: message}}
}

func chunk(position uint32, leg leg) *pb.GenerateResponse {
	message := &pb.GenerationChunk{
		Position: position + leg.shift,
		TokenIds: []uint32{position},
		Text:     fmt.Sprintf("%d ", position),
		Origins:  []pb.TokenOrigin{pb.TokenOrigin_TOKEN_ORIGIN_ACCEPTED_DRAFT, 99},
	}
	return &pb.GenerateResponse{Event: &pb.GenerateResponse_Chunk{Chunk: message}}
}

func drafted() *pb.GenerateResponse {
	message := &pb.TimelineEvent{Kind: pb.TimelineEventKind_TIMELINE_EVENT_KIND_DRAFTED, Server: "drafter-0"}
	return &pb.GenerateResponse{Event: &pb.GenerateResponse_TimelineEvent{TimelineEvent: message}}
}

func finished() *pb.GenerateResponse {
	message := &pb.GenerationFinished{
		FinishReason:         pb.FinishReason_FINISH_REASON_LENGTH,
		Promise:              pb.VerificationRule_VERIFICATION_RULE_EXACT,
		PromptTokenCount:     promptLength,
		CompletionTokenCount: tokenCount,
		Statistics: &pb.GenerationStatistics{
			AcceptanceRate: 0.5,
			TotalNs:        1500,
			Fallbacks:      []*pb.Fallback{{Kind: pb.FallbackKind_FALLBACK_KIND_TARGET_LOST, Count: 1}},
		},
	}
	return &pb.GenerateResponse{Event: &pb.GenerateResponse_Finished{Finished: message}}
}
