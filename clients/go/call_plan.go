package paceline

import (
	"fmt"
	"math/rand"
	"regexp"
	"sync"
	"time"
)

const (
	firstDelay   = 100 * time.Millisecond
	longestDelay = 2 * time.Second

	// A wait is longer by a random part: up to half of it, and up to a second. Clients that were
	// refused together do not come back together.
	longestJitter = time.Second

	// More than any generation takes.
	longestTimeout = 7 * 24 * time.Hour

	// An orchestrator that drains answers so for moments, until its name leads elsewhere.
	refusals = 3

	// A stream that a server refuses before it reads anything of it (REFUSED_STREAM: too many at once on
	// one connection) is sent again as often, 13 s in all.
	resends = 10

	// Where a stream goes on at others by itself, all of them are asked so often without any text: from
	// one that has begun more is lost with it, and one that nobody has heard of is better told.
	rounds        = 30
	roundsUnheard = 2

	// As many streams as one connection carries can break at once and all go on at once. After that a
	// client knocks at most ten times a second, however many of its generations want to.
	retriesAtOnce = 100
	retryInterval = 100 * time.Millisecond
)

// refusedStream is how gRPC's libraries, and proxies, say REFUSED_STREAM, HTTP/2's error 7; no reason
// stands beside it. The last is grpc-go's own word for a stream that it never sent, since the server has
// said goodbye meanwhile.
var refusedStream = regexp.MustCompile(
	`(?i)refused[ _]stream|stream refused|RST_STREAM.*error code:? 7\b|^the connection is draining$`)

// isRefusedStream says whether a server took no more streams on a connection that stands: nobody began
// to work.
func isRefusedStream(broken *Error) bool {
	return broken.Kind == ErrConnectionLost && refusedStream.MatchString(broken.Message)
}

// checkTimeout cuts a timeout to a week, and fails with ErrInvalidField if it is negative.
func checkTimeout(timeout time.Duration) (time.Duration, error) {
	if timeout < 0 {
		return 0, invalidField("timeout", fmt.Sprintf("must not be negative, as %v is", timeout))
	}
	if timeout > longestTimeout {
		return longestTimeout, nil
	}
	return timeout, nil
}

// A retryBudget limits how often a client's generations retry, all of them together.
//
// It makes them wait rather than fail: when an orchestrator dies, all its streams have a right to go
// on elsewhere, but not to knock at a closed door in chorus. Any goroutine may use it.
type retryBudget struct {
	now    func() time.Time
	mutex  sync.Mutex
	nextAt time.Time      // when one retry a time, without pause, would be due
	chance func() float64 // from [0, 1)
}

func newRetryBudget() *retryBudget {
	// A source of its own: before Go 1.20 the package's is the same in every process.
	source := rand.New(rand.NewSource(time.Now().UnixNano()))
	return &retryBudget{now: time.Now, chance: source.Float64}
}

// take takes the next place, and returns how long until it; false, and no place, if that is too long.
func (b *retryBudget) take(within time.Duration) (time.Duration, bool) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	now := b.now()
	at := now.Add(-(retriesAtOnce - 1) * retryInterval)
	if b.nextAt.After(at) {
		at = b.nextAt
	}
	wait := at.Sub(now)
	if wait < 0 {
		wait = 0
	}
	if wait >= within {
		return 0, false
	}
	b.nextAt = at.Add(retryInterval)
	return wait, true
}

// jittered lengthens a delay by chance; one that no timeout outlasts stays, so that it cannot overflow.
func (b *retryBudget) jittered(delay time.Duration) time.Duration {
	if delay >= longestTimeout {
		return delay
	}
	most := delay / 2
	if most > longestJitter {
		most = longestJitter
	}
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return delay + time.Duration(b.chance()*float64(most))
}

// around draws from half a delay to one and a half.
func (b *retryBudget) around(delay time.Duration) time.Duration {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return time.Duration((0.5 + b.chance()) * float64(delay))
}

