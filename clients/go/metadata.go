package paceline

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"google.golang.org/grpc/metadata"
)

var (
	metadataName  = regexp.MustCompile(`^[0-9a-z_.-]+$`)
	metadataValue = regexp.MustCompile(`^[ -~]*$`) // printable ASCII, as gRPC's headers are
	bearerToken   = regexp.MustCompile(`^[!-~]+$`)
)

// WithMetadata sets the metadata of every call. The metadata of a single call is in its context:
// metadata.AppendToOutgoingContext of grpc-go puts it there.
func WithMetadata(pairs map[string]string) DialOption {
	return WithMetadataFunc(func(context.Context) map[string]string { return pairs })
}

// WithMetadataFunc sets a function that returns the metadata of each call, from the call's context, such
// as the current trace's traceparent.
func WithMetadataFunc(source func(context.Context) map[string]string) DialOption {
	return func(o *dialOptions) { o.metadata = source }
}

// WithToken sets a function that is called for each call, resumptions included: its result is sent as
// "authorization: Bearer ...". If it fails, the call fails with an ErrPermissionDenied around that, or
// as it does elsewhere if its context has ended.
func WithToken(source func(context.Context) (string, error)) DialOption {
	return func(o *dialOptions) { o.token = source }
}

// alongWith returns the context with all metadata of a call. Errors never show values: they may be
// secret.
func (o *dialOptions) alongWith(ctx context.Context) (context.Context, error) {
	if own, _ := metadata.FromOutgoingContext(ctx); own != nil {
		for name, values := range own {
			for _, value := range values {
				if err := checkMetadata(name, value); err != nil {
					return nil, err
				}
			}
		}
	}
	if o.metadata != nil {
		for name, value := range o.metadata(ctx) {
			if err := checkMetadata(name, value); err != nil {
				return nil, err
			}
			ctx = metadata.AppendToOutgoingContext(ctx, name, value)
		}
	}
	if o.token == nil {
		return ctx, nil
	}
	token, err := o.token(ctx)
	if err != nil && ctx.Err() != nil {
		return nil, decode(ctx.Err())
	}
	if err != nil {
		return nil, &Error{Kind: ErrPermissionDenied, Message: "there is no token: " + err.Error(), cause: err}
	}
	if !bearerToken.MatchString(token) {
		return nil, invalidField("token", "must be printable ASCII without spaces")
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token), nil
}

func checkMetadata(name, value string) error {
	lower := strings.ToLower(name)
	if !metadataName.MatchString(lower) || strings.HasPrefix(lower, "grpc-") {
		return invalidField("metadata", fmt.Sprintf("%q is not a metadata name: use letters, digits, - _ . and no prefix grpc-", name))
	}
	if !strings.HasSuffix(lower, "-bin") && !metadataValue.MatchString(value) {
		return invalidField("metadata", name+": must be printable ASCII")
	}
	return nil
}
