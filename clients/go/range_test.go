//go:build go1.23

package paceline_test

import (
	"iter"
	"testing"

	paceline "github.com/paceline/paceline/clients/go"
)

func TestAForRangesOverAStream(t *testing.T) {
	var chunks iter.Seq2[paceline.Chunk, error] = generate(t, serve(t).dial(t)).Chunks()
	text := ""
	for chunk, err := range chunks {
		if err != nil {
			t.Fatal(err)
		}
		text += chunk.Text
	}
	if text != wholeText {
		t.Fatalf("the text is %q", text)
	}
}

func TestBreakingOutOfARangeCancelsItAtTheServer(t *testing.T) {
	server := serve(t, leg{chunks: 1, hangs: true})
	for range generate(t, server.dial(t)).Events() {
		break
	}
	receive(t, server.cancelled, "the server hears of the cancel")
}
