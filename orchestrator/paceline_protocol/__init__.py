"""Decoding methods as pure state machines: events in, commands out."""
