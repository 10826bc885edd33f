package main

import (
	"context"
	"fmt"
	"log"

	paceline "github.com/paceline/paceline/clients/go"
)

func main() {
	client, err := paceline.Dial("127.0.0.1:50050")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	stream, err := client.Generate(context.Background(), paceline.Text("def fibonacci(n):"), paceline.WithMaxTokens(64))
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	for stream.Next() {
		fmt.Print(stream.Chunk().Text)
	}
	if err := stream.Err(); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("\nacceptance %.0f%%\n", 100*stream.Finished().Statistics.AcceptanceRate)
}
