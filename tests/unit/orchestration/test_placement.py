"""The order in which ranks take the bundles of a placement group."""

from slime_ppo.orchestration.placement import node_by_node


def test_node_by_node_bundles_of_a_node_stand_together_in_the_order_of_their_first() -> None:
    assert node_by_node({0: "b", 1: "a", 2: "b", 3: "a"}) == [0, 2, 1, 3]
    assert node_by_node({3: "a", 2: "a", 1: "b", 0: "b"}) == [0, 1, 2, 3]
    assert node_by_node({0: "a", 1: "a"}) == [0, 1]
