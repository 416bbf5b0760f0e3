"""scripts/train_ppo.py with one fault: the critic's training raises on rank 1, where rank 0 waits for it in a collective."""

import os
import runpy

if __name__ == "__main__":
    from slime_ppo.orchestration.rank_role import RankRole

    train = RankRole.train

    def planted(self: RankRole, *arguments: object) -> object:
        if os.environ["RANK"] == "1":
            raise ValueError("planted on rank 1")
        return train(self, *arguments)  # type: ignore[arg-type]

    RankRole.train = planted  # type: ignore[method-assign, assignment]
    runpy.run_path("scripts/train_ppo.py", run_name="__main__")
