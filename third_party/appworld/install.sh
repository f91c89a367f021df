#!/usr/bin/env bash
# Installs AppWorld into an environment of its own: its pins (pydantic 1, fastapi 0.110)
# do not go with ours. Usage: third_party/appworld/install.sh FOLDER
set -euo pipefail
folder=$(mkdir -p "${1:?usage: install.sh FOLDER}" && cd "$1" && pwd)
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install appworld==0.1.3.post1
"$folder/venv/bin/appworld" install
"$folder/venv/bin/appworld" download data --root "$folder" || echo \
  "The task data could not be downloaded. Later: $folder/venv/bin/appworld download data --root $folder"
echo "Set: --config.env.appworld.python=$folder/venv/bin/python" \
  "--config.env.appworld.root=$folder"
