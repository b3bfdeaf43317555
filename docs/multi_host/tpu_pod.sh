#!/bin/bash
# A v5e slice of 16 chips: 4 virtual machines with 4 chips each. The same command
# runs on all of them.
set -euo pipefail
name=optax-dist zone=us-west4-a

gcloud compute tpus tpu-vm create "$name" --zone="$zone" \
  --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite
on_all() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}
gcloud compute tpus tpu-vm scp --zone="$zone" --worker=all --recurse \
  optax-dist "$name":
on_all "python3 -m venv venv && venv/bin/pip install -q 'jax[tpu]' './optax-dist[train]'"
on_all "venv/bin/python optax-dist/docs/multi_host/train_one_program.py"
