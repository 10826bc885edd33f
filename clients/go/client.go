package paceline

import (
	"context"
	"errors"
	"sync"
	"time"

	pb "github.com/paceline/paceline/clients/go/paceline/v1"
)

// A Client is a client of one or several orchestrators. Any number of goroutines can use it, and any number of
// generations can run at once.
type Client struct {
	endpoints *endpoints
	options   dialOptions
	budget    *retryBudget
	timeout   time.Duration
	closed    chan struct{}
	close     sync.Once
}

// Dial makes a client of the orchestrators at address: HOST:PORT, also as dns:///HOST:PORT, or
// unix:PATH, or several of them between commas. A name can lead to several, too. It connects in the
// background.
//
// The client spreads requests over the orchestrators that serve. A generation that one of them leaves
// unfinished continues at another: under EXACT with the text that it would have had there.
//
// It fails with ErrInvalidField if an address is malformed, a TLS file is unusable, the timeout is
// negative, or plaintext would leave this machine without `insecure`.
func Dial(address string, options ...DialOption) (*Client, error) {
	chosen := dialOptions{timeout: DefaultTimeout}
	for _, option := range options {
		option(&chosen)
	}
	timeout, err := checkTimeout(chosen.timeout)
	if err != nil {
		return nil, err
	}
	endpoints, err := dialEndpoints(address, chosen)
	if err != nil {
		return nil, err
	}
	return &Client{
		endpoints: endpoints,
		options:   chosen,
		budget:    newRetryBudget(),
		timeout:   timeout,
		closed:    make(chan struct{}),
	}, nil
}

// Generate continues a prompt. The request is sent by the stream's first Next, and the deadline, for
// all of it, is the context's or the client's timeout from now. Cancelling the context cancels the
// generation.
//
// It fails with ErrInvalidField if an option has a value that cannot be sent. All other errors, the
// stream's Err tells.
func (c *Client) Generate(ctx context.Context, prompt Prompt, options ...GenerateOption) (*Stream, error) {
	g, err := newGeneration(prompt, options)
	if err != nil {
		return nil, err
	}
	return c.stream(ctx, &transcript{request: g.request}, g), nil
}

// Resume goes on with a generation that was left or broken, here or at another orchestrator; Next must
// not be running. Next gives the missing part, Collect and Text give the whole.
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
	return c.stream(ctx, broken.transcript.branch(), g), nil
}

// Info describes the models and servers the orchestrator works with now. It asks one orchestrator
// after the other until one answers.
func (c *Client) Info(ctx context.Context) (*SystemInfo, error) {
	ctx, cancel := c.deadline(ctx)
	defer cancel()
	plan := newFailover(len(c.endpoints.all), c.budget)
	for {
		at, info, err := c.askOne(ctx, plan.asked)
		var failure *Error
		if err == nil || !errors.As(err, &failure) || !failure.TryAgain() {
			return info, err
		}
		c.endpoints.failed(at)
		plan.at = at
		if again, over := c.resent(ctx, plan, failure); over != nil {
			return nil, over
		} else if again {
			continue
		}
		plan.asked[at] = true
		if len(plan.asked) == len(c.endpoints.all) {
			return nil, err
		}
	}
}

// resent waits until a refused stream is to be sent again; false if it is not.
func (c *Client) resent(ctx context.Context, plan *resumption, failure *Error) (bool, error) {
	deadline, _ := ctx.Deadline()
	pause, again := plan.resend(failure, time.Until(deadline))
	if !again {
		return false, nil
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true, nil
	case <-ctx.Done():
		return false, decode(ctx.Err())
	case <-c.closed:
		return false, clientClosed()
	}
}

func (c *Client) askOne(ctx context.Context, asked map[*endpoint]bool) (*endpoint, *SystemInfo, error) {
	along, err := c.options.alongWith(ctx)
	if err != nil {
		return nil, nil, err
	}
	at, wire, err := c.endpoints.lend(asked)
	if err != nil {
		return nil, nil, err
	}
	defer wire.end()
	response, err := wire.stub.GetSystemInfo(along, &pb.GetSystemInfoRequest{})
	if err != nil {
		return at, nil, wire.decode(ctx, err)
	}
	return at, readSystemInfo(response), nil
}

// Close closes the connections, and cancels the calls on them.
func (c *Client) Close() error {
	c.close.Do(func() { close(c.closed) })
	return c.endpoints.close()
}

func (c *Client) stream(ctx context.Context, t *transcript, g *generation) *Stream {
	ctx, cancel := c.deadline(ctx)
	plan := newResumption(g.resumeAttempts, c.budget)
	if !g.countsAttempts && c.endpoints.mayBeSeveral() {
		plan = newFailover(len(c.endpoints.all), c.budget)
	}
	plan.endpointCount = len(c.endpoints.all)
	return &Stream{
		ctx:        ctx,
		cancel:     cancel,
		client:     c,
		transcript: t,
		resumption: plan,
	}
}

// deadline returns a context with the client's deadline, if it has none of its own.
func (c *Client) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, c.timeout)
}
