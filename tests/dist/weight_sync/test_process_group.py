"""The group of the trainer's rank 0 and a server's rank: what goes wrong in it is told, and leaves rank 0 able to meet again."""

from tests.helpers.rank_pool import RankPool


def test_engine_group_broadcasts_survives_a_server_that_takes_no_part_and_meets_again_under_a_new_name(rank_pool: RankPool) -> None:
    trainer, server = rank_pool.run("tests.dist.weight_sync.group_ranks:meet_twice", world=2)
    assert server["received"] == [[7], [9]]
    assert "join them first" in trainer["before"]
    assert "the broadcast to the servers broke" in trainer["alone"] and "--weight-sync-timeout-s" in trainer["alone"]
    assert 1.4 <= trainer["seconds"] < 10
    assert "join them first" in trainer["after it"]
    assert "the broadcast to the servers broke" in trainer["left"] and trainer["left after"] < 1
    assert "not all 2 ranks joined" in trainer["nobody"] and trainer["nobody after"] < 1, "both before the group's timeout"
    assert len(set(trainer["names"])) == 2
