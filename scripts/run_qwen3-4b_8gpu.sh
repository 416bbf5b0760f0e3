#!/usr/bin/env bash
# Qwen3-4B on one node of 8 GPUs, on the cluster that launch_ray.sh has started; configs/qwen3-4b_8gpu.yaml says what it needs.
exec "$(dirname "$0")/launch_ray.sh" submit -- --config configs/qwen3-4b_8gpu.yaml "$@"
