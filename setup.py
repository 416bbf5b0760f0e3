"""Package metadata. `make setup` is the CPU way to install; on GPUs: pip install 'slime-ppo[gpu,sglang]'."""

from pathlib import Path

from setuptools import find_packages, setup

LINES = Path("slime_ppo/__init__.py").read_text(encoding="utf-8").splitlines()
VERSION = next(line.split('"')[1] for line in LINES if line.startswith("__version__"))

setup(
    name="slime-ppo",
    version=VERSION,
    description="PPO for language models under Megatron model parallelism, runnable and verifiable on any machine",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["slime_ppo", "slime_ppo.*"]),
    package_data={"slime_ppo.tracking": ["report_page/*"]},
    install_requires=[
        "torch>=2.13,<2.15",
        "megatron-core>=0.16.1,<0.20",  # the actor and the critic; 0.17 and later ask for Python 3.12
        "ray[default]>=2.60,<3",  # placement and processes; [default] brings `ray job submit`
        "transformers>=5.19,<6",  # the embedded rollout engine
        "safetensors>=0.5,<1",  # reading and writing model folders
        "tokenizers>=0.22,<1",  # prompts and texts on the driver, without torch
        "numpy>=1.26,<3",
        "pyyaml>=6,<7",
        "tqdm>=4.66,<5",  # progress bar on a terminal
        "jinja2>=3.1,<4",  # chat templates
        "pyarrow>=18,<27",  # prompts in parquet files
        "aiohttp>=3.10,<4",  # requests to SGLang's servers and to reward servers
        "psutil>=6,<8",  # watches the servers' processes
        "pebble>=5.1,<6",  # reward processes that are killed at their timeout
    ],
    extras_require={
        "quickstart": ["glassllm==0.1.0", "vaderSentiment==3.3.2"],  # the model and the reward of the first run
        "gpu": ["transformer-engine[pytorch]>=2.5,<3"],
        "sglang": ["sglang==0.5.23"],
        "math": ["math-verify>=0.9,<1"],  # --rm-type math
        "tensorboard": ["tensorboard>=2.19,<3"],
        "wandb": ["wandb>=0.20,<1"],
        "test": [
            "pytest>=8.3,<10",
            "hypothesis>=6.130,<7",
            "ruff>=0.12,<1",
            "mypy>=1.16,<3",
            "types-PyYAML>=6,<7",
            # CUDA builds of torch bring it; on a CPU its interpreter runs the kernels in the tests
            "triton>=3.3,<4; sys_platform == 'linux'",
        ],
    },
    classifiers=["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"],
)