// A resumption is how often, and how soon, to go on by itself.
type resumption struct {
	attemptsLeft int
	isFailover   bool // not so many attempts, but until all orchestrators were asked in vain
	refusalsLeft int
	resendCount  int
	nextDelay    time.Duration
	budget       *retryBudget

	endpointCount int
	at            *endpoint          // the endpoint that is asked now
	asked         map[*endpoint]bool // endpoints that failed since the last text; the others come first
	rounds        int
	heard         bool
}

func newResumption(attempts int, budget *retryBudget) *resumption {
	return &resumption{
		attemptsLeft:  attempts,
		refusalsLeft:  refusals,
		nextDelay:     firstDelay,
		budget:        budget,
		endpointCount: 1,
		asked:         make(map[*endpoint]bool),
	}
}

// newFailover goes on until all of so many endpoints have been asked in vain, again and again.
func newFailover(endpointCount int, budget *retryBudget) *resumption {
	r := newResumption(0, budget)
	r.isFailover, r.endpointCount = true, endpointCount
	return r
}

// hear notes that text has come: endpoints that failed earlier may be asked again.
func (r *resumption) hear() {
	r.heard, r.rounds, r.resendCount = true, 0, 0
	r.forget()
	if r.isFailover {
		r.nextDelay = firstDelay
	}
}

func (r *resumption) forget() {
	for each := range r.asked {
		delete(r.asked, each)
	}
}

// delay says how long to wait before going on after an error; false if that makes no sense. Where another
// orchestrator is left, nothing is waited for. A call was refused if nothing of it had come: asking
// another orchestrator than one that is shutting down is then no resumption, and not counted as one.
func (r *resumption) delay(broken *Error, refused bool, remaining time.Duration) (time.Duration, bool) {
	if refused {
		if pause, again := r.resend(broken, remaining); again {
			return pause, true
		}
	}
	r.asked[r.at] = true
	another := len(r.asked) < r.endpointCount
	if !r.mayGoOn(broken, refused, another) {
		return 0, false
	}
	var delay time.Duration
	if !another {
		r.forget()
		delay = r.roundDelay(broken)
	}
	if delay >= remaining {
		return 0, false
	}
	wait, inTime := r.budget.take(remaining)
	if wait > delay {
		delay = wait
	}
	return delay, inTime
}

// resend says how long to wait before a refused stream is sent again, which is no resumption, nor counted
// as one; false if it was not refused, or was too often, or there is no time. The pauses are random and no
// place of the budget is taken: the server is well, and those that it refused come back one by one.
func (r *resumption) resend(broken *Error, remaining time.Duration) (time.Duration, bool) {
	if !isRefusedStream(broken) || r.resendCount == resends {
		return 0, false
	}
	delay := firstDelay << uint(r.resendCount)
	if delay > longestDelay {
		delay = longestDelay
	}
	pause := r.budget.around(delay)
	if pause >= remaining {
		return 0, false
	}
	r.resendCount++
	r.asked[r.at] = true
	if len(r.asked) < r.endpointCount {
		return 0, true
	}
	r.forget()
	return pause, true
}

// roundDelay is the server's own delay, or doubles each time; a random part is added.
func (r *resumption) roundDelay(broken *Error) time.Duration {
	delay := broken.RetryAfter
	if delay <= 0 {
		delay = r.nextDelay
	}
	r.nextDelay *= 2
	if r.nextDelay > longestDelay {
		r.nextDelay = longestDelay
	}
	return r.budget.jittered(delay)
}

func (r *resumption) mayGoOn(broken *Error, refused, another bool) bool {
	switch {
	case broken.Kind == ErrDraining && refused && r.refusalsLeft > 0:
		r.refusalsLeft--
	case broken.TryAgain() && r.isFailover:
		return another || r.beginRound(broken)
	case broken.TryAgain() && r.attemptsLeft > 0:
		r.attemptsLeft--
	default:
		return false
	}
	return true
}

// beginRound says whether all are to be asked once more.
func (r *resumption) beginRound(broken *Error) bool {
	r.rounds++
	if r.heard {
		return r.rounds < rounds
	}
	return r.rounds < roundsUnheard && broken.Kind != ErrOverloaded
}
