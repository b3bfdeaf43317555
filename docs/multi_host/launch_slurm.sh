#!/bin/bash
#SBATCH --job-name=optax-dist
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1   # A launcher on each host, with all of its GPUs.
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@90      # SIGTERM 90 s before the end: replicas leave.
#SBATCH --no-kill             # A host that fails does not end the job, ...
#SBATCH --requeue             # ... and where it does, the job starts again.
#SBATCH --open-mode=append
set -euo pipefail

# The secret is in a file that the hosts share and nobody else can read. This part
# of the job runs on the first host only.
export OPTAX_DIST_SECRET_FILE=$PWD/.secret-$SLURM_JOB_ID
(umask 077 && .venv/bin/python -c 'import secrets; print(secrets.token_hex(16))' \
  > "$OPTAX_DIST_SECRET_FILE")
trap 'rm -f "$OPTAX_DIST_SECRET_FILE" .tls-"$SLURM_JOB_ID".*' EXIT

# With certificates, here one of this job alone, all that leaves a host is encrypted:
# tls=$PWD/.tls-$SLURM_JOB_ID
# (umask 077 && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 \
#   -nodes -days 30 -subj /CN=job -keyout "$tls.key" -out "$tls.pem" 2> /dev/null)
# export OPTAX_DIST_CERTIFICATES=$tls.pem:$tls.key:$tls.pem

# Since Slurm 22.05, srun does not take --cpus-per-task from the job.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# JAX finds in SLURM's variables which host this is, and where the first one is. Without
# --no-kill, srun ends the launchers of all hosts when one host fails.
srun --no-kill --kill-on-bad-exit=0 .venv/bin/optax-dist launch \
  --replicas-to-aggregate 3 --min-replicas 2 --grace 60 \
  --output "runs/$SLURM_JOB_ID" --resume train_replica.py
