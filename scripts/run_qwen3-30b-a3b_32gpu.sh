#!/usr/bin/env bash
# Qwen3-30B-A3B on 4 nodes of 8 GPUs, on the cluster that launch_ray.sh has started; configs/qwen3-30b-a3b_32gpu.yaml says what it needs.
exec "$(dirname "$0")/launch_ray.sh" submit -- --config configs/qwen3-30b-a3b_32gpu.yaml "$@"
