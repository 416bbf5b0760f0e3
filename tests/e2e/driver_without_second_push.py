"""scripts/train_ppo.py with one fault: from version 1 on the engine keeps the first weights, but reports the new version."""

import runpy

from slime_ppo.config.cluster import ClusterConfig
from slime_ppo.orchestration.ray_environment import prepare_ray_environment

if __name__ == "__main__":
    prepare_ray_environment(ClusterConfig())

    from slime_ppo.orchestration import ray_train_group
    from slime_ppo.weight_sync.bucket import Bucket

    first_bytes: dict[int, object] = {}
    export = ray_train_group.RayTrainGroup.export_bucket

    def stale(self: ray_train_group.RayTrainGroup, bucket: Bucket) -> object:
        return first_bytes.setdefault(bucket.index, export(self, bucket))

    ray_train_group.RayTrainGroup.export_bucket = stale  # type: ignore[method-assign, assignment]
    runpy.run_path("scripts/train_ppo.py", run_name="__main__")
