"""What a round costs beyond its forwards, by RPCs and by messages of a stream."""
