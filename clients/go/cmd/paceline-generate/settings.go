package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	paceline "github.com/paceline/paceline/clients/go"
)

const strategies = "auto, autoregressive, speculative, distributed, self_speculative"

// settings are the command line's options. Limits are checked by the library and the server.
type settings struct {
	address  string
	prompt   string
	dial     []paceline.DialOption
	generate []paceline.GenerateOption
}

// parse reads the arguments, and writes errors to output.
func parse(arguments []string, output io.Writer) (*settings, error) {
	var s settings
	flags := flag.NewFlagSet("paceline-generate", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.Usage = func() {
		fmt.Fprintln(output, "usage: paceline-generate [flags] PROMPT")
		flags.PrintDefaults()
	}
	addTLS := s.connectionFlags(flags)
	s.generateFlags(flags)
	if err := flags.Parse(arguments); err != nil {
		return nil, err
	}
	if flags.NArg() != 1 {
		fmt.Fprintf(output, "one PROMPT is needed, after the flags, not %d\n", flags.NArg())
		flags.Usage()
		return nil, errors.New("no prompt")
	}
	addTLS()
	s.prompt = flags.Arg(0)
	return &s, nil
}

// connectionFlags returns what to call when the flags have been parsed.
func (s *settings) connectionFlags(flags *flag.FlagSet) (addTLS func()) {
	var files paceline.TLS
	flags.StringVar(&s.address, "address", "127.0.0.1:50050", "the orchestrator, `HOST:PORT`")
	flags.StringVar(&files.CAFile, "ca", "", "PEM `file` with the authorities to trust; turns TLS on")
	flags.StringVar(&files.CertificateFile, "certificate", "", "the client's own certificate: a PEM `file`")
	flags.StringVar(&files.KeyFile, "key", "", "its private key: a PEM `file`")
	flags.Func("api-key-file", "`file` with the API key, if the orchestrator requires one", func(name string) error {
		key, err := keyIn(name)
		s.dial = append(s.dial, paceline.WithToken(func(context.Context) (string, error) { return key, nil }))
		return err
	})
	insecure := flags.Bool("insecure", false, "allow plaintext to another machine")
	s.number(flags, "timeout", "give up after so many `seconds` (120)", func(seconds float64) {
		s.dial = append(s.dial, paceline.WithTimeout(time.Duration(seconds*float64(time.Second))))
	})
	return func() {
		if files.CAFile != "" || files.CertificateFile != "" || files.KeyFile != "" {
			s.dial = append(s.dial, paceline.WithTLS(files))
		}
		if *insecure {
			s.dial = append(s.dial, paceline.WithInsecure())
		}
	}
}

// keyIn reads the one key in a file. Other contents are not shown.
func keyIn(name string) (string, error) {
	content, err := os.ReadFile(name)
	if err != nil {
		return "", err
	}
	key := strings.TrimSpace(string(content))
	if key == "" || strings.IndexFunc(key, func(r rune) bool { return r < '!' || r > '~' }) >= 0 {
		return "", errors.New("must hold one key: printable ASCII without spaces")
	}
	return key, nil
}

func (s *settings) generateFlags(flags *flag.FlagSet) {
	add := func(option paceline.GenerateOption) { s.generate = append(s.generate, option) }
	s.integer(flags, "max-tokens", "`tokens` to generate at most (server: 256)", func(count int) {
		add(paceline.WithMaxTokens(count))
	})
	s.number(flags, "temperature", "a `number`; 0, the server's default, is greedy", func(temperature float64) {
		add(paceline.WithTemperature(temperature))
	})
	flags.Func("seed", "the same `seed` gives the same text; without it one is chosen", func(value string) error {
		seed, err := strconv.ParseUint(value, 10, 64)
		add(paceline.WithSeed(seed))
		return asUsage(err, "must be a whole number, 0 or more")
	})
	flags.Func("strategy", "`how` to decode: "+strategies, func(value string) error {
		for _, strategy := range strings.Split(strategies, ", ") {
			if value == strategy {
				add(paceline.WithStrategy(paceline.Strategy(value)))
				return nil
			}
		}
		return errors.New("must be one of " + strategies)
	})
	flags.Func("stop", "end before this `string`; can be given again", func(value string) error {
		add(paceline.WithStop(value))
		return nil
	})
	add(paceline.WithResumeAttempts(2))
	s.integer(flags, "resume-attempts", "`times` to go on by itself after a broken connection (2)", func(attempts int) {
		add(paceline.WithResumeAttempts(attempts))
	})
}

func (s *settings) integer(flags *flag.FlagSet, name, usage string, set func(int)) {
	flags.Func(name, usage, func(value string) error {
		number, err := strconv.Atoi(value)
		set(number)
		return asUsage(err, "must be a whole number")
	})
}

func (s *settings) number(flags *flag.FlagSet, name, usage string, set func(float64)) {
	flags.Func(name, usage, func(value string) error {
		number, err := strconv.ParseFloat(value, 64)
		set(number)
		return asUsage(err, "must be a number")
	})
}

func asUsage(err error, words string) error {
	if err != nil {
		return errors.New(words)
	}
	return nil
}
