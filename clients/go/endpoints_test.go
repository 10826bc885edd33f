package paceline

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"
)

func dialed(t *testing.T, addresses string) (*endpoints, *time.Time) {
	t.Helper()
	some, err := dialEndpoints(addresses, dialOptions{insecure: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = some.close() })
	now := time.Unix(1e9, 0)
	some.now = func() time.Time { return now }
	return some, &now
}

const three = "127.0.0.1:1, 127.0.0.1:2, 127.0.0.1:3"

// chosen returns how often each is chosen of so many calls that follow on one another.
func chosen(some *endpoints, count int) map[*endpoint]int {
	found := make(map[*endpoint]int)
	for ; count > 0; count-- {
		one := some.choose(nil)
		found[one]++
		some.giveBack(one)
	}
	return found
}

func TestCallsTakeTurnsAndWhoHasTheFewestIsNext(t *testing.T) {
	some, _ := dialed(t, three)
	if found := chosen(some, 6); len(found) != 3 || found[some.all[0]] != 2 {
		t.Fatalf("%v", found)
	}
	busy := some.choose(nil)
	if found := chosen(some, 6); found[busy] != 0 {
		t.Fatalf("%v", found)
	}
}

func TestWhoWasAskedComesLast(t *testing.T) {
	some, _ := dialed(t, three)
	asked := map[*endpoint]bool{some.all[0]: true, some.all[1]: true}
	if one := some.choose(asked); one != some.all[2] {
		t.Fatal("another one")
	}
}

func TestWhoFailedRestsLongerEachTimeUntilItAnswers(t *testing.T) {
	some, now := dialed(t, three)
	sick := some.all[0]
	for _, rest := range []time.Duration{100, 200, 400} {
		some.failed(sick)
		some.failed(sick) // calls that end together are one failure
		*now = now.Add(rest*time.Millisecond - 1)
		if chosen(some, 6)[sick] != 0 {
			t.Fatalf("it is asked before %v", rest)
		}
		*now = now.Add(1)
		if chosen(some, 6)[sick] == 0 {
			t.Fatalf("it is not asked after %v", rest)
		}
	}
	some.answered(sick)
	some.failed(sick)
	*now = now.Add(firstRest)
	if chosen(some, 6)[sick] == 0 {
		t.Fatal("it is not asked")
	}
}

// gRPC says of an address that refuses connections that there can be no stream, and not that one has
// ended. It has the fewest calls, so without a rest every request would ask it first, and wait for its
// place among the retries before it asks another.
func TestWhoRefusesConnectionsRests(t *testing.T) {
	client, err := Dial("127.0.0.1:1,127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	stream, err := client.Generate(context.Background(), Text("x"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = stream.Text(); !errors.Is(err, ErrConnectionLost) {
		t.Fatalf("%v", err)
	}
	for index, each := range client.endpoints.all {
		if each.failures == 0 {
			t.Errorf("endpoint %d has not failed", index)
		}
	}
}

func TestSeveralAddressesOrANameMayBeSeveralOrchestrators(t *testing.T) {
	for address, want := range map[string]bool{
		"127.0.0.1:1": false, "localhost:1": false, "[::1]:1": false, "10.0.0.1:1": false, "unix:/tmp/x": false,
		"127.0.0.1:1,127.0.0.1:2": true, "paceline.example:1": true, "dns:///paceline.example:1": true,
	} {
		if some, _ := dialed(t, address); some.mayBeSeveral() != want {
			t.Fatalf("%s: %v", address, !want)
		}
	}
}

func TestANameIsResolvedAndNotPassedThrough(t *testing.T) {
	to, err := parseAddress("paceline.example:1")
	if err != nil || to.name != "dns:///paceline.example:1" {
		t.Fatalf("%+v, %v", to, err)
	}
}

func TestNothingIsWaitedForWhileAnotherIsLeftAndATextThatHasBegunIsWorthThirtyRounds(t *testing.T) {
	some, _ := dialed(t, "127.0.0.1:1,127.0.0.1:2")
	plan := newFailover(2, still())
	fails := func(plan *resumption, index int, broken *Error) (time.Duration, bool) {
		plan.at = some.all[index%2]
		return plan.delay(broken, true, time.Minute)
	}
	for index, want := range []time.Duration{0, firstDelay, 0} {
		if delay, worthwhile := fails(plan, index, lost); delay != want || !worthwhile {
			t.Fatalf("%d: %v, %v", index, delay, worthwhile)
		}
	}
	if _, worthwhile := fails(plan, 3, lost); worthwhile {
		t.Fatal("a third round before any text")
	}
	plan = newFailover(2, still())
	plan.hear()
	for index := 0; index < 59; index++ {
		if _, worthwhile := fails(plan, index, lost); !worthwhile {
			t.Fatalf("it ends after %d", index)
		}
	}
	if _, worthwhile := fails(plan, 59, lost); worthwhile {
		t.Fatal("a 31st round")
	}
	plan = newFailover(2, still())
	full := &Error{Kind: ErrOverloaded}
	fails(plan, 0, full)
	if _, worthwhile := fails(plan, 1, full); worthwhile {
		t.Fatal("it knocks again where all are full")
	}
}

func TestATokenThatCannotBeHadFailsTheCall(t *testing.T) {
	shut := errors.New("the vault is shut")
	client, err := Dial("127.0.0.1:1", WithToken(func(context.Context) (string, error) { return "", shut }))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	stream, err := client.Generate(context.Background(), Text("x"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = stream.Text(); !errors.Is(err, shut) || !errors.Is(err, ErrPermissionDenied) {
		t.Fatalf("%v", err)
	}
	if _, err = client.Info(context.Background()); !errors.Is(err, shut) {
		t.Fatalf("%v", err)
	}
}

func TestMetadataOfTheContextIsChecked(t *testing.T) {
	client, err := Dial("127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx := metadata.AppendToOutgoingContext(context.Background(), "x-a", "line\nbreak")
	_, err = client.Info(ctx)
	wantViolation(t, err, "metadata")
}
