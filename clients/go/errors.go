package paceline

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A Kind is a class of errors; it says what to do. Kinds are targets of errors.Is:
//
//	if errors.Is(err, paceline.ErrTryAgain) { ... }
//
// They form a tree, and an error is of its kind and of those above it:
//
//	ErrInvalidField               fix the request
//	└── ErrContextLengthExceeded
//	ErrMalformedRequest           fix the client
//	ErrUnsupported                leave it out, or ask another server
//	ErrPermissionDenied           fix the credentials
//	└── ErrUnauthenticated        send the credential that it names
//	ErrSession                    an orchestrator repairs it by itself
//	├── ErrSessionNotFound
//	├── ErrPrefixNotHeld
//	├── ErrPrefixMismatch
//	├── ErrStaleCall
//	└── ErrSuperseded
//	ErrModelMismatch              pick another server
//	ErrModelNotFound              ask for another LoRA adapter, or for none
//	ErrTokenizerMismatch          pair other models
//	ErrTryAgain                   retry after RetryAfter, or elsewhere
//	├── ErrCacheExhausted
//	├── ErrOverloaded
//	├── ErrLoading
//	├── ErrDraining
//	├── ErrNoTarget
//	└── ErrConnectionLost         has no reason on the wire: the transport broke
//	ErrDeadline                   resume, with a later deadline
//	└── ErrSlowConsumer           resume, and read faster
//	ErrClientCancelled
//	ErrInvariantViolated          report it
//	ErrInternal                   report it
//
// An ErrDeadline is also a context.DeadlineExceeded, and an ErrClientCancelled a context.Canceled,
// whichever side noticed first.
type Kind string

// The kinds. ErrSession and ErrTryAgain only group: no error is of them alone.
const (
	ErrInvalidField          Kind = "InvalidField"
	ErrContextLengthExceeded Kind = "ContextLengthExceeded"
	ErrMalformedRequest      Kind = "MalformedRequest"
	ErrUnsupported           Kind = "Unsupported"
	ErrPermissionDenied      Kind = "PermissionDenied"
	ErrUnauthenticated       Kind = "Unauthenticated"
	ErrSession               Kind = "Session"
	ErrSessionNotFound       Kind = "SessionNotFound"
	ErrPrefixNotHeld         Kind = "PrefixNotHeld"
	ErrPrefixMismatch        Kind = "PrefixMismatch"
	ErrStaleCall             Kind = "StaleCall"
	ErrSuperseded            Kind = "Superseded"
	ErrModelMismatch         Kind = "ModelMismatch"
	ErrModelNotFound         Kind = "ModelNotFound"
	ErrTokenizerMismatch     Kind = "TokenizerMismatch"
	ErrTryAgain              Kind = "TryAgain"
	ErrCacheExhausted        Kind = "CacheExhausted"
	ErrOverloaded            Kind = "Overloaded"
	ErrLoading               Kind = "Loading"
	ErrDraining              Kind = "Draining"
	ErrNoTarget              Kind = "NoTarget"
	ErrConnectionLost        Kind = "ConnectionLost"
	ErrDeadline              Kind = "Deadline"
	ErrSlowConsumer          Kind = "SlowConsumer"
	ErrClientCancelled       Kind = "ClientCancelled"
	ErrInvariantViolated     Kind = "InvariantViolated"
	ErrInternal              Kind = "Internal"
)

// kindFacts are a kind's code and reason on the wire, the kind above it, and the advice.
type kindFacts struct {
	code   codes.Code
	reason string
	parent Kind
	advice string
}

