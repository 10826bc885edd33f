package paceline

import (
	"context"
	"errors"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const domain = "paceline"

// decode turns gRPC's error into the server's: by the reason in the status details, otherwise by the
// code.
func decode(failure error) *Error {
	var known *Error
	if errors.As(failure, &known) {
		return known
	}
	received, isStatus := status.FromError(failure)
	if !isStatus {
		received = status.FromContextError(failure)
	}
	decoded := &Error{Message: received.Message(), cause: failure}
	if decoded.Message == "" {
		decoded.Message = received.Code().String()
	}
	for _, detail := range received.Details() {
		decoded.addDetail(detail)
	}
	switch {
	case decoded.Kind != "":
	case errors.Is(failure, context.Canceled):
		decoded.Kind = ErrClientCancelled
	default:
		decoded.Kind = kindOfCode(received.Code(), decoded.RetryAfter > 0)
	}
	return decoded
}

// addDetail takes in one message of the status details; an error stands for one that is not readable.
func (e *Error) addDetail(detail interface{}) {
	switch detail := detail.(type) {
	case *errdetails.ErrorInfo:
		if kind, known := kindOfReason(detail.GetReason()); known && detail.GetDomain() == domain {
			e.Kind = kind
		}
		e.Metadata = detail.GetMetadata()
	case *errdetails.BadRequest:
		for _, violation := range detail.GetFieldViolations() {
			e.Violations = append(e.Violations, FieldViolation{
				Field:       violation.GetField(),
				Description: violation.GetDescription(),
			})
		}
	case *errdetails.RetryInfo:
		e.RetryAfter = detail.GetRetryDelay().AsDuration()
	}
}

func kindOfReason(reason string) (Kind, bool) {
	for kind, facts := range factsOf {
		if reason != "" && facts.reason == reason {
			return kind, true
		}
	}
	return "", false
}

// kindOfCode is the meaning of a status without a reason of ours: the transport's, a proxy's, a newer
// server's. gRPC itself answers RESOURCE_EXHAUSTED to a message that is too large: the same call would
// fail again. Some of its servers answer CANCELLED to calls that they cut, or that arrive, as they stop;
// for a call that was cancelled here, the context's error is decoded.
func kindOfCode(code codes.Code, mayPass bool) Kind {
	switch code {
	case codes.Canceled:
		return ErrDraining
	case codes.DeadlineExceeded:
		return ErrDeadline
	case codes.InvalidArgument:
		return ErrInvalidField
	case codes.PermissionDenied:
		return ErrPermissionDenied
	case codes.Unauthenticated:
		return ErrUnauthenticated
	case codes.ResourceExhausted:
		if mayPass {
			return ErrOverloaded
		}
		return ErrInvalidField
	case codes.Unavailable:
		return ErrConnectionLost
	case codes.Unimplemented:
		return ErrUnsupported
	}
	return ErrInternal
}
