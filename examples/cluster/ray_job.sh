#!/bin/bash
# ./ray_job.sh http://head-node:8265 syc.yaml
# The driver runs in the cluster; its trials are tasks that ask for a GPU each.
set -euo pipefail

ray job submit --address "$1" --working-dir . --no-wait -- \
  flatout steer search "$2" --out "runs/$(basename "$2" .yaml)" --ray auto
