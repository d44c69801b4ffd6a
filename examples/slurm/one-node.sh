#!/usr/bin/env bash
# A run on one node, whose launcher starts a rank for each GPU and survives the loss of some:
#     sbatch examples/slurm/one-node.sh resnet50 --data /data/imagenet --out /shared/runs/resnet50
#SBATCH --job-name=torusgd-one-node
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

exec srun torusgd train "$@" --requeue
