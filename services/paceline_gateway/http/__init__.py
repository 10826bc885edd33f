"""HTTP itself: connections, heads, bodies as bytes, TLS, and what browsers may do."""
