"""A small Ray cluster for the whole test run, in a process of its own, for drivers that join by RAY_ADDRESS.

python -m tests.helpers.ray_head NUM_CPUS        prints the address, ends when its standard input closes
"""

import logging
import sys

import ray


def main() -> None:
    context = ray.init(
        address="local",
        num_cpus=int(sys.argv[1]),
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        logging_level=logging.CRITICAL,
        log_to_driver=False,
    )
    sys.stdout.write(context.address_info["address"] + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
