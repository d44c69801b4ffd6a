#!/usr/bin/env bash
# A run on two nodes, a rank for each GPU, that Slurm queues again when its time is over:
#     sbatch examples/slurm/train.sh resnet50 --data /data/imagenet --out /shared/runs/resnet50
#SBATCH --job-name=torusgd-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
# SIGUSR1 goes to the ranks, since srun starts them, 120 s before the end or up to a minute earlier: time for a step
# and a checkpoint.
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# Ranks exit with 75 after SIGUSR1; rank 0 then has Slurm queue the job again, and the same command goes on.
exec srun --kill-on-bad-exit=0 torusgd train "$@" --requeue
