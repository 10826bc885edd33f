package paceline

import (
	"context"
	"sync"
	"time"

	pb "github.com/paceline/paceline/clients/go/paceline/v1"
)

// A Client is a client of one orchestrator. Any number of goroutines can use it, and any number of
// generations can run at once.
type Client struct {
	connection *connection
	budget     *retryBudget
	timeout    time.Duration
	closed     chan struct{}
	close      sync.Once
}

// Dial makes a client of the orchestrator at address: HOST:PORT, also as dns:///HOST:PORT, or
// unix:PATH. It connects in the background.
//
// It fails with ErrInvalidField if the address is malformed, a TLS file is unusable, the timeout is
// negative, or plaintext would leave this machine unasked.
func Dial(address string, options ...DialOption) (*Client, error) {
	chosen := dialOptions{timeout: DefaultTimeout}
	for _, option := range options {
		option(&chosen)
	}
	timeout, err := checkTimeout(chosen.timeout)
	if err != nil {
		return nil, err
	}
	open, err := routeTo(address, chosen)
	if err != nil {
		return nil, err
	}
	connection, err := newConnection(open)
	if err != nil {
		return nil, err
	}
	return &Client{connection: connection, budget: newRetryBudget(), timeout: timeout, closed: make(chan struct{})}, nil
}

// Generate continues a prompt. The request is sent by the stream's first Next, and the deadline, for
// all of it, is the context's or the client's timeout from now. Cancelling the context cancels the
// generation.
//
// It fails with ErrInvalidField if an option has a value that cannot be sent. What else goes wrong,
// the stream's Err tells.
func (c *Client) Generate(ctx context.Context, prompt Prompt, options ...GenerateOption) (*Stream, error) {
	g, err := newGeneration(prompt, options)
	if err != nil {
		return nil, err
	}
	return c.stream(ctx, &transcript{request: g.request}, g.resumeAttempts), nil
}

// Resume goes on with a generation that was left or broken, here or at another orchestrator; Next must
// not be running. Next gives what is missing, Collect and Text give the whole.
func (c *Client) Resume(ctx context.Context, broken *Stream, options ...ResumeOption) (*Stream, error) {
	g := &generation{}
	if broken == nil {
		return nil, invalidField("generation", "must be the stream to go on with, not nil")
	}
	for _, option := range options {
		if err := option.applyTo(g); err != nil {
			return nil, err
		}
	}
	return c.stream(ctx, broken.transcript.branch(), g.resumeAttempts), nil
}

// SystemInfo describes the models and servers the orchestrator works with now.
func (c *Client) SystemInfo(ctx context.Context) (*SystemInfo, error) {
	ctx, cancel := c.deadline(ctx)
	defer cancel()
	wire, err := c.connection.lend()
	if err != nil {
		return nil, err
	}
	defer wire.end()
	response, err := wire.stub.GetSystemInfo(ctx, &pb.GetSystemInfoRequest{})
	if err != nil {
		return nil, wire.decode(ctx, err)
	}
	return readSystemInfo(response), nil
}

// Close closes the connection, and cancels what runs on it.
func (c *Client) Close() error {
	c.close.Do(func() { close(c.closed) })
	return c.connection.close()
}

func (c *Client) stream(ctx context.Context, t *transcript, resumeAttempts int) *Stream {
	ctx, cancel := c.deadline(ctx)
	return &Stream{
		ctx:        ctx,
		cancel:     cancel,
		client:     c,
		transcript: t,
		resumption: newResumption(resumeAttempts, c.budget),
	}
}

// deadline returns a context with the client's deadline, if it has none of its own.
func (c *Client) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, c.timeout)
}
