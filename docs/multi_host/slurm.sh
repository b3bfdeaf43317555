#!/bin/bash
#SBATCH --job-name=optax-dist
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00

# Since Slurm 22.05, srun does not take --cpus-per-task from the job.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# One process per GPU. Do not add --gpus-per-task or --gpu-bind: each process has
# to see all GPUs of its node, and JAX picks the one of its SLURM_LOCALID.
srun --kill-on-bad-exit=1 .venv/bin/python train_one_program.py
