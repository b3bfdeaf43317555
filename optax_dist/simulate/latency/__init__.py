"""How long a gradient takes: distributions, hosts, and their names."""
