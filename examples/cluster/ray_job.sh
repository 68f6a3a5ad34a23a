#!/bin/bash
# ./ray_job.sh http://head-node:8265 syc.yaml [FOLDER]
# The command runs in the cluster as the first worker, with a GPU of its own; seven others are tasks with one each.
# FOLDER (/shared/runs) is one that all nodes see.  Killed, the same command goes on.
set -euo pipefail

ray job submit --address "$1" --working-dir . --entrypoint-num-gpus 1 -- \
  flatout steer search "$2" --out "${3:-/shared/runs}/$(basename "$2" .yaml)" --ray auto --workers 7
