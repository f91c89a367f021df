#!/usr/bin/env bash
# Starts a run on all hosts of a TPU slice, from any machine that can ssh to them:
#   experiments/tpu/train.sh "host0 host1 host2 host3" FOLDER \
#     --config=configs/alfworld.py:7b --workdir=SHARED/alfworld
# FOLDER: a checkout of this repository on every host, with .venv in it
# (pip install -e ".[tpu]"). With gcloud in place of ssh:
#   gcloud compute tpus tpu-vm ssh NAME --worker=all --command="cd FOLDER && \
#     .venv/bin/python experiments/run.py --multi_host --config=... --workdir=..."
set -euo pipefail
hosts=${1:?usage: train.sh "HOST ..." FOLDER FLAGS}
folder=${2:?usage: train.sh "HOST ..." FOLDER FLAGS}
flags=$(printf '%q ' "${@:3}")
pids=()
# Ctrl-C and SIGTERM here reach every host: all save after their update, and end.
stop() {
  for host in $hosts; do
    ssh "$host" pkill -TERM -f experiments/run.py &
  done
}
trap stop INT TERM
for host in $hosts; do
  ssh "$host" "cd $(printf '%q' "$folder") && exec .venv/bin/python experiments/run.py --multi_host $flags" \
    2>&1 | sed -u "s/^/[$host] /" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || status=$?; done
done
exit "$status"
