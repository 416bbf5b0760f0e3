#!/usr/bin/env bash
# Qwen2.5-0.5B-Instruct on one GPU, on the cluster that launch_ray.sh has started; configs/qwen2.5-0.5b_1gpu.yaml says what it needs.
exec "$(dirname "$0")/launch_ray.sh" submit -- --config configs/qwen2.5-0.5b_1gpu.yaml "$@"
