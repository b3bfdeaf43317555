"""How long steps take: distributions, hosts, and their names."""
