// Paceline-generate continues a prompt, and streams the text to standard output. The last line, on
// standard error, has the numbers of tokens and seconds. Ctrl-C cancels the work on all servers.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	paceline "github.com/paceline/paceline/clients/go"
)

const (
	exitFailed    = 1
	exitUsage     = 2
	exitCancelled = 130
)

func main() {
	settings, err := parse(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		os.Exit(exitUsage)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(report(generate(ctx, settings, os.Stdout, os.Stderr), os.Stderr))
}

// generate streams the text to one writer, and a line of statistics to the other.
func generate(ctx context.Context, settings *settings, text, statistics io.Writer) error {
	client, err := paceline.Dial(settings.address, settings.dial...)
	if err != nil {
		return err
	}
	defer client.Close()
	stream, err := client.Generate(ctx, paceline.Text(settings.prompt), settings.generate...)
	if err != nil {
		return err
	}
	defer stream.Close()
	for stream.Next() {
		if _, err := io.WriteString(text, stream.Chunk().Text); err != nil {
			return err
		}
	}
	if stream.Started() != nil {
		fmt.Fprintln(text)
	}
	if stream.Err() == nil {
		fmt.Fprintln(statistics, statisticsLine(stream))
	}
	return stream.Err()
}

func statisticsLine(stream *paceline.Stream) string {
	started, finished := stream.Started(), stream.Finished()
	statistics := finished.Statistics
	return fmt.Sprintf("%d tokens in %.2f s · first after %d ms · %s on %d targets · acceptance %.0f%% · seed %d · ended by %s",
		finished.Usage.CompletionTokenCount, statistics.Total.Seconds(),
		statistics.TimeToFirstToken.Milliseconds(), started.Strategy, finished.TargetsUsed,
		100*statistics.AcceptanceRate, started.Seed, finished.FinishReason)
}

func advice(failure *paceline.Error) string {
	if failure.Is(paceline.ErrUnauthenticated) {
		return "--api-key-file names the file with your key"
	}
	return failure.Kind.Advice()
}

// report prints an error with its advice, and returns the exit code.
func report(err error, output io.Writer) int {
	var failure *paceline.Error
	switch {
	case err == nil:
		return 0
	case errors.Is(err, paceline.ErrClientCancelled):
		return exitCancelled
	case errors.As(err, &failure):
		name := failure.Reason()
		if name == "" {
			name = string(failure.Kind)
		}
		fmt.Fprintf(output, "paceline-generate: %s\n%s: %s\n", failure.Message, name, advice(failure))
	default:
		fmt.Fprintf(output, "paceline-generate: %v\n", err)
	}
	return exitFailed
}
