"""Messages, arrays and liveness between replicas: one connection per pair."""
