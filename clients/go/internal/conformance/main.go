// Conformance is the Go client's driver in tests/clients: one JSON request a line in, one JSON answer a
// line out. It acts and reports; it judges nothing.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	paceline "github.com/paceline/paceline/clients/go"
)

// lineBytes has room for a prompt of the size limit, escaped.
const lineBytes = 64 << 20

func main() {
	driver := driver{clients: make(map[string]*paceline.Client)}
	if err := driver.serve(os.Stdin, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// A driver answers requests, and keeps the clients that they name.
type driver struct {
	clients map[string]*paceline.Client
	cancels []context.CancelFunc // called at the end: that must not be what cancels a stream
}

func (d *driver) serve(input io.Reader, output io.Writer) error {
	lines := bufio.NewScanner(input)
	lines.Buffer(nil, lineBytes)
	answers := json.NewEncoder(output)
	for lines.Scan() {
		var asked request
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			return err
		}
		if err := answers.Encode(d.reply(&asked)); err != nil {
			return err
		}
	}
	return lines.Err()
}

func (d *driver) reply(asked *request) interface{} {
	began := time.Now()
	told := &answer{Case: asked.Case, report: newReport(), Events: []eventReport{}}
	err := d.do(asked, told)
	var why unsupported
	if errors.As(err, &why) {
		return map[string]interface{}{"case": asked.Case, "unsupported": string(why)}
	}
	if err != nil {
		told.Error = reportError(err)
	}
	told.ElapsedSeconds = time.Since(began).Seconds()
	return told
}

func (d *driver) do(asked *request, told *answer) error {
	if asked.Do == "close" {
		return d.close(asked.Client)
	}
	client, err := d.client(asked)
	if err != nil {
		return err
	}
	switch asked.Do {
	case "generate":
		return d.generate(client, asked, told)
	case "system_info":
		info, err := client.Info(asked.outgoing())
		if err == nil {
			told.System = reportSystem(info)
		}
		return err
	}
	return unsupported(fmt.Sprintf("do %q", asked.Do))
}

func (d *driver) close(name string) error {
	client, open := d.clients[name]
	if !open {
		return nil
	}
	delete(d.clients, name)
	for _, cancel := range d.cancels {
		cancel()
	}
	d.cancels = nil
	return client.Close()
}

func (d *driver) client(asked *request) (*paceline.Client, error) {
	if client, open := d.clients[asked.Client]; open {
		return client, nil
	}
	options, err := asked.dialOptions()
	if err != nil {
		return nil, err
	}
	address := asked.Address
	if asked.Several != nil {
		address = strings.Join(asked.Several, ",")
	}
	client, err := paceline.Dial(address, options...)
	if err == nil {
		d.clients[asked.Client] = client
	}
	return client, err
}

func (d *driver) generate(client *paceline.Client, asked *request, told *answer) error {
	if asked.SecondReader {
		return unsupported("a stream is its own reader in Go: whoever calls Next goes on")
	}
	prompt, err := asked.prompt()
	if err != nil {
		return err
	}
	options, err := asked.generateOptions()
	if err != nil {
		return err
	}
	ctx, cancel, err := asked.context()
	d.cancels = append(d.cancels, cancel)
	if err != nil {
		return err
	}
	stream, err := client.Generate(ctx, prompt, options...)
	if err != nil {
		return err
	}
	read(stream, asked, told)
	if !asked.ThenResume || told.Error == nil && !told.Cancelled {
		return nil
	}
	resumed, err := client.Resume(context.Background(), stream)
	if err != nil {
		return err
	}
	rest := answer{report: newReport()}
	read(resumed, &request{}, &rest)
	told.Resumed = &rest.report
	return nil
}

// read reads a stream to its end, or cancels it where it was asked to.
func read(stream *paceline.Stream, asked *request, told *answer) {
	began := time.Now()
	if asked.Cancel.AfterSeconds != nil {
		alarm := time.AfterFunc(seconds(*asked.Cancel.AfterSeconds), stream.Close)
		defer alarm.Stop()
	}
	advance := stream.Next
	if asked.Events {
		advance = stream.NextEvent
	}
	for advance() {
		told.add(stream.Event(), time.Since(began))
		if asked.Cancel.AfterChunks == len(told.Chunks) && asked.Cancel.AfterChunks > 0 {
			stream.Close()
		}
		time.Sleep(seconds(asked.PauseSeconds))
	}
	told.end(stream, asked.Cancel != cancellation{})
}
