package main

import (
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	paceline "github.com/paceline/paceline/clients/go"
)

func TestThePromptAndEveryFlagAreRead(t *testing.T) {
	key := filepath.Join(t.TempDir(), "own.key")
	if err := os.WriteFile(key, []byte("sk-own\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	settings, err := parse([]string{
		"--address", "localhost:1", "--max-tokens", "8", "--temperature", "0.5", "--seed", "9007199254740991",
		"--strategy", "distributed", "--stop", "a", "--stop", "b", "--insecure", "--timeout", "1.5",
		"--ca", "ca.pem", "--certificate", "own.pem", "--key", "own.key", "--resume-attempts", "2",
		"--api-key-file", key, "a prompt",
	}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if settings.address != "localhost:1" || settings.prompt != "a prompt" {
		t.Fatalf("settings are %+v", settings)
	}
	// --timeout, --insecure, --api-key-file and one for the TLS files; one for each of the others.
	if len(settings.dial) != 4 || len(settings.generate) != 8 {
		t.Fatalf("%d and %d options", len(settings.dial), len(settings.generate))
	}
}

func TestBadUsageIsExplained(t *testing.T) {
	for arguments, words := range map[string]string{
		"":                      "one PROMPT is needed",
		"a b":                   "one PROMPT is needed",
		"--max-tokens=many x":   "must be a whole number",
		"--seed=-1 x":           "must be a whole number, 0 or more",
		"--temperature=warm x":  "must be a number",
		"--strategy=fastest x":  "must be one of auto, autoregressive",
		"--max-tokens":          "needs an argument",
		"--no-such-flag prompt": "not defined",
		"--api-key-file= x":     "no such file",
	} {
		var output strings.Builder
		if _, err := parse(strings.Fields(arguments), &output); err == nil || !strings.Contains(output.String(), words) {
			t.Errorf("%q: %v, %s", arguments, err, output.String())
		}
	}
	if _, err := parse([]string{"-h"}, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("-h: %v", err)
	}
}

func TestAnErrorSaysWhatToDo(t *testing.T) {
	for _, failed := range []struct {
		err    error
		code   int
		output string
	}{
		{nil, 0, ""},
		{&paceline.Error{Kind: paceline.ErrClientCancelled}, exitCancelled, ""},
		{&paceline.Error{Kind: paceline.ErrOverloaded, Message: "full"}, exitFailed,
			"paceline-generate: full\nOVERLOADED: retry, or go elsewhere\n"},
		{&paceline.Error{Kind: paceline.ErrUnauthenticated, Message: "wrong"}, exitFailed,
			"paceline-generate: wrong\nUNAUTHENTICATED: --api-key-file names the file with your key\n"},
		{&paceline.Error{Kind: paceline.ErrConnectionLost, Message: "gone"}, exitFailed,
			"paceline-generate: gone\nConnectionLost: retry, or go elsewhere; is the address right?\n"},
		{io.ErrClosedPipe, exitFailed, "paceline-generate: io: read/write on closed pipe\n"},
	} {
		var output strings.Builder
		if code := report(failed.err, &output); code != failed.code || output.String() != failed.output {
			t.Errorf("%v: %d, %q", failed.err, code, output.String())
		}
	}
}
