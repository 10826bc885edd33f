"""A request's work at model servers: servers, sessions, calls, and the driver of its method."""
