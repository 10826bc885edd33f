// Package paceline is Paceline's Go client: a large model's exact output, faster.
//
//	client, err := paceline.Dial("127.0.0.1:50050")
//	...
//	stream, err := client.Generate(ctx, paceline.Text("def fib(n):"), paceline.WithMaxTokens(64))
//	...
//	defer stream.Close()
//	for stream.Next() {
//		fmt.Print(stream.Chunk().Text)
//	}
//	if err := stream.Err(); err != nil {
//		...
//	}
//
// Cancelling the context, or closing the stream, cancels the work on every server. All errors are
// of type *Error; errors.Is tells their kinds apart.
package paceline
