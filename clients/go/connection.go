package paceline

import (
	"context"
	"sync"

	"google.golang.org/grpc"

	pb "github.com/paceline/paceline/clients/go/paceline/v1"
)

// A connection is a client's way to its orchestrator, which can be taken again while calls run on the
// old one: an orchestrator that shuts down lets running calls finish and refuses new ones, and its
// clients leave it for the one that its name leads to then. Any goroutine may use it.
type connection struct {
	open func() (*grpc.ClientConn, error)

	mutex   sync.Mutex
	current *wire
	wires   map[*wire]bool // all that are open
	closed  bool
}

// A wire is one channel, and how many calls run on it.
type wire struct {
	channel *grpc.ClientConn
	stub    pb.OrchestratorServiceClient
	calls   int
	left    bool
}

// A lease keeps a wire open for one call.
type lease struct {
	*wire
	connection *connection
	release    sync.Once
	atEnd      func()
}

// newConnection opens the first channel, which connects in the background.
func newConnection(open func() (*grpc.ClientConn, error)) (*connection, error) {
	c := &connection{open: open, wires: make(map[*wire]bool)}
	if err := c.renew(); err != nil {
		return nil, err
	}
	return c, nil
}

// lend lends the wire for new calls. It fails once the connection is closed.
func (c *connection) lend() (*lease, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.closed {
		return nil, clientClosed()
	}
	if c.current.left {
		if err := c.renew(); err != nil {
			return nil, err
		}
	}
	c.current.calls++
	return &lease{wire: c.current, connection: c}, nil
}

// renew takes a new channel for the calls that follow.
func (c *connection) renew() error {
	channel, err := c.open()
	if err != nil {
		return err
	}
	c.current = &wire{channel: channel, stub: pb.NewOrchestratorServiceClient(channel)}
	c.wires[c.current] = true
	return nil
}

// close closes every wire, and cancels its calls.
func (c *connection) close() error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.closed = true
	var failure error
	for each := range c.wires {
		if err := each.channel.Close(); err != nil {
			failure = err
		}
		delete(c.wires, each)
	}
	return failure
}

// decode says why the call ended; after DRAINING the next call connects again. To gRPC a cancel of this
// side and one by the server are the same.
func (l *lease) decode(ctx context.Context, failure error) *Error {
	if ctx.Err() == context.Canceled {
		failure = context.Canceled
	}
	decoded := decode(failure)
	l.connection.mutex.Lock()
	defer l.connection.mutex.Unlock()
	if l.connection.closed {
		return clientClosed()
	}
	if decoded.Kind == ErrDraining {
		l.left = true
	}
	return decoded
}

// end gives the wire back. A second call does nothing.
func (l *lease) end() {
	l.release.Do(func() {
		if l.atEnd != nil {
			l.atEnd()
		}
		c := l.connection
		c.mutex.Lock()
		defer c.mutex.Unlock()
		l.calls--
		if l.left && l.calls == 0 && c.wires[l.wire] {
			delete(c.wires, l.wire)
			_ = l.channel.Close() // no call runs on it
		}
	})
}
