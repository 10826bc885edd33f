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

	// A delay is lengthened by a random part, at most half of it and at most a second, so that clients
	// that were refused at the same time do not return at the same time.
	longestJitter = time.Second

	// More than any generation takes.
	longestTimeout = 7 * 24 * time.Hour

	// A draining orchestrator refuses for moments, until its name leads to another one.
	refusals = 3

	// A stream that a server refused unread is sent again so often (REFUSED_STREAM: too many streams on
	// one connection): 13 s in all.
	resends = 10

	// Rounds over all orchestrators that bring no text, before a generation gives up. A generation that
	// has begun tries longer, since its user would lose the text so far.
	rounds        = 30
	roundsUnheard = 2

	// All streams of one connection can break at once, and resume at once. After that a client retries
	// at most ten times a second, all its generations together.
	retriesAtOnce = 100
	retryInterval = 100 * time.Millisecond
)

// refusedStream matches REFUSED_STREAM, HTTP/2's error 7, in the messages of gRPC's libraries and of
// proxies. The last one is grpc-go's own word for a stream that it never sent, since the server has said
// goodbye meanwhile.
var refusedStream = regexp.MustCompile(
	`(?i)refused[ _]stream|stream refused|RST_STREAM.*error code:? 7\b|^the connection is draining$`)

// isRefusedStream says whether the server refused a stream unread, on a connection that works.
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
// A generation over the limit waits and does not fail: when an orchestrator ends, all its streams may
// continue at another one, but not all at the same moment. Any goroutine may use it.
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

// take takes the next place, and returns the time until it; false, without a place, if that is too long.
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

// A resumption decides how often, and how soon, a generation resumes by itself.
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

// newFailover continues until all endpoints have failed several times.
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

// delay says how long to wait after an error; false if another attempt is not useful. If another
// orchestrator is left, there is no wait. A call was refused if it ended before any message: if the
// orchestrator is shutting down, the next call is then not counted as a resumption.
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

// resend says how long to wait before a refused stream is sent again, which is not a resumption; false
// if the stream was not refused, was refused too often, or no time is left. The pauses are random, so
// that refused streams return one by one; the server works, so the budget is not used.
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

// beginRound says whether another round over all orchestrators is allowed.
func (r *resumption) beginRound(broken *Error) bool {
	r.rounds++
	if r.heard {
		return r.rounds < rounds
	}
	return r.rounds < roundsUnheard && broken.Kind != ErrOverloaded
}
