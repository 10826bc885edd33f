package paceline

import (
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
)

// So long an endpoint that failed is asked after the others; the time doubles until it answers.
const (
	firstRest   = 100 * time.Millisecond
	longestRest = 10 * time.Second
)

// An endpoint is one address of a client's.
type endpoint struct {
	connection *connection
	leadsToOne bool // one orchestrator is behind it, and not as many as a name says

	// Guarded by the endpoints' mutex.
	running    int // calls of this client that run there
	failures   int
	restsUntil time.Time
}

// endpoints are all of them; requests are spread over those that serve. An endpoint is judged by the
// outcomes of its calls: no call is made for that purpose. Any goroutine may use them.
type endpoints struct {
	all   []*endpoint
	now   func() time.Time
	mutex sync.Mutex
	turn  int
}

// dialEndpoints checks each of the addresses between the commas, and opens a channel to it.
func dialEndpoints(addresses string, options dialOptions) (*endpoints, error) {
	e := &endpoints{now: time.Now}
	for _, address := range strings.Split(addresses, ",") {
		one, err := dialEndpoint(strings.TrimSpace(address), options)
		if err != nil {
			_ = e.close()
			return nil, err
		}
		e.all = append(e.all, one)
	}
	return e, nil
}

func dialEndpoint(address string, options dialOptions) (*endpoint, error) {
	target, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	open, err := routeTo(address, target, options)
	if err != nil {
		return nil, err
	}
	connection, err := newConnection(open)
	if err != nil {
		return nil, err
	}
	return &endpoint{connection: connection, leadsToOne: target.leadsToOne}, nil
}

// mayBeSeveral says whether another orchestrator can continue an unfinished generation.
func (e *endpoints) mayBeSeveral() bool { return len(e.all) > 1 || !e.all[0].leadsToOne }

// lend lends the best one for a call: not asked yet, well, and with the fewest calls. Where all have
// failed, one is asked all the same, and says why.
func (e *endpoints) lend(asked map[*endpoint]bool) (*endpoint, *lease, error) {
	chosen := e.choose(asked)
	wire, err := chosen.connection.lend()
	if err != nil {
		e.giveBack(chosen)
		return nil, nil, err
	}
	wire.atEnd = func() { e.giveBack(chosen) }
	return chosen, wire, nil
}

func (e *endpoints) choose(asked map[*endpoint]bool) *endpoint {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	e.turn++
	now := e.now()
	best := e.all[e.turn%len(e.all)]
	for index := 1; index < len(e.all); index++ {
		each := e.all[(e.turn+index)%len(e.all)]
		if each.before(best, asked, now) {
			best = each
		}
	}
	best.running++
	return best
}

func (e *endpoint) before(other *endpoint, asked map[*endpoint]bool, now time.Time) bool {
	if asked[e] != asked[other] {
		return asked[other]
	}
	if rests := now.Before(e.restsUntil); rests != now.Before(other.restsUntil) {
		return !rests
	}
	return e.running < other.running
}

func (e *endpoints) giveBack(one *endpoint) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	one.running--
}

// answered says that an endpoint does what it should.
func (e *endpoints) answered(one *endpoint) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	one.failures, one.restsUntil = 0, time.Time{}
}

// failed says that an endpoint refused a call, or broke one off: the others come first for a while.
func (e *endpoints) failed(one *endpoint) {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	now := e.now()
	if now.Before(one.restsUntil) {
		return // one of many calls that ended together
	}
	rest := longestRest
	if shift := firstRest << uint(one.failures); one.failures < 10 && shift < longestRest {
		rest = shift
	}
	one.restsUntil = now.Add(rest)
	one.failures++
}

// close closes all connections, and cancels their calls.
func (e *endpoints) close() error {
	var failure error
	for _, each := range e.all {
		if err := each.connection.close(); err != nil {
			failure = err
		}
	}
	return failure
}

// spread makes all that a name leads to be connected to, and take turns.
func spread() grpc.DialOption {
	return grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`)
}
