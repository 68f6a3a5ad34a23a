#!/bin/bash
# ./ray_job.sh http://head-node:8265 syc.yaml
# The command runs in the cluster as the first worker, with a GPU of its own; seven others are tasks with one each.
# /shared is a folder that all nodes see.  Killed, the same command goes on.
set -euo pipefail

ray job submit --address "$1" --working-dir . --entrypoint-num-gpus 1 --no-wait -- \
  flatout steer search "$2" --out "/shared/runs/$(basename "$2" .yaml)" --ray auto --workers 7
