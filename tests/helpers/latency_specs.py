"""A latency of each kind, as text."""

SPECS = [
  "constant:2",
  "exponential:0.5",
  "shifted-exponential:1,0.5",
  "lognormal:-1,0.5",
  "pareto:1,3.5",
  "gamma:2,0.5",
  "bernoulli:1,10,0.05",
  "slow-hosts:0.25,4,exponential:1",
]
