package paceline

import (
	"context"
	"errors"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/resolver"
)

// DNS is asked again when a connection ends. grpc-go's own resolver waits 30 s between two queries: new
// pods would not be found for so long. The option for this is newer than grpc-go 1.33 and holds for the
// whole process, so this client has a resolver of its own.
const leastBetweenLookups = time.Second

// A name is the name that DNS is asked for.
type name struct {
	host, port string
	server     string // which name server, HOST:PORT; empty: the system's
}

// lookUps makes a channel look a name up as this file says.
func (n name) lookUps() grpc.DialOption { return grpc.WithResolvers(n) }

// nameOf returns the name that DNS is asked for: "HOST:PORT", or "//SERVER/HOST:PORT" as gRPC has it.
func nameOf(address string) name {
	slash := strings.LastIndex(address, "/")
	server := strings.Trim(address[:slash+1], "/")
	if _, _, err := net.SplitHostPort(server); err != nil && server != "" {
		server = net.JoinHostPort(server, "53")
	}
	host, port, _ := net.SplitHostPort(address[slash+1:]) // it has been checked
	return name{host: host, port: port, server: server}
}

// Scheme is the scheme of the targets that it resolves.
func (n name) Scheme() string { return "dns" }

// Build begins to look the name up.
func (n name) Build(_ resolver.Target, tell resolver.ClientConn, _ resolver.BuildOptions) (resolver.Resolver, error) {
	ctx, cancel := context.WithCancel(context.Background())
	l := &lookups{name: n, tell: tell, cancel: cancel, again: make(chan struct{}, 1), over: make(chan struct{})}
	go l.follow(ctx)
	return l, nil
}

// lookups follow a name's addresses, for one channel.
type lookups struct {
	name   name
	tell   resolver.ClientConn
	cancel context.CancelFunc
	again  chan struct{}
	over   chan struct{}
}

// ResolveNow asks again, as soon as that may be.
func (l *lookups) ResolveNow(resolver.ResolveNowOptions) {
	select {
	case l.again <- struct{}{}:
	default: // a lookup is already pending
	}
}

// Close ends it.
func (l *lookups) Close() {
	l.cancel()
	<-l.over
}

func (l *lookups) follow(ctx context.Context) {
	defer close(l.over)
	for ctx.Err() == nil {
		hosts, err := l.name.resolver().LookupHost(ctx, l.name.host)
		if ctx.Err() != nil {
			return
		}
		if err == nil && len(hosts) == 0 {
			err = errors.New(l.name.host + " leads nowhere")
		}
		again := l.again
		if err != nil {
			l.tell.ReportError(err)
			again = nil // the next attempt needs no request
		} else {
			l.tell.UpdateState(resolver.State{Addresses: l.name.addresses(hosts)})
		}
		rest := time.NewTimer(leastBetweenLookups)
		select {
		case <-ctx.Done():
		case <-rest.C:
		}
		rest.Stop()
		if again != nil {
			select {
			case <-ctx.Done():
			case <-again:
			}
		}
	}
}

func (n name) addresses(hosts []string) []resolver.Address {
	found := make([]resolver.Address, 0, len(hosts))
	for _, host := range hosts {
		found = append(found, resolver.Address{Addr: net.JoinHostPort(host, n.port)})
	}
	return found
}

func (n name) resolver() *net.Resolver {
	if n.server == "" {
		return net.DefaultResolver
	}
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, n.server)
	}}
}
