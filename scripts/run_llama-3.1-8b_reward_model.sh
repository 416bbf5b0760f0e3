#!/usr/bin/env bash
# Llama-3.1-8B with a reward model on one node, on the cluster that launch_ray.sh has started; configs/llama-3.1-8b_reward_model.yaml says what it needs.
exec "$(dirname "$0")/launch_ray.sh" submit -- --config configs/llama-3.1-8b_reward_model.yaml "$@"
