"""A request's work at model servers: crew, sessions, calls, and the driver that runs a method."""