// factsOf is never written to.
var factsOf = map[Kind]kindFacts{
	ErrInvalidField:          {codes.InvalidArgument, "INVALID_FIELD", "", "fix the request"},
	ErrContextLengthExceeded: {codes.InvalidArgument, "CONTEXT_LENGTH_EXCEEDED", ErrInvalidField, "fix the request"},
	ErrMalformedRequest:      {codes.InvalidArgument, "MALFORMED_REQUEST", "", "fix the client"},
	ErrUnsupported:           {codes.Unimplemented, "UNSUPPORTED", "", "leave it out, or ask another server"},
	ErrPermissionDenied:      {codes.PermissionDenied, "PERMISSION_DENIED", "", "fix the credentials"},
	ErrUnauthenticated:       {codes.Unauthenticated, "UNAUTHENTICATED", ErrPermissionDenied, "send the credential that it names"},
	ErrSessionNotFound:       {codes.NotFound, "SESSION_NOT_FOUND", ErrSession, "open a session, send the whole prefix"},
	ErrPrefixNotHeld:         {codes.OutOfRange, "PREFIX_NOT_HELD", ErrSession, "call again with a base_length that is held"},
	ErrPrefixMismatch:        {codes.FailedPrecondition, "PREFIX_MISMATCH", ErrSession, "call again with the whole prefix"},
	ErrStaleCall:             {codes.Aborted, "STALE_CALL", ErrSession, "drop this call"},
	ErrSuperseded:            {codes.Aborted, "SUPERSEDED", ErrSession, "drop this call"},
	ErrModelMismatch:         {codes.FailedPrecondition, "MODEL_MISMATCH", "", "pick another server"},
	ErrModelNotFound:         {codes.NotFound, "MODEL_NOT_FOUND", "", "ask for another LoRA adapter, or for none"},
	ErrTokenizerMismatch:     {codes.FailedPrecondition, "TOKENIZER_MISMATCH", "", "pair other models"},
	ErrCacheExhausted:        {codes.ResourceExhausted, "CACHE_EXHAUSTED", ErrTryAgain, "retry, or go elsewhere"},
	ErrOverloaded:            {codes.ResourceExhausted, "OVERLOADED", ErrTryAgain, "retry, or go elsewhere"},
	ErrLoading:               {codes.Unavailable, "LOADING", ErrTryAgain, "retry, or go elsewhere"},
	ErrDraining:              {codes.Unavailable, "DRAINING", ErrTryAgain, "retry, or go elsewhere"},
	ErrNoTarget:              {codes.Unavailable, "NO_TARGET", ErrTryAgain, "retry, or go elsewhere"},
	ErrConnectionLost:        {codes.Unavailable, "", ErrTryAgain, "retry, or go elsewhere; is the address right?"},
	ErrDeadline:              {codes.DeadlineExceeded, "DEADLINE", "", "resume, with a later deadline"},
	ErrSlowConsumer:          {codes.DeadlineExceeded, "SLOW_CONSUMER", ErrDeadline, "resume, and read faster"},
	ErrClientCancelled:       {codes.Canceled, "CLIENT_CANCELLED", "", "resume, if it was a mistake"},
	ErrInvariantViolated:     {codes.DataLoss, "INVARIANT_VIOLATED", "", "report it"},
	ErrInternal:              {codes.Internal, "INTERNAL", "", "report it"},
}

// Error is the kind's name, for a Kind as the target of errors.Is.
func (k Kind) Error() string { return "paceline: " + string(k) }

// Advice says in a few words what to do.
func (k Kind) Advice() string { return factsOf[k].advice }

// A FieldViolation is a field out of its limits: its path in the request, and the fault.
type FieldViolation struct {
	Field       string
	Description string
}

// An Error is the error of any call of this package.
type Error struct {
	// Kind is the class of the error.
	Kind Kind
	// Message is for people.
	Message string
	// Metadata has more facts, as google.rpc.ErrorInfo; never prompts, tokens or handles.
	Metadata map[string]string
	// Violations lists the wrong fields of an ErrInvalidField.
	Violations []FieldViolation
	// RetryAfter is the time until a retry is useful; 0 if the server did not say.
	RetryAfter time.Duration

	cause error
}

// Error is the message, with the kind's name before it.
func (e *Error) Error() string { return e.Kind.Error() + ": " + e.Message }

// Unwrap is the cause of the failure, such as a gRPC status or a context's error; nil where this package
// found the fault itself.
func (e *Error) Unwrap() error { return e.cause }

// Code is the gRPC status code that belongs to the kind.
func (e *Error) Code() codes.Code { return factsOf[e.Kind].code }

// Reason is the kind's name on the wire: an ErrorReason without its prefix. It is empty for an
// ErrConnectionLost, which no server says.
func (e *Error) Reason() string { return factsOf[e.Kind].reason }

// TryAgain says whether the same call may work in a moment, here or at another orchestrator.
func (e *Error) TryAgain() bool { return e.Is(ErrTryAgain) }

// Is makes errors.Is true for the error's kind, and for the kinds above it.
func (e *Error) Is(target error) bool {
	for kind := e.Kind; kind != ""; kind = factsOf[kind].parent {
		if target == error(kind) {
			return true
		}
		if kind == ErrDeadline && target == context.DeadlineExceeded {
			return true
		}
	}
	return e.Kind == ErrClientCancelled && target == context.Canceled
}

// GRPCStatus lets status.Code and status.FromError understand the error.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code(), e.Message) }

func invalidField(field, description string) *Error {
	return &Error{
		Kind:       ErrInvalidField,
		Message:    field + ": " + description,
		Violations: []FieldViolation{{Field: field, Description: description}},
	}
}
