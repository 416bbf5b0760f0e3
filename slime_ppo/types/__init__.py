"""A type per stage: Prompt -> Sample -> RolloutBatch -> StepPlan -> MicroBatch -> tensors. No torch but in micro_batch."""
