package paceline

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/paceline/paceline/clients/go/paceline/v1"
)

func withReason(reason string, code codes.Code) error {
	return withDetails(code, &errdetails.ErrorInfo{Reason: reason, Domain: domain, Metadata: map[string]string{"k": "v"}})
}

// A message is what every release of grpc-go takes for a detail, under names of its own.
type message interface {
	Reset()
	String() string
	ProtoMessage()
}

func withDetails(code codes.Code, details ...message) error {
	detailed := status.New(code, "words")
	for _, detail := range details {
		var err error
		if detailed, err = detailed.WithDetails(detail); err != nil {
			panic(err)
		}
	}
	return detailed.Err()
}

func TestEveryReasonOfTheWireHasAKind(t *testing.T) {
	for number, name := range pb.ErrorReason_name {
		if number == 0 {
			continue
		}
		reason := strings.TrimPrefix(name, "ERROR_REASON_")
		failure := decode(withReason(reason, codes.Unknown))
		if failure.Reason() != reason || failure.Metadata["k"] != "v" || failure.Message != "words" {
			t.Errorf("%s became %+v", reason, failure)
		}
		if failure.Kind.Advice() == "" || failure.Code() == codes.OK || status.Code(failure) != failure.Code() {
			t.Errorf("%s has no advice or code", failure.Kind)
		}
	}
}

func TestDetailsAreDecoded(t *testing.T) {
	violation := &errdetails.BadRequest_FieldViolation{Field: "max_tokens", Description: "must be 1 or more"}
	failure := decode(withDetails(codes.InvalidArgument,
		&errdetails.ErrorInfo{Reason: "CONTEXT_LENGTH_EXCEEDED", Domain: domain},
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{violation}},
	))
	if len(failure.Violations) != 1 || failure.Violations[0] != (FieldViolation{"max_tokens", "must be 1 or more"}) {
		t.Fatalf("the error is %+v", failure)
	}
	if !errors.Is(failure, ErrContextLengthExceeded) || !errors.Is(failure, ErrInvalidField) || errors.Is(failure, ErrTryAgain) {
		t.Fatalf("the error is %+v", failure)
	}
}

func TestTheServersDelayIsToldAndUsed(t *testing.T) {
	retry := &errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)}
	failure := decode(withDetails(codes.ResourceExhausted, &errdetails.ErrorInfo{Reason: "OVERLOADED", Domain: domain}, retry))
	if failure.RetryAfter != 1500*time.Millisecond || !failure.TryAgain() {
		t.Fatalf("the error is %+v", failure)
	}
	delay, worthwhile := newResumption(1, still()).delay(failure, false, time.Minute)
	if delay != 1500*time.Millisecond || !worthwhile {
		t.Fatalf("delay %v, worthwhile %v", delay, worthwhile)
	}
}

func TestAnErrorUnwrapsToWhatTheCallFailedWith(t *testing.T) {
	cause := status.Error(codes.Unavailable, "gone")
	if failure := decode(cause); !errors.Is(failure, cause) || errors.Unwrap(failure) != cause {
		t.Fatalf("%v unwraps to %v", failure, errors.Unwrap(failure))
	}
	if errors.Unwrap(invalidField("top_p", "is odd")) != nil {
		t.Fatal("what this package found itself has another cause")
	}
}

func TestAnUnknownReasonFallsBackToTheCode(t *testing.T) {
	for code, kind := range map[codes.Code]Kind{
		codes.Canceled:          ErrDraining,
		codes.DeadlineExceeded:  ErrDeadline,
		codes.InvalidArgument:   ErrInvalidField,
		codes.PermissionDenied:  ErrPermissionDenied,
		codes.ResourceExhausted: ErrInvalidField,
		codes.Unauthenticated:   ErrUnauthenticated,
		codes.Unavailable:       ErrConnectionLost,
		codes.Unimplemented:     ErrUnsupported,
		codes.NotFound:          ErrInternal,
	} {
		if failure := decode(withReason("NEWER", code)); failure.Kind != kind {
			t.Errorf("%v became %v", code, failure.Kind)
		}
	}
}

func TestAReasonOfAnotherDomainIsNotOurs(t *testing.T) {
	failure := decode(withDetails(codes.Unavailable, &errdetails.ErrorInfo{Reason: "INTERNAL", Domain: "elsewhere"}))
	if failure.Kind != ErrConnectionLost {
		t.Fatalf("the error is %+v", failure)
	}
}

func TestErrorsWithoutAStatusAreDecoded(t *testing.T) {
	for cause, kind := range map[error]Kind{
		context.Canceled:         ErrClientCancelled,
		context.DeadlineExceeded: ErrDeadline,
		io.ErrUnexpectedEOF:      ErrInternal,
	} {
		if failure := decode(cause); failure.Kind != kind {
			t.Errorf("%v became %v", cause, failure.Kind)
		}
	}
}

func TestSlowConsumersAndDeadlinesAreContextErrors(t *testing.T) {
	if failure := decode(withReason("SLOW_CONSUMER", codes.DeadlineExceeded)); !errors.Is(failure, context.DeadlineExceeded) {
		t.Fatalf("%v is no deadline", failure)
	}
	if failure := decode(withReason("DRAINING", codes.Unavailable)); errors.Is(failure, context.Canceled) {
		t.Fatalf("%v is a cancellation", failure)
	}
}
