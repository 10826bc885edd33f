package paceline

import (
	"math"
	"testing"
	"time"
)

var (
	lost     = &Error{Kind: ErrConnectionLost}
	draining = &Error{Kind: ErrDraining}
)

// still is a budget whose time stands, and without chance.
func still() *retryBudget {
	now := time.Unix(1e9, 0)
	return &retryBudget{now: func() time.Time { return now }, chance: func() float64 { return 0 }}
}

func wantDelay(t *testing.T, plan *resumption, broken *Error, refused bool, want time.Duration) {
	t.Helper()
	if delay, worthwhile := plan.delay(broken, refused, time.Minute); delay != want || !worthwhile {
		t.Fatalf("delay %v (%v) instead of %v", delay, worthwhile, want)
	}
}

func wantNone(t *testing.T, plan *resumption, broken *Error, refused bool, remaining time.Duration) {
	t.Helper()
	if delay, worthwhile := plan.delay(broken, refused, remaining); worthwhile {
		t.Fatalf("it waits %v", delay)
	}
}

func TestDelaysDoubleUpToTheLongest(t *testing.T) {
	plan := newResumption(7, still())
	for _, want := range []time.Duration{100, 200, 400, 800, 1600, 2000, 2000} {
		wantDelay(t, plan, lost, false, want*time.Millisecond)
	}
	wantNone(t, plan, lost, false, time.Minute)
	wantNone(t, newResumption(1, still()), lost, false, 100*time.Millisecond)
}

func TestAWaitIsLongerByChanceUpToHalfOfItAndUpToASecond(t *testing.T) {
	budget := still()
	budget.chance = func() float64 { return 0.5 }
	wantDelay(t, newResumption(1, budget), lost, false, 125*time.Millisecond)
	full := &Error{Kind: ErrOverloaded, RetryAfter: 30 * time.Second}
	wantDelay(t, newResumption(1, budget), full, false, 30500*time.Millisecond)
}

func TestAWaitThatChanceMakesTooLongTakesNoPlaceAmongTheRetries(t *testing.T) {
	budget := still()
	budget.chance = func() float64 { return 0.5 }
	wantNone(t, newResumption(1, budget), lost, false, 120*time.Millisecond)
	if !budget.nextAt.IsZero() {
		t.Fatal("it has taken one")
	}
}

func TestChanceDiffersFromClientToClient(t *testing.T) {
	drawn := make(map[time.Duration]bool)
	for count := 0; count < 10; count++ {
		delay, _ := newResumption(1, newRetryBudget()).delay(lost, false, time.Minute)
		if delay < firstDelay || delay > firstDelay*3/2 {
			t.Fatalf("delay %v", delay)
		}
		drawn[delay] = true
	}
	if len(drawn) == 1 {
		t.Fatal("they are all alike")
	}
}

func TestADelayThatIsOverOrBeyondAllClocksIsNoReasonToHurry(t *testing.T) {
	wantDelay(t, newResumption(1, still()), &Error{Kind: ErrConnectionLost, RetryAfter: -1}, false, firstDelay)
	never := &Error{Kind: ErrConnectionLost, RetryAfter: math.MaxInt64}
	wantNone(t, newResumption(1, newRetryBudget()), never, false, longestTimeout)
}

func TestThreeRefusalsOfADrainingOrchestratorAreNoResumptions(t *testing.T) {
	plan := newResumption(1, still())
	for _, want := range []time.Duration{100, 200, 400, 800} {
		wantDelay(t, plan, draining, true, want*time.Millisecond)
	}
	wantNone(t, plan, draining, true, time.Minute)
	wantNone(t, newResumption(0, still()), draining, false, time.Minute)
}

func TestAHundredStreamsGoOnAtOnceAndThenTenASecond(t *testing.T) {
	budget := still()
	for count := 0; count < 130; count++ {
		wait, _ := budget.take(time.Minute)
		want := time.Duration(count-99) * 100 * time.Millisecond
		if count < 100 {
			want = 0
		}
		if wait != want {
			t.Fatalf("number %d waits %v instead of %v", count, wait, want)
		}
	}
	if wait, inTime := budget.take(time.Second); inTime {
		t.Fatalf("it waits %v", wait)
	}
	if wait, _ := budget.take(time.Minute); wait != 3100*time.Millisecond {
		t.Fatalf("who had no time took a place: the next waits %v", wait)
	}
	later := budget.now().Add(20 * time.Second)
	budget.now = func() time.Time { return later }
	if wait, _ := budget.take(time.Minute); wait != 0 {
		t.Fatalf("after 20 s it waits %v", wait)
	}
}

func TestATimeIsAWeekAtMost(t *testing.T) {
	for given, want := range map[time.Duration]time.Duration{0: 0, time.Second: time.Second, math.MaxInt64: longestTimeout} {
		if timeout, err := checkTimeout(given); timeout != want || err != nil {
			t.Fatalf("%v is %v (%v)", given, timeout, err)
		}
	}
	if _, err := checkTimeout(-1); err == nil {
		t.Fatal("a negative time is taken")
	}
}

func TestARefusedStreamIsSentAgainAndIsNoResumption(t *testing.T) {
	for _, words := range []string{
		"stream terminated by RST_STREAM with error code: REFUSED_STREAM",
		"Received RST_STREAM with error code 7",
		"reset reason: remote refused stream reset",
	} {
		refused := &Error{Kind: ErrConnectionLost, Message: words}
		plan := newResumption(0, still())
		for _, want := range []time.Duration{50, 100, 200, 400, 800, 1000, 1000, 1000, 1000, 1000} {
			wantDelay(t, plan, refused, true, want*time.Millisecond)
		}
		wantNone(t, plan, refused, true, time.Minute)
		wantNone(t, newResumption(0, still()), refused, false, time.Minute)
		wantNone(t, newResumption(0, still()), refused, true, 50*time.Millisecond)
	}
	for _, words := range []string{"RST_STREAM with error code 8", "RST_STREAM with error code 77"} {
		other := &Error{Kind: ErrConnectionLost, Message: words}
		wantNone(t, newResumption(0, still()), other, true, time.Minute)
	}
}

func TestMoreRefusedStreamsThanTheBudgetHasPlacesAreSentAgainAtOnce(t *testing.T) {
	budget := still()
	refused := &Error{Kind: ErrConnectionLost, Message: "REFUSED_STREAM"}
	for count := 0; count < 1000; count++ {
		wantDelay(t, newResumption(0, budget), refused, true, 50*time.Millisecond)
	}
}
